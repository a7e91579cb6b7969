"""The HTTP/1.1 server: what its connections share, beside the listening socket (`server.listener`)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from tidegate.server.http1.bounds import HttpConfig, Intake
from tidegate.server.http1.connection import HttpConnection
from tidegate.server.http1.repeats import Shared
from tidegate.server.listener import Listener
from tidegate.server.messages import Refuse, Router

# Answers that a client has not read yet. Above this, nothing more is read from that client. Also what one connection
# may answer in one turn of the loop.
WRITE_BYTES_MAX: Final = 65_536
# Beyond the bound on connections, for probes: a node whose clients all wait for a database is alive.
SPARE_CONNECTIONS: Final = 16


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound socket. `shared`: other processes may bind the same port, and the kernel distributes connections."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setblocking(False)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class HttpServer(Listener[HttpConnection]):
    """Serves `router` on one listening socket."""

    def __init__(
        self,
        router: Router,
        config: HttpConfig,
        refuse: Refuse,
        new_id: Callable[[], str],
        *,
        tls: ssl.SSLContext | None = None,
        wall_time: Callable[[], float],
    ) -> None:
        """`refuse` writes the answers to requests that reach no operation, `new_id` gives the ids of such requests."""
        super().__init__(config.connections_max, tls, spare_max=SPARE_CONNECTIONS)
        self.router = router
        self.refuse = refuse
        self.new_id = new_id
        self.header_ticks = self.wheel.ticks(config.header_timeout_s)
        self.request_ticks = self.wheel.ticks(config.request_timeout_s)
        self.idle_ticks = self.wheel.ticks(config.idle_timeout_s)
        self.intake = Intake(config)
        self.write_bytes_max = WRITE_BYTES_MAX
        self._wall_time = wall_time
        # The first two lines of an answer by status, for the present second. Emptied by the tick, filled by `begin`.
        self._begins: dict[int, bytes] = {}
        self._date_s = 0
        self.shared = Shared(self.wheel, self.outbox, self.idle_ticks, self.begin)

    def new_connection(self, *, is_spare: bool) -> asyncio.Protocol:
        return HttpConnection(self, is_spare=is_spare)

    def on_tick(self) -> None:
        date_s = int(self._wall_time())
        if date_s != self._date_s:
            self._date_s = date_s
            self._begins.clear()
            self.shared.begin_ok = b""

    def announce_drain(self) -> None:
        self.shared.is_draining = True

    def begin(self, status: int) -> bytes:
        """The first two lines of an answer: status and date."""
        lines = self._begins.get(status)
        if lines is None:
            date = formatdate(self._date_s, usegmt=True).encode("ascii")
            first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode("ascii")
            lines = self._begins[status] = first + b"date: " + date + b"\r\n"
            if status == 200:
                self.shared.begin_ok = lines
        return lines
