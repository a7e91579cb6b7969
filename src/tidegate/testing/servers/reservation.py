"""A TCP port of 127.0.0.1 that stays reserved while its server is down.

The port is bound with SO_REUSEADDR, without listening. On Linux another SO_REUSEADDR socket can then bind it and listen
(Redis, MariaDB, PostgreSQL and asyncio all set the option), but the kernel gives it to no other process as a free port,
neither for `bind(0)` nor for `connect`. A client that connects while no server listens is refused. Without the
reservation, an outgoing connection could take the port between a kill and a restart.
"""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


class PortReservation:
    """One reserved port, until `release()`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """End the reservation. Safe to call twice."""
        self._socket.close()
