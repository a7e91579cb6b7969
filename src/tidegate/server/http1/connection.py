"""One HTTP/1.1 connection: orders what was read, answers it, and watches the clock.

A request whose head is byte for byte one that was parsed before on this connection is not parsed again: the parser
rests between two messages, so that the same bytes would give the same head. It is answered inside `data_received`,
without a task. Everything else takes the long way through the reader.

Answers are not written one by one: they wait in the outbox for the end of the loop's turn.

Laws: answers leave in the order of the requests, also when an earlier one has to wait, and before the connection is
closed. A client that is slow to send or slow to read loses its connection, not our memory. Nothing is known here of
rate limits: an operation turns (head, body) into an answer, at once or as a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

from tidegate.server.api.problems import REQUEST_TIMEOUT, UNEXPECTED_ERROR, Answer, Refusal
from tidegate.server.http1.reader import HEADERS, REST, RequestReader
from tidegate.server.messages import Head, length_line

if TYPE_CHECKING:
    from tidegate.server.http1.listener import HttpServer

__all__ = ["HttpConnection"]

logger = logging.getLogger(__name__)

# Parsed in one go before other connections get a turn: at most about 300 pipelined requests.
FEED_BYTES: Final = 32_768
# Heads remembered for a connection. They differ in Content-Length only, as a rule.
HEADS_MAX: Final = 32
# By all connections together: ten thousand of them could otherwise fill the memory with heads.
REMEMBERED_BYTES_MAX: Final = 33_554_432
# A refused client may still be sending, and would meet a reset instead of the answer. What it sends is read and
# forgotten for a while: a body that is too large, but not without end.
LINGER_S: Final = 10.0
LINGER_BYTES: Final = 67_108_864
# What a request counts as whose client did not wait for the answer. Nobody ever sees it on the wire.
CLIENT_CLOSED: Final = 499

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE_LINE: Final = b"connection: close\r\n"
KEEP_ALIVE_LINE: Final = b"connection: keep-alive\r\n"

# Open; our side closed and reading on for a moment; closed.
OPEN, LINGERING, CLOSED = range(3)


class HttpConnection(asyncio.Protocol):
    """Made by `HttpServer` for each accepted socket; used by the loop's thread only."""

    __slots__ = (
        "_heads",
        "_held",
        "_is_eof",
        "_is_paused",
        "_is_resting",
        "_is_stopping",
        "_is_write_paused",
        "_lingered_bytes",
        "_queue",
        "_reader",
        "_server",
        "_started",
        "_state",
        "_task",
        "_transport",
        "_unsent",
        "_usual",
        "expires",
        "scheduled",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = None  # type: ignore[assignment] # set before anything else happens
        self._reader = RequestReader(server.intake, server.router, self)
        self._heads: dict[bytes, Head] = {}
        # Of those the one that came last.
        self._usual: Head | None = None
        # True only between two requests, with nothing waiting in either direction: the short way is open.
        self._is_resting = True
        self._state = OPEN
        # What waits in the outbox, if anything does.
        self._unsent: list[bytes] = []
        self.expires = 0
        self.scheduled = 0
        # The tick at which the request that is being received began.
        self._started = 0
        # The request that is being worked on, what comes behind it, and bytes that are not parsed yet. None in the
        # queue stands for "100 Continue".
        self._task: asyncio.Task[Answer] | None = None
        self._queue: deque[tuple[Head, bytes] | Refusal | None] = deque()
        self._held: deque[bytes] = deque()
        self._is_paused = False
        self._is_write_paused = False
        # The client has sent its last byte.
        self._is_eof = False
        # No further request will be taken from this connection.
        self._is_stopping = False
        self._lingered_bytes = 0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.write_bytes_max)
        self._server.connections.add(self)
        self._server.wheel.watch(self, self._server.header_ticks)

    def data_received(self, data: bytes) -> None:
        if self._is_resting:
            head = self._usual
            if head is not None and data.startswith(head.raw):
                end = len(head.raw)
            else:
                end = data.find(b"\r\n\r\n") + 4
                self._usual = head = self._heads.get(data[:end])
            if head is not None and len(data) - end == head.content_length:
                server = self._server
                operation = head.operation
                try:
                    answer = operation.handler(head, data[end:])
                except Exception as error:  # noqa: BLE001 - logged in _failed; one request must not end the rest
                    answer = self._failed(head, error)
                if type(answer) is tuple and not server.is_draining:
                    status, lines, body = answer
                    begin = server.begins.get(status) or server.begin(status)
                    self._put((begin, lines, length_line(len(body)), body))
                    statuses = operation.statuses
                    statuses[status] = statuses.get(status, 0) + 1
                    self.expires = server.wheel.now + server.idle_ticks
                else:
                    self._respond(head, answer)
                    self._settle()
                return
        self._take(data)

    def eof_received(self) -> bool:
        self._is_eof = True
        self.flush()
        # A client may say that it has nothing more to send and still wait for its answers. TLS cannot say that.
        is_waiting = self._task is not None or bool(self._held) or self._is_write_paused
        return is_waiting and self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = CLOSED
        self._is_resting = False
        self._is_stopping = True
        self.expires = 0
        self._server.wheel.forget(self)
        self._reader.drop()
        self._forget_heads()
        self._unsent.clear()
        self._queue.clear()
        self._held.clear()
        task, self._task = self._task, None
        if task is not None:
            # The work of a client that went away is not worth finishing; nothing has been counted for it yet.
            task.cancel()
        self._server.lost(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._is_resting = False
        self._pause()
        self._server.wheel.watch(self, self._server.request_ticks)

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._advance()

    # Bytes in.

    def _take(self, data: bytes) -> None:
        if self._state == LINGERING:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self._transport.abort()
        elif not self._is_stopping:
            self._held.append(data)
            if self._task is None and not self._is_write_paused and len(self._held) == 1:
                self._feed_held()
            else:
                self._pause()

    def _feed_held(self) -> None:
        """Parse one portion of what is held. What is left after it waits for another turn of the loop."""
        if self._is_stopping or self._task is not None or self._is_write_paused or not self._held:
            return
        data = self._held.popleft()
        if len(data) > FEED_BYTES:
            self._held.appendleft(data[FEED_BYTES:])
            data = data[:FEED_BYTES]
        was_resting = self._is_resting
        self._is_resting = False
        rest = self._reader.feed(data)
        if rest and not self._is_stopping:
            self._held.appendleft(rest)
        elif was_resting and (known := self._reader.repeatable(data)) is not None:
            self._remember(*known)
        self._settle()

    def _remember(self, data: bytes, head: Head) -> None:
        server = self._server
        if len(self._heads) >= HEADS_MAX:
            self._forget_heads()
        if server.remembered_bytes + len(data) <= REMEMBERED_BYTES_MAX:
            server.remembered_bytes += len(data)
            head.raw = data
            self._heads[data] = head

    def _forget_heads(self) -> None:
        self._server.remembered_bytes -= sum(map(len, self._heads))
        self._heads.clear()
        self._usual = None

    # The reader's side.

    def on_begin(self) -> None:
        self._started = self._server.wheel.now

    def on_continue(self) -> None:
        if self._task is not None or self._queue:
            self._queue.append(None)
        else:
            self._put((CONTINUE,))

    def on_request(self, head: Head, body: bytes) -> None:
        if not head.keep_alive:
            self._is_stopping = True
        if self._task is not None or self._queue:
            self._queue.append((head, body))
        else:
            self._serve(head, body)

    def on_refused(self, refusal: Refusal) -> None:
        """The request that is being received cannot be served, and nothing after it can be understood."""
        self._is_stopping = True
        self._held.clear()
        if self._task is not None or self._queue:
            self._queue.append(refusal)
        else:
            self._send_refusal(refusal)

    # Answers.

    def _put(self, parts: tuple[bytes, ...]) -> None:
        """Send this after all that was put before: soon, and at the latest before the connection is closed."""
        is_first = not self._unsent
        self._unsent += parts
        if is_first:
            self._server.outbox.add(self)

    def flush(self) -> None:
        """Send what was put: the outbox's call, and that of everything after which it could not be sent any more."""
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def _close(self) -> None:
        self._state = CLOSED
        self.flush()
        self._transport.close()

    def _serve(self, head: Head, body: bytes) -> None:
        try:
            answer = head.operation.handler(head, body)
        except Exception as error:  # noqa: BLE001 - logged in _failed; one request must not end the rest
            answer = self._failed(head, error)
        self._respond(head, answer)

    def _respond(self, head: Head, answer: Any) -> None:
        if type(answer) is tuple:
            self._send(head, answer)
            return
        task: asyncio.Task[Answer] = self._server.loop.create_task(answer)
        self._task = task
        self._is_resting = False
        self._pause()
        self._server.wheel.watch(self, self._server.request_ticks)
        task.add_done_callback(lambda done: self._finished(head, done))

    def _finished(self, head: Head, task: asyncio.Task[Answer]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._task is not task:
            if self._state == CLOSED:
                head.operation.count(CLIENT_CLOSED)
            return
        self._task = None
        self._send(
            head, self._failed(head, error) if task.cancelled() or error is not None else task.result()
        )
        self._advance()

    def _advance(self) -> None:
        """Go on after a wait: requests that are already parsed first, then bytes that are not."""
        while self._queue and self._task is None and not self._is_write_paused:
            item = self._queue.popleft()
            if item is None:
                self._put((CONTINUE,))
            elif isinstance(item, Refusal):
                self._send_refusal(item)
            else:
                self._serve(*item)
        self._settle()

    def _send(self, head: Head, answer: Answer) -> None:
        server = self._server
        status, lines, body = answer
        head.operation.count(status)
        if not head.keep_alive or server.is_draining:
            self._is_stopping = True
            self._queue.clear()
            self._held.clear()
            lines += CLOSE_LINE
        elif head.is_old:
            lines += KEEP_ALIVE_LINE
        begin = server.begins.get(status) or server.begin(status)
        self._put((begin, lines, length_line(len(body)), b"" if head.is_head else body))

    def _failed(self, head: Head, error: BaseException | None) -> Answer:
        """A fault of ours. The log has the reason; the client has an id to ask with."""
        request_id = self._server.ids.take()
        logger.error(
            "%s failed", head.operation.name, exc_info=error, extra={"request_id": "req_" + request_id}
        )
        refusal = Refusal(
            UNEXPECTED_ERROR, "Something went wrong on our side. The log of the server has more."
        )
        return self._server.refuse(head.accept, refusal, request_id)

    # Ending.

    def _send_refusal(self, refusal: Refusal) -> None:
        server = self._server
        head = self._reader.head
        operation = server.router.unknown if head is None else head.operation
        status, lines, body = server.refuse(self._reader.accept, refusal, server.ids.take())
        operation.count(status)
        self._put((server.begin(status), lines, CLOSE_LINE, length_line(len(body)), body))
        self.flush()
        self._state = LINGERING
        if self._is_eof:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._resume()
        server.wheel.watch(self, server.wheel.ticks(LINGER_S))

    def _settle(self) -> None:
        """After anything has happened: what is the connection waiting for now?"""
        if self._state != OPEN or self._task is not None or self._is_write_paused:
            return
        server = self._server
        phase = self._reader.phase
        if self._held:
            self._pause()
            server.loop.call_soon(self._feed_held)
        elif self._is_stopping or self._is_eof:
            self._close()
        elif phase == REST:
            self._resume()
            self._is_resting = True
            server.wheel.watch(self, server.idle_ticks)
        else:
            self._resume()
            ticks = server.header_ticks if phase == HEADERS else server.request_ticks
            server.wheel.watch(self, max(1, self._started + ticks - server.wheel.now))

    def on_deadline(self) -> None:
        """The wheel's call: whatever the connection was waiting for has not come."""
        if self._state != OPEN or self._is_write_paused:
            self._transport.abort()
        elif self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            self._queue.clear()
            self.on_refused(Refusal(REQUEST_TIMEOUT, "The request took too long."))
        elif self._reader.phase == REST:
            self._close()
        else:
            self.on_refused(Refusal(REQUEST_TIMEOUT, "The request did not arrive in time."))

    def close_if_idle(self) -> None:
        """Part of a graceful stop: nothing is under way here."""
        if self._state == LINGERING:
            self._transport.abort()
        elif self._is_resting:
            self._is_resting = False
            self._is_stopping = True
            self._close()

    def abort(self) -> None:
        """The deadline of a graceful stop has passed."""
        self._transport.abort()

    def _pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
