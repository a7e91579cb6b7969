"""How an HTTP/2 connection begins, waits and ends.

The part of a connection that knows the transport and the clock: deadlines, drain, GOAWAY and close. Laws: a client that
is slow to send, slow to read or slow to open its windows loses its stream or its connection, not our memory; an ended
connection has said why (GOAWAY) before it closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from tidegate.server.http2 import frames as h2
from tidegate.server.http2.frames import ConnectionFault, ErrorCode
from tidegate.server.http2.headers import RequestHead
from tidegate.server.http2.sender import Sender
from tidegate.server.http2.stream import Stream

if TYPE_CHECKING:
    from tidegate.server.http2.connection import Http2Connection
    from tidegate.server.http2.listener import Http2Server

logger = logging.getLogger(__name__)

# Streams whose end is remembered.
CLOSED_MAX: Final = 64

# Preface expected; SETTINGS expected; serving; GOAWAY sent and nothing more read; closed.
NEW, PREFACED, OPEN, LINGERING, CLOSED = range(5)


class ConnectionLifecycle(asyncio.Protocol):
    """What `Http2Connection` builds on. Used by the loop's thread only."""

    __slots__ = (
        "_block_stream", "_held", "_is_draining", "_is_write_paused", "_last_id", "_last_served_id",
        "_made_at", "_partial_since", "_reset", "_sender", "_server", "_state", "_streams", "_tail", "_transport",
        "_waiting", "calls", "expires", "scheduled",
    )  # fmt: skip

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self._made_at = server.wheel.now
        self._transport: asyncio.Transport = None  # type: ignore[assignment] # set before anything else happens
        self._sender = Sender()
        self._state = NEW
        self.expires = 0
        self.scheduled = 0
        # Calls answered.
        self.calls = 0
        # Bytes of a frame that is not complete, and the tick since which the rest of it, or of a header block, is
        # missing; 0: nothing is.
        self._tail = b""
        self._partial_since = 0
        # The stream whose header block is being received, or 0.
        self._block_stream = 0
        # Calls of the present read whose message is still to come: most are answered before the read is over, and
        # never become a stream object.
        self._waiting: dict[int, RequestHead] = {}
        self._streams: dict[int, Stream] = {}
        # Bytes that streams hold. The peer may send as many more when they are dropped.
        self._held = 0
        self._last_id = 0
        # Streams above this are not served any more: lowered by the last GOAWAY.
        self._last_served_id = h2.STREAM_ID_MAX
        self._is_draining = False
        self._is_write_paused = False
        # The ids of the last streams that we have reset: what the peer had sent before it knew is ignored.
        self._reset: deque[int] = deque(maxlen=CLOSED_MAX)

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        server.connected(cast("Http2Connection", self))
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            # A TLS client that did not offer h2 (ALPN) speaks another protocol.
            server.connections_failed += 1
            self._state = LINGERING
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=server.options.write_bytes_max)
        server.wheel.watch(self, server.header_ticks)
        self._transport.write(server.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = CLOSED
        self.expires = 0
        self._server.wheel.forget(self)
        for stream in self._streams.values():
            if stream.task is not None:
                # The answer cannot be delivered any more; what it waits for has not been decided.
                stream.task.cancel()
        self._streams.clear()
        self._sender.blocked.clear()
        self._sender.out.clear()
        self._tail = b""
        self._server.lost(cast("Http2Connection", self))

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._transport.pause_reading()
        self._server.wheel.watch(self, self._server.request_ticks)

    def idle_since(self) -> int | None:
        """The tick since which this server waits for the client; None: the client waits for this server."""
        if self._is_write_paused:
            return self.expires - self._server.request_ticks
        if any(stream.task is not None for stream in self._streams.values()):
            return None
        if self._streams:
            return next(iter(self._streams.values())).started
        return self._partial_since or max(self._made_at, self.expires - self._server.idle_ticks)

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._state != CLOSED:
            self._transport.resume_reading()
            self._settle()

    # Streams.

    def _forget(self, stream_id: int) -> None:
        self._waiting.pop(stream_id, None)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._drop_body(stream)
            self._sender.blocked.pop(stream_id, None)
            if stream.task is not None:
                stream.task.cancel()

    def _drop_body(self, stream: Stream) -> None:
        self._held -= len(stream.body)
        stream.body = bytearray()

    def _reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        self._forget(stream_id)
        self._reset.append(stream_id)
        self._sender.out.append(h2.reset_frame(stream_id, code))

    # Writing, time, the end.

    def flush(self) -> None:
        """Write what was collected: the outbox's call, and that of everything that closes the connection."""
        out = self._sender.out
        if out and self._state != CLOSED and not self._transport.is_closing():
            self._transport.write(b"".join(out))
        out.clear()

    def _settle(self) -> None:
        """What is this connection waiting for, and until when?"""
        if self._state not in (PREFACED, OPEN) or self._is_write_paused:
            return
        server = self._server
        if self._is_draining and not self._streams:
            self._close(ErrorCode.NO_ERROR)
            return
        due = server.wheel.now + server.idle_ticks
        if self._partial_since:
            due = self._partial_since + server.header_ticks
        if self._streams:
            # The first one is the oldest.
            oldest = next(iter(self._streams.values()))
            due = min(due, oldest.started + server.request_ticks)
        server.wheel.watch(self, max(1, due - server.wheel.now))

    def on_deadline(self) -> None:
        """The wheel's call: something has taken too long."""
        server = self._server
        now = server.wheel.now
        if self._state != OPEN or self._is_write_paused:
            # The client sends no preface, does not read what we write, or does not close after our GOAWAY.
            self._transport.abort()
            return
        if self._partial_since and now >= self._partial_since + server.header_ticks:
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a frame took too long to arrive"))
            return
        overdue = [s.id for s in self._streams.values() if now >= s.started + server.request_ticks]
        for stream_id in overdue:
            self._reset_stream(stream_id, ErrorCode.CANCEL)
        if not overdue and not self._streams and not self._partial_since:
            self._close(ErrorCode.NO_ERROR)
            return
        self.flush()
        self._settle()

    def _fail(self, fault: ConnectionFault) -> None:
        logger.debug("connection ended: %s", fault.reason)
        self._server.connections_failed += 1
        self._close(fault.code, fault.reason)

    def _close(self, code: ErrorCode, reason: str = "") -> None:
        """Say why, and close. Reads on for a moment: unread bytes would turn the close into a reset."""
        for stream_id in (*self._waiting, *self._streams):
            self._forget(stream_id)
        self._sender.out.append(h2.goaway_frame(self._last_id, code, reason))
        self.flush()
        self._state = LINGERING
        self._tail = b""
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._server.wheel.watch(self, self._server.linger_ticks)
        else:
            self._transport.close()

    def announce_drain(self) -> None:
        """The server stops: ask the peer to open no more streams, and serve those that are in progress."""
        if self._state == OPEN:
            self._sender.out.append(h2.goaway_frame(h2.STREAM_ID_MAX, ErrorCode.NO_ERROR))
            self.flush()
        elif self._state in (NEW, PREFACED):
            self._transport.close()

    def drain(self) -> None:
        """Serve what has arrived, and nothing more; then close."""
        if self._state == OPEN:
            self._drain(self._last_id)
            self._sender.out.append(h2.goaway_frame(self._last_id, ErrorCode.NO_ERROR))
            self.flush()
            self._settle()

    def _drain(self, last_id: int) -> None:
        self._is_draining = True
        self._last_served_id = last_id

    def abort(self) -> None:
        self._transport.abort()
