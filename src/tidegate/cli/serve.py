"""`tidegate serve`: run the server until it is told to stop."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import msgspec

from tidegate.cli.outcomes import ExitCode, json_option
from tidegate.cli.settings import setting_options
from tidegate.errors import ConfigurationError, RegionMismatch
from tidegate.server.process.config import ORIGIN_FILE, Loaded, ServerConfig

__all__ = ["renamed", "serve"]

# What binding a socket may answer, and nothing else in a server that starts.
LISTEN_ERRORS: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT})


@click.command()
@setting_options
@json_option
def serve(load_settings: Callable[[], Loaded], as_json: bool) -> ExitCode:
    """Run the rate limit server.

    Without options it keeps everything in ./tidegate-data and needs nothing else; the first start prints a root key.
    SIGTERM stops it gracefully, SIGHUP reads keys and log level again. --json is the same as --log-format json: one
    JSON object a line; on stdout where the server is (and the first key), on stderr the log.
    """
    from tidegate.server.process.config_load import check_certificate
    from tidegate.server.process.service import run
    from tidegate.telemetry.logging import configure

    loaded = load_settings()
    check_certificate(loaded)
    config = loaded.config
    if as_json:
        config = msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, format="json"))
    configure(config.log.level, config.log.format, secrets=config.secrets)
    for warning in loaded.warnings:
        logging.getLogger("tidegate.config").warning("%s", warning)

    def reload() -> ServerConfig:
        again = load_settings()
        check_certificate(again)
        return again.config

    try:
        return ExitCode.OK if run(config, reload=reload) == 0 else ExitCode.ERROR
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in LISTEN_ERRORS:
            raise ConfigurationError(
                f"listen: cannot listen on {config.listen}: {error.strerror}; stop what listens there, or choose "
                "another --listen"
            ) from error
        raise
    except RegionMismatch as error:
        if config.origin is None:
            raise ConfigurationError(f"{error}. Or {renamed(config)}") from error
        raise


def renamed(config: ServerConfig) -> str:
    """What to do with the counts in a data directory whose server is to have another region's name."""
    file = Path(config.data_dir).absolute() / ORIGIN_FILE
    return (
        f"stop its server and remove {file}* if this directory is to belong to region {config.region_name!r} from now "
        "on: it holds the counts of running windows, nothing else"
    )
