"""The listening side of the HTTP server: accepts connections up to a bound, ticks their deadlines, drains them.

At the bound it stops accepting: new clients wait in the kernel's queue, where they cost nothing, until others leave.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from tidegate.server.http1.bounds import HttpConfig, Intake
from tidegate.server.http1.connection import HttpConnection
from tidegate.server.http1.schedule import Outbox, Wheel
from tidegate.server.messages import Refuse, Router

__all__ = ["HttpServer", "bind"]

logger = logging.getLogger(__name__)

# Deadlines are seconds long: a quarter of a second of delay is acceptable, and four wake-ups a second cost nothing.
TICK_S: Final = 0.25
BACKLOG: Final = 1_024
# Accepted in one turn of the loop, so that many new connections do not delay those that are open.
ACCEPTS_PER_TURN: Final = 64
# Answers that a client has not read yet. Above this, nothing more is read from that client.
WRITE_BYTES_MAX: Final = 65_536
# After the listening socket is closed, a request may still be on its way on an idle connection: answer it.
DRAIN_LINGER_S: Final = 0.25
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
TLS_SHUTDOWN_TIMEOUT_S: Final = 1.0
# When the process has no file descriptors left, retrying at once would only use processor time.
ACCEPT_RETRY_S: Final = 0.5


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


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer:
    """Serves `router` on one listening socket. Made, started and drained in one event loop."""

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
        self.loop = asyncio.get_running_loop()
        self.router = router
        self.refuse = refuse
        self.new_id = new_id
        self.wheel = Wheel(TICK_S)
        self.outbox = Outbox(self.loop)
        self.header_ticks = self.wheel.ticks(config.header_timeout_s)
        self.request_ticks = self.wheel.ticks(config.request_timeout_s)
        self.idle_ticks = self.wheel.ticks(config.idle_timeout_s)
        self.intake = Intake(config)
        self.write_bytes_max = WRITE_BYTES_MAX
        # Bytes of heads that connections remember. Written by the connections.
        self.remembered_bytes = 0
        self.connections: set[HttpConnection] = set()
        self.is_draining = False
        self._connections_max = config.connections_max
        self._tls = tls
        self._wall_time = wall_time
        self._socket: socket.socket | None = None
        self._is_accepting = False
        # Sockets that are between accept and connection_made, a TLS handshake included.
        self._handshakes: set[asyncio.Task[None]] = set()
        # The first two lines of an answer by status, for the present second. Emptied by the tick, filled by `begin`.
        self.begins: dict[int, bytes] = {}
        self._date_s = 0
        self._ticked_at = 0.0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event = asyncio.Event()

    def start(self, bound: socket.socket) -> None:
        """Listen on `bound`, and own it from now on."""
        bound.listen(BACKLOG)
        self._socket = bound
        self._ticked_at = self.loop.time()
        self._tick()
        self._accept_more()
        logger.info("listening on %s", _address(bound))

    # Connections in.

    def _accept_more(self) -> None:
        if not self._is_accepting and self._socket is not None:
            self._is_accepting = True
            self.loop.add_reader(self._socket, self._accept)

    def _accept_no_more(self) -> None:
        if self._is_accepting and self._socket is not None:
            self._is_accepting = False
            self.loop.remove_reader(self._socket)

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS_PER_TURN):
            if len(self.connections) + len(self._handshakes) >= self._connections_max:
                self._accept_no_more()
                return
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s; trying again in %s s", error, ACCEPT_RETRY_S)
                self._accept_no_more()
                self.loop.call_later(ACCEPT_RETRY_S, self._accept_more)
                return
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self.loop.create_task(self._connect(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshaken)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(
                lambda: HttpConnection(self),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._tls is not None else None,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S if self._tls is not None else None,
            )
        except OSError as error:  # also ssl.SSLError, when a client does not speak TLS
            logger.debug("a connection ended before its first request: %s", error)
            accepted.close()

    def _handshaken(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._on_fewer()

    def lost(self, connection: HttpConnection) -> None:
        """Called by a connection when its transport is gone."""
        self.connections.discard(connection)
        self._on_fewer()

    def _on_fewer(self) -> None:
        if not self.is_draining:
            self._accept_more()
        elif not self.connections and not self._handshakes:
            self._emptied.set()

    # Time.

    def _tick(self) -> None:
        now = self.loop.time()
        while self._ticked_at + TICK_S <= now:
            self._ticked_at += TICK_S
            self.wheel.run_once()
        date_s = int(self._wall_time())
        if date_s != self._date_s:
            self._date_s = date_s
            self.begins.clear()
        self._tick_timer = self.loop.call_at(self._ticked_at + TICK_S, self._tick)

    def begin(self, status: int) -> bytes:
        """The first two lines of an answer: status and date."""
        lines = self.begins.get(status)
        if lines is None:
            date = formatdate(self._date_s, usegmt=True).encode("ascii")
            first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode("ascii")
            lines = self.begins[status] = first + b"date: " + date + b"\r\n"
        return lines

    # The end.

    def stop_accepting(self) -> None:
        """Close the listening socket. Open connections are still served."""
        self._accept_no_more()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more, finish running requests, close all connections. False if time ran out."""
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        self.stop_accepting()
        self._on_fewer()
        is_empty = await self._wait_until_empty(min(DRAIN_LINGER_S, timeout_s))
        for connection in list(self.connections):
            connection.close_if_idle()
        if not is_empty:
            is_empty = await self._wait_until_empty(deadline - self.loop.time())
        for task in self._handshakes:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        await self._wait_until_empty(1.0)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        return is_empty

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
