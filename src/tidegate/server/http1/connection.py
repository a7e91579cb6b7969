"""One HTTP/1.1 connection: puts requests in order, sends their answers, and keeps deadlines.

A request whose head came before is answered by `repeats`, without parsing it again. Everything else goes through the
reader. Answers wait in the outbox for the end of the loop's turn.

Laws: answers are sent in the order of the requests, also when an earlier one has to wait, and before the connection is
closed. A client that sends or reads slowly loses its connection and does not fill memory. Nothing here knows about
rate limits: an operation turns (head, body) into an answer, at once or as a coroutine.

The states, and the table of transitions that `_enter` enforces:

    IDLE       between two requests, nothing waits in either direction
    READING    a request is arriving, or bytes that have arrived wait to be parsed
    WAITING    an operation runs as a task; nothing more is read
    BLOCKED    the client does not read its answers; nothing more is read
    STREAMING  the last answer is sent part by part; what the client still sends is read and dropped
    LINGERING  rejected; what the client still sends is read and dropped, so that it can read the answer
    CLOSING    the last bytes are being sent
    CLOSED     the transport is gone

    IDLE       -> READING WAITING BLOCKED CLOSING CLOSED
    READING    -> IDLE WAITING BLOCKED STREAMING LINGERING CLOSING CLOSED
    WAITING    -> READING BLOCKED LINGERING CLOSING CLOSED
    BLOCKED    -> READING WAITING LINGERING CLOSING CLOSED
    STREAMING  -> CLOSING CLOSED
    LINGERING  -> CLOSED
    CLOSING    -> CLOSED
    CLOSED     ->
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from tidegate.server.http1.bounds import Rejection
from tidegate.server.http1.reader import HEADERS, REST, RequestReader
from tidegate.server.http1.repeats import RepeatedHeads, RequestHead, length_line
from tidegate.server.messages import Answer, Stream

if TYPE_CHECKING:
    from tidegate.server.http1.listener import HttpServer

__all__ = ["TRANSITIONS", "HttpConnection", "State", "TransitionError"]

logger = logging.getLogger(__name__)

# Parsed in one go before other connections get a turn: at most about 300 of the shortest pipelined requests. Of a body
# whose length is known more is taken at once: nothing else can be in it.
FEED_BYTES: Final = 8_192
BODY_FEED_BYTES: Final = 65_536
# A rejected client may still be sending, and would get a reset instead of the answer. What it sends is read and dropped
# for this long and up to this much. A connection that is being closed has as long to take its last bytes.
LINGER_S: Final = 10.0
LINGER_BYTES: Final = 67_108_864
# The status that is counted when a client goes before its answer. It is never sent.
CLIENT_CLOSED: Final = 499

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE_LINE: Final = b"connection: close\r\n"
KEEP_ALIVE_LINE: Final = b"connection: keep-alive\r\n"


class State(Enum):
    """See the table in the docstring of this module."""

    IDLE = "IDLE"
    READING = "READING"
    WAITING = "WAITING"
    BLOCKED = "BLOCKED"
    STREAMING = "STREAMING"
    LINGERING = "LINGERING"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"


IDLE, READING, WAITING, BLOCKED, STREAMING, LINGERING, CLOSING, CLOSED = State

TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    IDLE: frozenset({READING, WAITING, BLOCKED, CLOSING, CLOSED}),
    READING: frozenset({IDLE, WAITING, BLOCKED, STREAMING, LINGERING, CLOSING, CLOSED}),
    WAITING: frozenset({READING, BLOCKED, LINGERING, CLOSING, CLOSED}),
    BLOCKED: frozenset({READING, WAITING, LINGERING, CLOSING, CLOSED}),
    STREAMING: frozenset({CLOSING, CLOSED}),
    LINGERING: frozenset({CLOSED}),
    CLOSING: frozenset({CLOSED}),
    CLOSED: frozenset(),
}


class TransitionError(RuntimeError):
    """A fault of this module: a connection was to enter a state that the table does not allow."""


class HttpConnection(RepeatedHeads, asyncio.Protocol):
    """Made by `HttpServer` for each accepted socket; used by the loop's thread only."""

    __slots__ = (
        "_has_streamed",
        "_held",
        "_is_behind",
        "_is_eof",
        "_is_last",
        "_is_paused",
        "_is_scheduled",
        "_is_spare",
        "_lingered_bytes",
        "_put_bytes",
        "_queue",
        "_reader",
        "_server",
        "_since",
        "_started",
        "_task",
        "_unsubscribe",
        "state",
    )

    def __init__(self, server: HttpServer, *, is_spare: bool = False) -> None:
        super().__init__(server.shared)
        self._server = server
        # All places are taken: this connection may only ask for probes.
        self._is_spare = is_spare
        self._reader = RequestReader(server.intake, server.router, self)
        # Changed by _enter only.
        self.state = IDLE
        # The tick at which the request that is being received began, and that of the last transition.
        self._started = 0
        self._since = server.wheel.now
        # The request that an operation works on, the requests behind it (None stands for "100 Continue"), and bytes
        # that are not parsed yet.
        self._task: asyncio.Task[Answer] | None = None
        self._queue: deque[tuple[RequestHead, bytes] | Rejection | None] = deque()
        self._held: deque[bytes] = deque()
        self._is_paused = False
        # `_continue` runs in the next turn of the loop.
        self._is_scheduled = False
        # Bytes of answers in this turn.
        self._put_bytes = 0
        # The client has sent its last byte.
        self._is_eof = False
        # No further request is taken from this connection.
        self._is_last = False
        self._lingered_bytes = 0
        # Its last answer is or was a stream: no request behind it is answered.
        self._has_streamed = False
        # The client of a stream has not read what was sent.
        self._is_behind = False
        # Ends the subscription to a stream.
        self._unsubscribe: Callable[[], object] | None = None

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(f"a connection cannot go from {self.state.name} to {state.name}")
        self.state = state
        self._is_idle = state is IDLE
        self._since = self._server.wheel.now

    def idle_since(self) -> int | None:
        """The tick since which this server waits for the client; None: the client waits for this server."""
        if self.state is IDLE:
            return max(self._since, self.expires - self._server.idle_ticks)
        return None if self.state is WAITING else self._since

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=self._server.write_bytes_max)
        self._server.connected(self)
        self._server.wheel.watch(self, min(self._server.header_ticks, self._server.idle_ticks))

    def eof_received(self) -> bool:
        self._is_eof = True
        self.flush()
        # A client may end its side and still wait for its answers. TLS cannot express that.
        is_awaited = self._task is not None or bool(self._queue) or bool(self._held) or self.state is BLOCKED
        return is_awaited and self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(CLOSED)
        self._is_last = True
        self.expires = 0
        self._server.wheel.forget(self)
        self._reader.drop()
        self._forget_heads()
        self._unsent.clear()
        self._queue.clear()
        self._held.clear()
        task, self._task = self._task, None
        if task is not None:
            # No answer can be sent any more. What it waits for has not been decided; a quota of the workspace may have
            # been used.
            task.cancel()
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._server.lost(self)

    def pause_writing(self) -> None:
        self._is_behind = True
        if self.state in (IDLE, READING, WAITING):
            self._enter(BLOCKED)
            self._pause()
        self._server.wheel.watch(self, self._server.request_ticks)

    def resume_writing(self) -> None:
        self._is_behind = False
        if self.state is STREAMING:
            self.expires = 0
        elif self.state is BLOCKED:
            if self._task is not None:
                self._enter(WAITING)
            else:
                self._enter(READING)
                self._advance()

    # Bytes in.

    def take(self, data: bytes) -> None:
        if self.state in (LINGERING, STREAMING):
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self._transport.abort()
        elif not self._is_last:
            self._held.append(data)
            if self.state in (IDLE, READING) and len(self._held) == 1:
                self._feed_held()
            else:
                self._pause()

    def _feed_held(self) -> None:
        """Parse one portion of what is held. The rest waits for another turn of the loop."""
        if self._is_last or not self._held or self.state not in (IDLE, READING):
            return
        self._put_bytes = 0
        data = self._held.popleft()
        portion = max(FEED_BYTES, min(BODY_FEED_BYTES, self._reader.body_bytes_missing))
        if len(data) > portion:
            self._held.appendleft(data[portion:])
            data = data[:portion]
        was_idle = self.state is IDLE
        if was_idle:
            self._enter(READING)
        rest = self._reader.feed(data)
        if rest and not self._is_last:
            self._held.appendleft(rest)
        elif was_idle and (known := self._reader.repeatable(data)) is not None:
            self._remember(*known)
        self._settle()

    # Callbacks of the reader.

    def peer(self) -> str:
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    def on_begin(self) -> None:
        self._started = self._server.wheel.now

    def on_continue(self) -> None:
        if self._has_streamed:
            return
        if self._task is not None or self._queue:
            self._queue.append(None)
        else:
            self._put((CONTINUE,))

    def on_request(self, head: RequestHead, body: bytes) -> None:
        if self._is_last:
            return
        if self._is_spare and not head.operation.is_probe:
            self.on_rejected(Rejection(503, "All connections of this server are in use. Try again."))
            return
        if not head.keep_alive:
            self._is_last = True
        if self._must_queue():
            self._queue.append((head, body))
        else:
            self._serve(head, body)

    def _must_queue(self) -> bool:
        """Whether a request has to wait: for an earlier one, for the client to read, or for other connections."""
        return (
            self._task is not None
            or bool(self._queue)
            or self.state is BLOCKED
            or self._put_bytes >= self._server.write_bytes_max
        )

    def on_rejected(self, rejection: Rejection) -> None:
        """The request that is being received cannot be served, and what follows it cannot be parsed."""
        if self._has_streamed:
            return
        self._is_last = True
        self._held.clear()
        if self._task is not None or self._queue:
            self._queue.append(rejection)
        else:
            self._send_rejection(rejection)

    # Answers.

    def _put(self, parts: tuple[bytes, ...]) -> None:
        """Send this after everything that was put before: soon, and before the connection is closed."""
        is_first = not self._unsent
        self._unsent += parts
        self._put_bytes += sum(map(len, parts))
        if is_first:
            self._server.outbox.add(self)

    def _close(self) -> None:
        self._enter(CLOSING)
        self.flush()
        # The transport waits for the client to take what is unsent, for ever.
        self._server.wheel.watch(self, self._server.wheel.ticks(LINGER_S))
        self._transport.close()

    def respond(self, head: RequestHead, answer: Any) -> None:
        self._respond(head, answer)
        self._settle()

    def _serve(self, head: RequestHead, body: bytes) -> None:
        try:
            answer = head.operation.handler(head.fields, body)
        except Exception as error:  # noqa: BLE001 - logged in _failed; one request must not end the rest
            answer = self.failed(head, error)
        self._respond(head, answer)

    def _respond(self, head: RequestHead, answer: Any) -> None:
        if type(answer) is tuple:
            self._send(head, answer)
            return
        if isinstance(answer, Stream):
            self._open_stream(head, answer)
            return
        task: asyncio.Task[Answer] = self._server.loop.create_task(answer)
        self._task = task
        if self.state is not BLOCKED:
            self._enter(WAITING)
        self._pause()
        self._server.wheel.watch(self, self._server.request_ticks)
        task.add_done_callback(lambda done: self._finished(head, done))

    def _open_stream(self, head: RequestHead, stream: Stream) -> None:
        """The end of the connection is the end of the body: no length, no chunks."""
        server = self._server
        self._is_last = True
        self._has_streamed = True
        self._queue.clear()
        self._held.clear()
        head.operation.count(200)
        self._put((server.begin(200), stream.lines, CLOSE_LINE, b"\r\n"))
        if head.is_head or server.is_draining or self._is_eof:
            self._close()
            return
        self._enter(STREAMING)
        self.expires = 0  # a client that reads may stay
        self._resume()
        self._unsubscribe = stream.subscribe(self)

    def push(self, data: bytes) -> bool:
        """Of a stream: send `data`, unless the client has not read what was sent before."""
        if self.state is not STREAMING or self._is_behind:
            return False
        self._put((data,))
        return True

    def end(self) -> None:
        """Of a stream: there is no more to send."""
        if self.state is STREAMING:
            self._close()

    def _finished(self, head: RequestHead, task: asyncio.Task[Answer]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._task is not task:
            if self.state is CLOSED:
                head.operation.count(CLIENT_CLOSED)
            return
        self._task = None
        if self.state is WAITING:
            self._enter(READING)
        self._send(head, self.failed(head, error) if task.cancelled() or error is not None else task.result())
        self._advance()

    def _advance(self) -> None:
        """Continue after a wait: first with requests that are already parsed, then with bytes that are not."""
        self._put_bytes = 0
        while self._queue and self.state is READING and self._put_bytes < self._server.write_bytes_max:
            item = self._queue.popleft()
            if item is None:
                self._put((CONTINUE,))
            elif isinstance(item, Rejection):
                self._send_rejection(item)
            else:
                self._serve(*item)
        self._settle()

    def _send(self, head: RequestHead, answer: Answer) -> None:
        server = self._server
        status, lines, body = answer
        head.operation.count(status)
        if not head.keep_alive or server.is_draining:
            self._is_last = True
            self._queue.clear()
            self._held.clear()
            lines += CLOSE_LINE
        elif head.is_http10:
            lines += KEEP_ALIVE_LINE
        self._put((server.begin(status), lines, length_line(len(body)), b"" if head.is_head else body))

    def failed(self, head: RequestHead, error: BaseException | None) -> Answer:
        """The answer to a request whose operation raised. The log has the reason; the client gets its id."""
        request_id = self._server.new_id()
        logger.error(
            "%s failed", head.operation.name, exc_info=error, extra={"request_id": "req_" + request_id}
        )
        detail = "The server failed. Its log has the reason."
        return self._server.refuse(500, detail, head.fields.accept, request_id=request_id)

    # The end.

    def _send_rejection(self, rejection: Rejection) -> None:
        server = self._server
        head = self._reader.head
        operation = server.router.unknown if head is None else head.operation
        request_id = server.new_id()
        status, lines, body = server.refuse(*rejection, self._reader.accept, request_id=request_id)
        logger.debug("refused %d: %s", *rejection, extra={"request_id": "req_" + request_id})
        operation.count(status)
        self._put((server.begin(status), lines, CLOSE_LINE, length_line(len(body)), body))
        if self._is_eof:
            self._close()
            return
        self.flush()
        self._enter(LINGERING)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._resume()
        server.wheel.watch(self, server.wheel.ticks(LINGER_S))

    def _settle(self) -> None:
        """After an event: decide what the connection waits for now, and until when."""
        if self.state not in (IDLE, READING):
            return
        server = self._server
        phase = self._reader.phase
        if self._queue or self._held:
            self._pause()
            if not self._is_scheduled:
                self._is_scheduled = True
                server.loop.call_soon(self._continue)
        elif self._is_last or self._is_eof:
            self._close()
        elif phase == REST:
            self._resume()
            if self.state is READING:
                self._enter(IDLE)
            server.wheel.watch(self, server.idle_ticks)
        else:
            self._resume()
            ticks = server.header_ticks if phase == HEADERS else server.request_ticks
            server.wheel.watch(self, max(1, self._started + ticks - server.wheel.now))

    def _continue(self) -> None:
        """In a new turn of the loop: more of what the client has sent already."""
        self._is_scheduled = False
        if self._queue:
            self._advance()
        else:
            self._feed_held()

    def on_deadline(self) -> None:
        """Called by the wheel: what the connection waited for has not come."""
        if self.state in (BLOCKED, STREAMING, LINGERING, CLOSING):
            self._transport.abort()
        elif self.state is WAITING:
            task, self._task = self._task, None
            assert task is not None
            task.cancel()
            self._queue.clear()
            self.on_rejected(Rejection(408, "The request took too long."))
        elif self._reader.phase == REST:
            self._close()
        else:
            self.on_rejected(Rejection(408, "The request did not arrive in time."))

    def drain(self) -> None:
        """Part of a graceful stop: close, unless a request is under way."""
        if self.state is LINGERING:
            self._transport.abort()
        elif self.state in (IDLE, STREAMING):
            self._is_last = True
            self._close()

    def abort(self) -> None:
        """Close at once: the deadline of a graceful stop has passed, or another connection needs the place."""
        self._transport.abort()

    def _pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
