"""One HTTP/2 connection that serves unary gRPC calls.

A call whose frames are all in one read, with a header block that is remembered, is answered inside `data_received`:
no stream object, no task. Everything else takes the slow path, frame by frame.

Laws: a frame is handled completely, or ends the stream or the connection with the error that RFC 9113 asks for. What a
client can cost is bounded: header blocks (16 KiB, 32 frames), messages (`message_bytes_max`), buffered bytes (the
connection's window, which is refilled only for bytes that are no longer held), streams (`streams_max`, answers that
have not been written included), frames that are not part of a call (`Budget`), and time (`lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from struct import Struct
from typing import TYPE_CHECKING, Final

from tidegate.server.http2 import frames as h2
from tidegate.server.http2.budget import Budget
from tidegate.server.http2.frames import ConnectionFault, ErrorCode, StreamFault
from tidegate.server.http2.grpc import PREFIX_BYTES, GrpcError, Status, answer_start, answer_trailers
from tidegate.server.http2.headers import HeaderReader, MalformedRequest, RequestHead, check_trailers
from tidegate.server.http2.lifecycle import CLOSED_MAX, LINGERING, NEW, OPEN, PREFACED, ConnectionLifecycle
from tidegate.server.http2.stream import Stream

if TYPE_CHECKING:
    from tidegate.server.http2.listener import Http2Server

logger = logging.getLogger(__name__)

# Bytes of one header block, compressed, and its CONTINUATION frames, however small. No client comes near.
BLOCK_BYTES_MAX: Final = 16_384
CONTINUATIONS_MAX: Final = 32
# Local copies: globals of this module are one look-up, attributes of another module two.
HEADERS: Final = h2.HEADERS
DATA: Final = h2.DATA
END_HEADERS: Final = h2.END_HEADERS
END_STREAM: Final = h2.END_STREAM
FRAME_BYTES_MAX: Final = h2.FRAME_BYTES_MAX
WORD_MAX: Final = FRAME_BYTES_MAX << 8 | 0xFF
FRAME: Final = h2.FRAME_HEADER.unpack_from
# gRPC's five bytes before a message: whether it is compressed, and its length.
PREFIX: Final = Struct(">BI").unpack_from

NOT_GRPC: Final = b"This port speaks gRPC (content-type application/grpc) and nothing else.\n"


class Http2Connection(ConnectionLifecycle):
    """Made by `Http2Server` for each accepted socket; used by the loop's thread only."""

    __slots__ = (
        "_block", "_block_flags", "_block_frames", "_budget", "_calls_in_read", "_closed", "_handlers", "_reader",
        "_window",
    )  # fmt: skip

    def __init__(self, server: Http2Server) -> None:
        super().__init__(server)
        self._reader = HeaderReader(server.methods)
        # Calls that were answered in the present read. Their answers have not been written, so they count as open.
        self._calls_in_read = 0
        # The ids of the last streams that ended on both sides, to distinguish late frames from wrong ones.
        self._closed: deque[int] = deque(maxlen=CLOSED_MAX)
        # The header block that is being received, and the flags of its HEADERS.
        self._block = bytearray()
        self._block_flags = 0
        self._block_frames = 0
        # What the peer may still send.
        self._window = server.options.window_bytes
        self._budget = Budget(server.wheel.now)
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_reset,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )

    # Frames in.

    def data_received(self, data: bytes) -> None:
        if self._tail:
            data = self._tail + data
            self._tail = b""
        position = 0
        if self._state != OPEN:
            if self._state == LINGERING or not self._is_prefaced(data):
                return
            position = len(h2.PREFACE) if self._state == NEW else 0
            self._state = max(self._state, PREFACED)
        self._calls_in_read = 0
        try:
            position = self._take(data, position)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        server = self._server
        for stream_id in list(self._waiting):
            self._find(stream_id)
        if position < len(data):
            self._tail = data[position:]
            if position or not self._partial_since:
                self._partial_since = server.wheel.now
        elif not self._block_stream:
            self._partial_since = 0
        if self._window + self._held <= server.window_low:
            self._refill()
        if self._sender.out:
            server.outbox.add(self)
        if self._streams or self._partial_since or self._is_draining:
            self._settle()
        elif not self._is_write_paused:
            self.expires = server.wheel.now + server.idle_ticks

    def _is_prefaced(self, data: bytes) -> bool:
        """Whether the client's preface is complete. Anything else ends the connection."""
        if self._state != NEW or data.startswith(h2.PREFACE):
            return True
        if h2.PREFACE.startswith(data):
            self._tail = data
        else:
            self._fail(ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface"))
        return False

    def _take(self, data: bytes, position: int) -> int:
        """Handle all frames that are complete. Returns where the rest begins."""
        size = len(data)
        blocks = self._reader.blocks
        waiting = self._waiting
        while size - position >= 9:
            word, flags, stream_id = FRAME(data, position)
            if word > WORD_MAX:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of more than 16384 bytes")
            start = position + 9
            end = start + (word >> 8)
            if end > size:
                break
            position = end
            kind = word & 0xFF
            if kind == HEADERS:
                if flags == END_HEADERS:
                    head = blocks.get(data[start:end])
                    if head is not None and self._can_wait(stream_id, head):
                        waiting[stream_id] = head
                        self._last_id = stream_id
                        continue
            elif (
                kind == DATA
                and flags == END_STREAM
                and stream_id in waiting
                and self._answer_waiting(stream_id, data, start, end)
            ):
                continue
            try:
                self._dispatch(kind, flags, stream_id & h2.STREAM_ID_MAX, data[start:end])
            except StreamFault as fault:
                self._reset_stream(fault.stream_id, fault.code)
            if self._state == LINGERING:
                return size
        return position

    def _can_wait(self, stream_id: int, head: RequestHead) -> bool:
        """Whether this is the beginning of a call like many before it, so that the fast path applies."""
        return (
            head.method is not None
            and self._last_id < stream_id <= self._last_served_id
            and stream_id & 1 == 1
            and not self._block_stream
            and self._count_open() < self._server.options.streams_max
        )

    def _count_open(self) -> int:
        return self._calls_in_read + len(self._waiting) + len(self._streams)

    def _answer_waiting(self, stream_id: int, data: bytes, start: int, end: int) -> bool:
        """Answer a call whose only DATA frame is `data[start:end]`. False: take the slow path."""
        length = end - start
        sender = self._sender
        if length < PREFIX_BYTES or length > self._window or self._block_stream or sender.is_first_block:
            return False
        compressed, message_bytes = PREFIX(data, start)
        head = self._waiting[stream_id]
        method = head.method
        if (
            compressed
            or message_bytes + PREFIX_BYTES != length
            or 0 <= head.content_length != length
            or method is None
        ):
            return False
        del self._waiting[stream_id]
        self._window -= length
        try:
            answer = method.handler(data[start + PREFIX_BYTES : end])
        except Exception as error:  # noqa: BLE001 - logged in _failed; one call must not end the others
            self._finish_error(self._open(stream_id, head, is_ended=True), self._failed(head, error))
            return True
        if type(answer) is bytes:
            length = len(answer) + PREFIX_BYTES
            if length <= sender.window and length <= sender.initial_window and length <= FRAME_BYTES_MAX:
                sender.window -= length
                sender.out += (
                    answer_start(stream_id, length - PREFIX_BYTES),
                    answer,
                    answer_trailers(stream_id),
                )
                self._closed.append(stream_id)
                self.calls += 1
                self._calls_in_read += 1
                statuses = method.statuses
                statuses[0] = statuses.get(0, 0) + 1
                return True
        self._respond(self._open(stream_id, head, is_ended=True), answer)
        return True

    def _dispatch(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._state == PREFACED:
            if kind != h2.SETTINGS or flags & h2.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._state = OPEN
        if self._block_stream and (kind != h2.CONTINUATION or stream_id != self._block_stream):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if kind < len(self._handlers):
            self._handlers[kind](flags, stream_id, payload)
        else:
            self._spend()

    def _spend(self) -> None:
        if not self._budget.spend(self._server.wheel.now, self.calls):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that are not part of a call")

    # Requests.

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that no client may open")
        block = h2.unpadded(payload, flags)
        if flags & h2.PRIORITY_FLAG:
            if len(block) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            self._check_dependency(stream_id, block)
            block = block[5:]
        self._block_flags = flags
        if flags & END_HEADERS:
            self._on_block(stream_id, block)
            return
        self._block_stream = stream_id
        self._block = bytearray(block)
        self._block_frames = 0
        self._partial_since = self._partial_since or self._server.wheel.now

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._block_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block += payload
        self._block_frames += 1
        if len(self._block) > BLOCK_BYTES_MAX or self._block_frames > CONTINUATIONS_MAX:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self._block_stream = 0
            self._on_block(stream_id, block)

    def _on_block(self, stream_id: int, block: bytes) -> None:
        """A header block is complete. It is decoded in any case: the blocks after it build on it."""
        stream = self._find(stream_id)
        is_end = bool(self._block_flags & END_STREAM)
        if stream is not None or stream_id <= self._last_id:
            fields = self._reader.decode(block)
            if stream is not None:
                self._on_trailers(stream, fields, is_end)
            elif stream_id not in self._reset:
                code = ErrorCode.STREAM_CLOSED if stream_id in self._closed else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFault(code, "HEADERS on a stream that is closed")
            return
        self._last_id = stream_id
        try:
            head = self._reader.read(block)
        except MalformedRequest as error:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from error
        if stream_id > self._last_served_id:
            # Opened before the client had read our GOAWAY. That frame says that the stream was not served.
            self._reset.append(stream_id)
            return
        if self._count_open() >= self._server.options.streams_max:
            self._spend()
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        stream = self._open(stream_id, head, is_ended=is_end)
        if is_end:
            self._complete(stream)

    def _on_trailers(self, stream: Stream, fields: list[tuple[bytes, bytes]], is_end: bool) -> None:
        if stream.is_ended:
            raise StreamFault(stream.id, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the request")
        try:
            check_trailers(fields)
        except MalformedRequest as error:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, str(error)) from error
        if not is_end:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, "trailers that do not end the request")
        stream.is_ended = True
        self._complete(stream)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if stream_id == 0 or stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that is not open")
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window allows"
            )
        data = h2.unpadded(payload, flags)
        stream = self._find(stream_id)
        if stream is None or stream.is_ended:
            if stream_id in self._reset:
                return
            self._spend()
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a stream that is closed")
        if not data and not flags & END_STREAM:
            self._spend()
        if size > len(data) and not flags & END_STREAM:
            # A message always fits into the stream's window; with padding it might not.
            self._sender.out.append(h2.window_frame(stream_id, size - len(data)))
        stream.received += len(data)
        stream.is_ended = bool(flags & END_STREAM)
        if stream.head.method is not None:
            stream.body += data
            self._held += len(data)
        if stream.is_ended or stream.received >= PREFIX_BYTES:
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        """Answer a request that is complete, or one that is already known to be invalid."""
        head, received = stream.head, stream.received
        if 0 <= head.content_length != received and (stream.is_ended or received > head.content_length):
            raise StreamFault(
                stream.id, ErrorCode.PROTOCOL_ERROR, "content-length is not the length of the body"
            )
        if head.method is not None:
            self._call(stream)
        elif not stream.is_ended and received <= self._server.options.message_bytes_max:
            return
        elif head.error is not None:
            self._finish_error(stream, head.error)
        else:
            self._finish(stream, self._sender.answer_plain(stream, head.http_status, NOT_GRPC))

    def _call(self, stream: Stream) -> None:
        """As soon as the five bytes before the message are there, it is known whether it will be accepted."""
        body = stream.body
        length = int.from_bytes(body[1:PREFIX_BYTES], "big")
        message_bytes_max = self._server.options.message_bytes_max
        if len(body) < PREFIX_BYTES:
            self._finish_error(stream, GrpcError(Status.INTERNAL, "the request has no message"))
        elif body[0]:
            self._finish_error(
                stream, GrpcError(Status.UNIMPLEMENTED, "compressed messages are not supported")
            )
        elif length > message_bytes_max:
            text = f"a message of {length} bytes; at most {message_bytes_max} are accepted"
            self._finish_error(stream, GrpcError(Status.RESOURCE_EXHAUSTED, text))
        elif len(body) > PREFIX_BYTES + length or (stream.is_ended and len(body) < PREFIX_BYTES + length):
            self._finish_error(stream, GrpcError(Status.INTERNAL, "a request must be one whole message"))
        elif stream.is_ended:
            message = bytes(memoryview(body)[PREFIX_BYTES:])
            self._drop_body(stream)
            assert stream.head.method is not None
            try:
                answer = stream.head.method.handler(message)
            except Exception as error:  # noqa: BLE001 - logged in _failed; one call must not end the others
                self._finish_error(stream, self._failed(stream.head, error))
            else:
                self._respond(stream, answer)

    # Frames about streams and the connection.

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Priorities are read, checked and ignored: an answer leaves as soon as it exists."""
        self._spend()
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a length other than 5")
        self._check_dependency(stream_id, payload)

    def _check_dependency(self, stream_id: int, payload: bytes) -> None:
        if int.from_bytes(payload[:4], "big") & h2.STREAM_ID_MAX == stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        self._spend()
        if stream_id == 0 or stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a length other than 4")
        self._forget(stream_id)
        self._closed.append(stream_id)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._spend()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & h2.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        self._sender.apply_settings(h2.parse_settings(payload), self._streams)
        self._sender.out.append(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._pump()

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._spend()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of a length other than 8")
        if not flags & h2.ACK:
            self._sender.out.append(h2.frame(h2.PING, h2.ACK, 0, payload))

    def _on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        self._spend()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of less than 8 bytes")
        # The client opens no more streams: answer those that it has opened, then close.
        self._drain(self._last_id)

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        self._spend()
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a length other than 4")
        increment = int.from_bytes(payload, "big") & h2.WINDOW_MAX
        if stream_id == 0:
            if increment == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._sender.grow(increment)
        else:
            if stream_id > self._last_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
            if increment == 0:
                raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            stream = self._find(stream_id)
            if stream is None:
                return
            self._sender.grow_stream(stream, increment)
        self._pump()

    def _refill(self) -> None:
        """Give back what was received and is no longer held."""
        increment = self._server.options.window_bytes - self._window - self._held
        self._window += increment
        self._sender.out.append(h2.window_frame(0, increment))

    # Answers: a stream is in `_streams` from its first frame on the slow path until its answer was sent completely.

    def _find(self, stream_id: int) -> Stream | None:
        """The open stream of this id. A call that waits becomes one."""
        head = self._waiting.pop(stream_id, None)
        return self._streams.get(stream_id) if head is None else self._open(stream_id, head, is_ended=False)

    def _open(self, stream_id: int, head: RequestHead, *, is_ended: bool) -> Stream:
        stream = self._streams[stream_id] = Stream(stream_id, head, self._server.wheel.now, is_ended)
        return stream

    def _respond(self, stream: Stream, answer: bytes | Awaitable[bytes]) -> None:
        if isinstance(answer, bytes):
            self._finish_message(stream, answer)
            return
        task = stream.task = self._server.loop.create_task(self._wait(answer, stream.head.timeout_s))
        task.add_done_callback(lambda done: self._on_worked(stream, answer, done))

    async def _wait(self, answer: Awaitable[bytes], timeout_s: float | None) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await answer

    def _on_worked(self, stream: Stream, answer: Awaitable[bytes], task: asyncio.Task[bytes]) -> None:
        if task.cancelled() and isinstance(answer, Coroutine):
            answer.close()  # the call was reset, perhaps before it began
        if self._streams.get(stream.id) is not stream:
            if not task.cancelled():
                task.exception()
            return
        stream.task = None
        if task.cancelled():
            self._finish_error(stream, GrpcError(Status.UNAVAILABLE, "the server is stopping"))
        elif (error := task.exception()) is not None:
            self._finish_error(stream, self._failed(stream.head, error))
        else:
            self._finish_message(stream, task.result())
        if self._sender.out:
            self._server.outbox.add(self)
        self._settle()

    def _finish_message(self, stream: Stream, message: bytes) -> None:
        assert stream.head.method is not None
        stream.head.method.count(Status.OK)
        self._finish(stream, self._sender.answer(stream, message))

    def _finish_error(self, stream: Stream, error: GrpcError) -> None:
        if stream.head.method is not None:
            stream.head.method.count(error.status)
        self._finish(stream, self._sender.answer_error(stream, error))

    def _finish(self, stream: Stream, has_left: bool) -> None:
        """An answer was given. The stream stays until it has been sent completely."""
        self.calls += 1
        self._calls_in_read += 1
        self._drop_body(stream)
        if has_left:
            self._close_stream(stream)

    def _close_stream(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if stream.is_ended:
            self._closed.append(stream.id)
        else:
            # Answered before the request was complete: the rest of it is not needed.
            self._reset.append(stream.id)
            self._sender.out.append(h2.reset_frame(stream.id, ErrorCode.NO_ERROR))

    def _failed(self, head: RequestHead, error: BaseException) -> GrpcError:
        if isinstance(error, GrpcError):
            return error
        if isinstance(error, TimeoutError):
            return GrpcError(Status.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        logger.error("%s failed", "a call" if head.method is None else head.method.path, exc_info=error)
        return GrpcError(Status.INTERNAL, "internal error; see the log of the server")

    def _pump(self) -> None:
        if self._sender.blocked:
            for stream in self._sender.pump_all():
                self._close_stream(stream)
