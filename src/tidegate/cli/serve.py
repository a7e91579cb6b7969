"""`tidegate serve`: run the server until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from tidegate.cli.outcomes import ExitCode, json_option
from tidegate.cli.settings import setting_options
from tidegate.errors import ConfigurationError, RegionMismatch
from tidegate.server.process.config import ORIGIN_FILE, Loaded, ServerConfig

__all__ = ["renamed", "serve"]


@click.command()
@setting_options
@json_option
def serve(load_settings: Callable[[], Loaded], as_json: bool) -> ExitCode:
    """Run the rate limit server.

    Without options it stores everything in ./tidegate-data and needs no other service; the first start prints a root
    key. SIGTERM stops it gracefully, SIGHUP reloads keys and log level. --json is the same as --log-format json: one
    JSON object per line; the URL (and the first key) on stdout, the log on stderr.
    """
    from tidegate.server.process.config_load import check_files
    from tidegate.server.process.service import run
    from tidegate.telemetry.logging import configure

    loaded = load_settings()
    check_files(loaded)
    config = loaded.config
    if as_json:
        config = msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, format="json"))
    configure(config.log.level, config.log.format, secrets=config.secrets)
    for warning in loaded.warnings:
        logging.getLogger("tidegate.config").warning("%s", warning)

    def reload() -> ServerConfig:
        again = load_settings()
        check_files(again)
        return again.config

    try:
        return ExitCode.OK if run(config, reload=reload) == 0 else ExitCode.ERROR
    except RegionMismatch as error:
        if config.origin is None:
            raise ConfigurationError(f"{error}. Or {renamed(config)}") from error
        raise


def renamed(config: ServerConfig) -> str:
    """How to change the region of a data directory."""
    file = Path(config.data_dir).absolute() / ORIGIN_FILE
    return (
        f"to move this directory to region {config.region_name!r}, stop its server and remove {file}*: they hold "
        "only the counts of current windows"
    )
