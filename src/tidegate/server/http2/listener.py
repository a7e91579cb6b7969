"""The HTTP/2 server of the gRPC port: its bounds, and what its connections share beside the listening socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tidegate.server.http2.connection import Http2Connection
from tidegate.server.http2.frames import DEFAULT_WINDOW, Setting, settings_frame, window_frame
from tidegate.server.http2.grpc import PREFIX_BYTES, Method
from tidegate.server.http2.headers import HEADER_LIST_BYTES_MAX
from tidegate.server.listener import Listener

# After a GOAWAY the peer may still be sending, and would meet a reset before it has read why.
LINGER_S: Final = 2.0


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
    connections_evicted: int
    connections_failed: int
    calls: dict[str, dict[int, int]]
    """By path and gRPC status."""


class Http2Server(Listener[Http2Connection]):
    """Serves `methods` on one listening socket."""

    def __init__(
        self,
        methods: Iterable[Method],
        options: Http2Options | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.options = options = options or Http2Options()
        super().__init__(options.connections_max, tls)
        self.methods = {method.path.encode("ascii"): method for method in methods}
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
        # Ended because the client broke the protocol or a bound. Written by connections.
        self.connections_failed = 0

    def start(self, bound: socket.socket) -> None:
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        super().start(bound)

    def new_connection(self, *, is_spare: bool) -> asyncio.Protocol:
        return Http2Connection(self)

    def announce_drain(self) -> None:
        for connection in list(self.connections):
            connection.announce_drain()

    def statistics(self) -> Http2Statistics:
        """Counters and gauges, as of now."""
        return Http2Statistics(
            connections=len(self.connections),
            connections_evicted=self.connections_evicted,
            connections_failed=self.connections_failed,
            calls={method.path: dict(method.statuses) for method in self.methods.values()},
        )
