"""A TCP port of 127.0.0.1 that stays ours while its server is down.

The port is bound, with SO_REUSEADDR, and never listened on. On Linux another SO_REUSEADDR socket may then bind and
listen on it (Redis, MariaDB, PostgreSQL and asyncio all set the option), while nobody who asks the kernel for any
free port, neither by `bind(0)` nor by `connect`, is given it. A client that connects while no server listens is
refused, as it should be. Merely picking a free port and letting go of it would lose it to the next outgoing
connection between a kill and a restart.
"""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


class PortReservation:
    """One reserved port; `release()` gives it back."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Harmless when called twice."""
        self._socket.close()
