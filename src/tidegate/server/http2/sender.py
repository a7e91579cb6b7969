"""What leaves a connection: answers, in frames that fit the peer's windows.

Frames are collected and written once, at the end of the loop's turn. DATA is sent as far as the windows of the
connection and of the stream allow; what is left waits for WINDOW_UPDATE, answers in the order in which they were given.
"""

from __future__ import annotations

from tidegate.server.http2 import frames as h2
from tidegate.server.http2.frames import ConnectionFault, ErrorCode, Setting, StreamFault
from tidegate.server.http2.grpc import (
    PREFIX_BYTES,
    TABLE_SIZE_ZERO,
    GrpcError,
    answer_head,
    answer_trailers,
    plain_answer,
    status_answer,
)
from tidegate.server.http2.stream import Stream


class Sender:
    """The outgoing half of one connection. It knows frames and windows, and no transport."""

    __slots__ = ("_frame_bytes", "blocked", "initial_window", "is_first_block", "out", "window")

    def __init__(self) -> None:
        # Frames that the connection has to write.
        self.out: list[bytes] = []
        # What the peer still accepts on this connection, and on a stream for which it has sent no update.
        self.window = h2.DEFAULT_WINDOW
        self.initial_window = h2.DEFAULT_WINDOW
        self._frame_bytes = h2.FRAME_BYTES_MAX
        # Answers that wait for a window.
        self.blocked: dict[int, Stream] = {}
        # The first header block of a connection sets the table size.
        self.is_first_block = True

    def _prefix(self) -> bytes:
        if self.is_first_block:
            self.is_first_block = False
            return TABLE_SIZE_ZERO
        return b""

    def _send_block(self, stream_id: int, block: bytes) -> None:
        self.out.append(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, self._prefix() + block))

    # Answers. Each returns True when the answer has left completely.

    def answer(self, stream: Stream, message: bytes) -> bool:
        """A call that went well."""
        if self.is_first_block:
            self._send_block(stream.id, answer_head(stream.id)[h2.FRAME_HEADER_BYTES :])
        else:
            self.out.append(answer_head(stream.id))
        stream.pending = b"\0" + len(message).to_bytes(PREFIX_BYTES - 1, "big") + message
        stream.trailers = answer_trailers(stream.id)
        return self._pump(stream)

    def answer_error(self, stream: Stream, error: GrpcError) -> bool:
        """A call that failed. Needs no window."""
        self.out.append(status_answer(stream.id, error, self._prefix()))
        return True

    def answer_plain(self, stream: Stream, status: int, text: bytes) -> bool:
        """A request that is not a gRPC call."""
        self._send_block(stream.id, plain_answer(status))
        stream.pending = text
        return self._pump(stream)

    def _pump(self, stream: Stream) -> bool:
        """Send as much of a stream's answer as its windows allow."""
        pending = stream.pending
        while pending:
            allowance = min(self.window, self.initial_window + stream.window_change, self._frame_bytes)
            if allowance <= 0:
                stream.pending = pending
                self.blocked[stream.id] = stream
                return False
            part, pending = pending[:allowance], pending[allowance:]
            is_last = not pending and not stream.trailers
            self.out.append(h2.frame(h2.DATA, h2.END_STREAM if is_last else 0, stream.id, part))
            self.window -= len(part)
            stream.window_change -= len(part)
        stream.pending = b""
        if stream.trailers:
            self.out.append(stream.trailers)
        self.blocked.pop(stream.id, None)
        return True

    def pump_all(self) -> list[Stream]:
        """Go on after a window has grown. Returns the streams whose answers have now left completely."""
        return [stream for stream in list(self.blocked.values()) if self._pump(stream)]

    # The peer's windows and settings.

    def grow(self, increment: int) -> None:
        """WINDOW_UPDATE of the connection."""
        self.window += increment
        if self.window > h2.WINDOW_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")

    def grow_stream(self, stream: Stream, increment: int) -> None:
        """WINDOW_UPDATE of a stream."""
        stream.window_change += increment
        if self.initial_window + stream.window_change > h2.WINDOW_MAX:
            raise StreamFault(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")

    def apply_settings(self, pairs: list[tuple[int, int]], streams: dict[int, Stream]) -> None:
        """Settings of the peer, in their order. Its table size does not matter: our encoder uses no table."""
        for key, value in pairs:
            if key == Setting.MAX_FRAME_SIZE:
                self._frame_bytes = min(value, h2.FRAME_BYTES_MAX)
            elif key == Setting.INITIAL_WINDOW_SIZE:
                self.initial_window = value
                if any(value + stream.window_change > h2.WINDOW_MAX for stream in streams.values()):
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
