"""The listening side of the HTTP server: accepts connections up to a bound, ticks their deadlines, drains them.

At the bound it stops accepting: new clients wait in the kernel's queue, where they cost nothing, until others leave.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from tidegate.server.api.problems import Answer, Refusal, error_answer
from tidegate.server.catalog.ids import IdSource
from tidegate.server.http1.connection import HttpConnection
from tidegate.server.http1.deadlines import Wheel
from tidegate.server.http1.outbox import Outbox
from tidegate.server.http1.reader import Intake
from tidegate.server.messages import Router, status_line
from tidegate.server.process.config import HttpConfig
from tidegate.server.process.request_log import RequestLog

__all__ = ["HttpServer", "bind"]

logger = logging.getLogger(__name__)

# Deadlines are seconds long; a quarter of a second late is soon enough, and four wake-ups a second cost nothing.
TICK_S: Final = 0.25
BACKLOG: Final = 1_024
# Accepted in one turn of the loop, so that a flood of connections does not starve those that are open.
ACCEPTS_PER_TURN: Final = 64
# Answers that a client has not read yet. Above it nothing more is read from that client.
WRITE_BYTES_MAX: Final = 65_536
# After the listening socket is gone, clients may have a request on the way on an idle connection: answer it.
DRAIN_LINGER_S: Final = 0.25
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
TLS_GOODBYE_TIMEOUT_S: Final = 1.0
# When the process has no file descriptors left, trying again at once would only burn the processor.
ACCEPT_RETRY_S: Final = 0.5


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound socket. `shared`: other processes may bind the same port, and the kernel spreads the connections."""
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
        ids: IdSource,
        *,
        tls: ssl.SSLContext | None = None,
        wall_time: Callable[[], float],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.router = router
        self._log = RequestLog(router, time.monotonic)
        self.ids = ids
        self.wheel = Wheel(TICK_S)
        self.outbox = Outbox(self.loop)
        self.header_ticks = self.wheel.ticks(config.header_timeout_s)
        self.request_ticks = self.wheel.ticks(config.request_timeout_s)
        self.idle_ticks = self.wheel.ticks(config.idle_timeout_s)
        self.intake = Intake(config)
        self.write_bytes_max = WRITE_BYTES_MAX
        # Bytes of heads that connections remember. Written by them.
        self.remembered_bytes = 0
        self.connections: set[HttpConnection] = set()
        self.connections_total = 0
        self.is_draining = False
        self._connections_max = config.connections_max
        self._tls = tls
        self._wall_time = wall_time
        self._socket: socket.socket | None = None
        self._is_accepting = False
        # Sockets that are between accept and connection_made, a TLS handshake included.
        self._greetings: set[asyncio.Task[None]] = set()
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
            if len(self.connections) + len(self._greetings) >= self._connections_max:
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
            self.connections_total += 1
            task = self.loop.create_task(self._greet(accepted))
            self._greetings.add(task)
            task.add_done_callback(self._greeted)

    async def _greet(self, accepted: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(
                self._connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._tls is not None else None,
                ssl_shutdown_timeout=TLS_GOODBYE_TIMEOUT_S if self._tls is not None else None,
            )
        except OSError as error:  # also ssl.SSLError: not everybody who knocks speaks TLS
            logger.debug("a connection ended before its first request: %s", error)
            accepted.close()

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greetings.discard(task)
        self._room()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self)

    def lost(self, connection: HttpConnection) -> None:
        """A connection's last word."""
        self.connections.discard(connection)
        self._room()

    def _room(self) -> None:
        if not self.is_draining:
            self._accept_more()
        elif not self.connections and not self._greetings:
            self._emptied.set()

    # Time.

    def _tick(self) -> None:
        now = self.loop.time()
        while self._ticked_at + TICK_S <= now:
            self._ticked_at += TICK_S
            self.wheel.run_once()
        self._log.follow_level()
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
            lines = self.begins[status] = status_line(status) + b"date: " + date + b"\r\n"
        return lines

    # Refusals of the transport, which no operation has seen.

    def refuse(self, accept: bytes, refusal: Refusal, request_id: str) -> Answer:
        answer = error_answer(refusal, request_id, accept)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "refused %d: %s", answer[0], refusal.detail, extra={"request_id": "req_" + request_id}
            )
        return answer

    # The end.

    def stop_accepting(self) -> None:
        """Close the listening socket. What is connected is served on."""
        self._accept_no_more()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more, finish what is under way, close all connections. False if time ran out."""
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        self.stop_accepting()
        self._room()
        is_empty = await self._wait_until_empty(min(DRAIN_LINGER_S, timeout_s))
        for connection in list(self.connections):
            connection.close_if_idle()
        if not is_empty:
            is_empty = await self._wait_until_empty(deadline - self.loop.time())
        for task in self._greetings:
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
