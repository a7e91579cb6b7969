"""What a connection answers: a request that is complete becomes a call, and its outcome the frames of an answer.

The part of a connection that knows methods and tasks, and no frames that arrive. A stream is in `_streams` from its
first frame on the slow path until its answer has been sent completely.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from tidegate.server.http2 import frames as h2
from tidegate.server.http2.frames import ErrorCode
from tidegate.server.http2.grpc import GrpcError, Status
from tidegate.server.http2.headers import RequestHead
from tidegate.server.http2.lifecycle import CLOSED_MAX, ConnectionLifecycle
from tidegate.server.http2.stream import Stream

if TYPE_CHECKING:
    from tidegate.server.http2.listener import Http2Server

logger = logging.getLogger(__name__)


class ConnectionAnswers(ConnectionLifecycle):
    """What `Http2Connection` builds on. Used by the loop's thread only."""

    __slots__ = ("_calls_in_read", "_closed")

    def __init__(self, server: Http2Server) -> None:
        super().__init__(server)
        # Calls that were answered in the present read. Their answers have not been written, so they count as open.
        self._calls_in_read = 0
        # The ids of the last streams that ended on both sides, to distinguish late frames from wrong ones.
        self._closed: deque[int] = deque(maxlen=CLOSED_MAX)

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
        task.add_done_callback(lambda done: self._on_worked(stream, done))

    async def _wait(self, answer: Awaitable[bytes], timeout_s: float | None) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await answer

    def _on_worked(self, stream: Stream, task: asyncio.Task[bytes]) -> None:
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
