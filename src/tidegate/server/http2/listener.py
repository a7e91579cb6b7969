"""The listening socket of the gRPC port: connections in, deadlines, drain.

`Http2Server` serves methods on one socket, within one event loop. It owns what all connections share: the wheel that
keeps their deadlines, the outbox that sends their answers together, and the bounds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tidegate.server.http1.schedule import Outbox, Wheel
from tidegate.server.http2.connection import Http2Connection
from tidegate.server.http2.frames import DEFAULT_WINDOW, Setting, settings_frame, window_frame
from tidegate.server.http2.grpc import PREFIX_BYTES, Method
from tidegate.server.http2.headers import HEADER_LIST_BYTES_MAX
from tidegate.server.http2.lifecycle import ConnectionLifecycle

__all__ = ["Http2Options", "Http2Server", "Http2Statistics"]

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
BACKLOG: Final = 1_024
# After a GOAWAY the peer may still be sending, and would meet a reset before it has read why.
LINGER_S: Final = 2.0
# Between the two GOAWAY of a drain: calls that were on their way when the first one left are served.
DRAIN_LINGER_S: Final = 0.25
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
TLS_SHUTDOWN_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class Http2Options:
    """What a client may cost, and how long it may take."""

    connections_max: int = 1_024
    # Calls of one connection at the same time; the next one is refused, and a client may try it again. Envoy opens
    # one connection per worker thread and keeps a few calls in flight on each.
    streams_max: int = 128
    # A call to decide has a few hundred bytes.
    message_bytes_max: int = 65_536
    # Request bytes that one connection may make us hold.
    window_bytes: int = 262_144
    # Answers that a client has not read. Above it nothing more is read from that client.
    write_bytes_max: int = 65_536
    # For the preface, and for the rest of a frame or of a header block.
    header_timeout_s: float = 10.0
    # For a whole call, from its first frame to the last byte of its answer.
    request_timeout_s: float = 30.0
    # A connection without calls. Proxies keep theirs for long: reconnecting costs them the first call's latency.
    idle_timeout_s: float = 900.0


@dataclass(frozen=True)
class Http2Statistics:
    """As of now."""

    connections: int
    connections_total: int
    connections_refused: int
    connections_failed: int
    streams_reset: int
    calls: dict[str, dict[int, int]]
    """By path and gRPC status."""


class Http2Server:
    """Serves `methods` on one listening socket. Made, started and drained in one event loop."""

    def __init__(
        self,
        methods: Iterable[Method],
        options: Http2Options | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.options = options = options or Http2Options()
        self.methods = {method.path.encode("ascii"): method for method in methods}
        self.wheel = Wheel(TICK_S)
        self.outbox = Outbox(self.loop)
        self.header_ticks = self.wheel.ticks(options.header_timeout_s)
        self.request_ticks = self.wheel.ticks(options.request_timeout_s)
        self.idle_ticks = self.wheel.ticks(options.idle_timeout_s)
        self.linger_ticks = self.wheel.ticks(LINGER_S)
        self.window_low = options.window_bytes // 2
        # A message fits into a stream's window whole, so that streams need no window updates.
        stream_window = max(DEFAULT_WINDOW, options.message_bytes_max + PREFIX_BYTES)
        self.greeting = settings_frame(
            {
                Setting.MAX_CONCURRENT_STREAMS: options.streams_max,
                Setting.INITIAL_WINDOW_SIZE: stream_window,
                Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
            }
        ) + window_frame(0, options.window_bytes - DEFAULT_WINDOW)
        self.connections: set[ConnectionLifecycle] = set()
        self.connections_total = 0
        self.connections_refused = 0
        # Ended because the client broke the protocol or a bound; and single streams of others. Written by connections.
        self.connections_failed = 0
        self.streams_reset = 0
        self.is_draining = False
        self._tls = tls
        self._listening: asyncio.Server | None = None
        self._ticked_at = 0.0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    async def start(self, bound: socket.socket) -> None:
        """Listen on `bound`, and own it from now on."""
        tls = self._tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self._listening = await self.loop.create_server(
            lambda: Http2Connection(self),
            sock=bound,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if tls is not None else None,
            ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S if tls is not None else None,
        )
        self._ticked_at = self.loop.time()
        self._tick()

    def admit(self, connection: ConnectionLifecycle, transport: asyncio.Transport) -> bool:
        """Whether a new connection is served. It is closed otherwise."""
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            logger.debug("a TLS client did not offer h2 (ALPN)")
        elif self.is_draining or len(self.connections) >= self.options.connections_max:
            logger.debug("connection refused: %d are open", len(self.connections))
        else:
            self.connections.add(connection)
            self.connections_total += 1
            accepted = transport.get_extra_info("socket")
            if accepted is not None and accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return True
        self.connections_refused += 1
        return False

    def lost(self, connection: ConnectionLifecycle) -> None:
        """Called once by each connection that was admitted or refused, when it is gone."""
        self.connections.discard(connection)
        if self.is_draining and not self.connections:
            self._emptied.set()

    def _tick(self) -> None:
        now = self.loop.time()
        while self._ticked_at + TICK_S <= now:
            self._ticked_at += TICK_S
            self.wheel.run_once()
        self._tick_timer = self.loop.call_at(self._ticked_at + TICK_S, self._tick)

    def stop_accepting(self) -> None:
        """Close the listening socket. What is connected is served on."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more, finish what is under way, close all connections. False if time ran out."""
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        self.stop_accepting()
        for connection in list(self.connections):
            connection.announce_drain()
        is_empty = await self._wait_until_empty(min(DRAIN_LINGER_S, timeout_s))
        for connection in list(self.connections):
            connection.drain()
        if not is_empty:
            is_empty = await self._wait_until_empty(deadline - self.loop.time())
        for connection in list(self.connections):
            connection.abort()
        await self._wait_until_empty(1.0)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        return is_empty

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        if not self.connections:
            return True
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def statistics(self) -> Http2Statistics:
        """Counters and gauges, as of now."""
        return Http2Statistics(
            connections=len(self.connections),
            connections_total=self.connections_total,
            connections_refused=self.connections_refused,
            connections_failed=self.connections_failed,
            streams_reset=self.streams_reset,
            calls={method.path: dict(method.statuses) for method in self.methods.values()},
        )
