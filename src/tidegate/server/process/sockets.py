"""The sockets of a server: one for each listener that is configured, bound before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from tidegate.errors import ConfigurationError
from tidegate.server.http1.listener import bind
from tidegate.server.process.config import SETTINGS, ServerConfig, split_listen

Sockets = dict[str, socket.socket]
"""By the setting that names their address: `listen`, `rls.address`, `check.address`."""


def bind_sockets(config: ServerConfig, *, shared: bool, ports: Mapping[str, int] | None = None) -> Sockets:
    """Bind all of them, or none. `ports`: those that another process has bound already, instead of the configured."""
    flags = {setting.path: setting.flag for setting in SETTINGS}
    bound: Sockets = {}
    for path, address in config.addresses.items():
        host, port = split_listen(address)
        try:
            bound[path] = bind(host, port if ports is None else ports[path], shared=shared)
        except OSError as error:
            close_sockets(bound)
            raise ConfigurationError(
                f"{path}: cannot listen on {address}: {error.strerror}; stop the process that uses it, or choose "
                f"another {flags[path]}"
            ) from error
    return bound


def ports_of(bound: Sockets) -> dict[str, int]:
    """The ports that they have."""
    return {path: each.getsockname()[1] for path, each in bound.items()}


def close_sockets(bound: Sockets) -> None:
    """Close all of them."""
    for each in bound.values():
        each.close()
