"""One HTTP/1.1 connection: llhttp parses, this class bounds, orders and answers.

A request whose head is byte for byte one that llhttp accepted before on this connection is not parsed again: the
parser rests between two messages, so the same bytes would give the same result. It is answered inside
`data_received`, without a task. Everything else takes the long way through the parser.

Laws: answers leave in the order of the requests, also when an earlier one has to wait. Nothing that a client sends
is kept beyond its bound. A client that is slow to send or slow to read loses its connection, not our memory.
It knows nothing of rate limits: an operation turns (head, body) into an answer, at once or as a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import httptools

from tidegate.server.messages import Head, Operation, length_line
from tidegate.server.problems import (
    BODY_TOO_LARGE,
    EXPECTATION_FAILED,
    HEADERS_TOO_LARGE,
    MALFORMED_REQUEST,
    OVERLOADED,
    REQUEST_TIMEOUT,
    UNEXPECTED_ERROR,
    URI_TOO_LONG,
    Answer,
    Problem,
    Refusal,
)

if TYPE_CHECKING:
    from tidegate.server.listener import HttpServer

__all__ = ["HttpConnection"]

logger = logging.getLogger(__name__)

# Parsed in one go before other connections get a turn: at most about 300 pipelined requests.
FEED_BYTES: Final = 32_768
TARGET_BYTES_MAX: Final = 8_192
# Heads remembered for a connection. They differ in Content-Length only, as a rule; larger ones are not worth it.
HEADS_MAX: Final = 32
HEAD_BYTES_KEPT: Final = 2_048
# A refused client may still be sending. Reading a little longer lets it see the answer instead of a reset.
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 1_048_576
# What chunk sizes, extensions and trailers may add to a body in chunks.
CHUNK_OVERHEAD_BYTES: Final = 65_536

# What a request counts as whose client did not wait for the answer. Nobody ever sees it on the wire.
CLIENT_CLOSED: Final = 499

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE_LINE: Final = b"connection: close\r\n"
KEEP_ALIVE_LINE: Final = b"connection: keep-alive\r\n"

# Where in a request the bytes from the client are; the last two: there will be no further request.
REST, HEADERS, BODY, LINGER, CLOSED = range(5)

HOST, AUTHORIZATION, ACCEPT, EXPECT, LENGTH, TEST_TIME, METRICS, FIELDS = range(8)
FIELD_OF: Final[dict[bytes, int]] = {
    b"host": HOST,
    b"authorization": AUTHORIZATION,
    b"accept": ACCEPT,
    b"expect": EXPECT,
    b"content-length": LENGTH,
    b"x-test-time": TEST_TIME,
    b"x-unkey-metrics": METRICS,
}
# The usual spellings need no lower(). "Host" and "Accept" are the same work as the rest: one look-up.
FIELD_OF.update({name.title(): index for name, index in list(FIELD_OF.items())})


class _Refused(Exception):
    """Ends a feed from inside a callback of the parser. The reason is already on its way to the client."""


class HttpConnection(asyncio.Protocol):
    """See above. Made by `HttpServer` for each accepted socket; used by the loop's thread only."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_fields",
        "_head",
        "_head_bytes",
        "_headers",
        "_heads",
        "_held",
        "_is_eof",
        "_is_paused",
        "_is_resting",
        "_is_stopping",
        "_is_write_paused",
        "_messages",
        "_parser",
        "_phase",
        "_queue",
        "_server",
        "_started",
        "_task",
        "_target",
        "_transport",
        "_wire_bytes",
        "expires",
        "scheduled",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = None  # type: ignore[assignment] # set before anything else happens
        self._parser = httptools.HttpRequestParser(self)
        self._heads: dict[bytes, Head] = {}
        # True only between two requests, with nothing waiting in either direction: the short way is open.
        self._is_resting = True
        self._phase = REST
        self.expires = 0
        self.scheduled = 0
        # The request that is being received.
        self._started = 0
        self._target = b""
        self._fields: list[bytes | None] = [None] * FIELDS
        self._headers = 0
        self._head_bytes = 0
        self._wire_bytes = 0
        self._head: Head | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        # Requests that were completed since the connection was made.
        self._messages = 0
        # The request that is being worked on, those behind it, and bytes that are not parsed yet.
        self._task: asyncio.Task[Answer] | None = None
        self._queue: deque[tuple[Head, bytes] | Refusal | None] = deque()
        self._held: deque[bytes] = deque()
        self._is_paused = False
        self._is_write_paused = False
        # The client has sent its last byte.
        self._is_eof = False
        # No further request will be taken from this connection.
        self._is_stopping = False

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.write_bytes_max)
        self._server.connections.add(self)
        self._server.wheel.watch(self, self._server.header_ticks)

    def data_received(self, data: bytes) -> None:
        if self._is_resting:
            end = data.find(b"\r\n\r\n") + 4
            head = self._heads.get(data[:end])
            if head is not None and len(data) - end == head.content_length:
                server = self._server
                operation = head.operation
                try:
                    answer = operation.handler(head, data[end:])
                except Exception as error:  # noqa: BLE001 - logged in _failed; one request must not end the rest
                    answer = self._failed(head, error)
                if type(answer) is tuple and not server.is_draining:
                    status, lines, body = answer
                    self._transport.write(
                        b"".join((server.status_and_date(status), lines, length_line(len(body)), body))
                    )
                    operation.count(status)
                    self.expires = server.wheel.now + server.idle_ticks
                    return
                self._started = server.wheel.now
                self._respond(head, answer)
                self._settle()
                return
        self._take(data)

    def eof_received(self) -> bool:
        self._is_eof = True
        # A client may say that it has nothing more to send and still wait for its answers. TLS cannot say that.
        is_waiting = self._task is not None or bool(self._held) or self._is_write_paused
        return is_waiting and self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self._is_resting = False
        self._is_stopping = True
        self.expires = 0
        self._server.wheel.forget(self)
        self._drop_body()
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
        if self._phase == LINGER:
            self._wire_bytes += len(data)
            if self._wire_bytes > LINGER_BYTES:
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
        self._is_resting = False
        self._feed(data)
        self._settle()

    def _feed(self, data: bytes) -> None:
        messages = self._messages
        was = self._phase
        if was == BODY:
            self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # We speak nothing else; the request has been answered as if it had not asked. llhttp is done after it.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[upgrade.args[0] :]
            if rest and not self._is_stopping:
                self._held.appendleft(rest)
            return
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                logger.exception("a callback of the HTTP parser failed")
                self._refuse(UNEXPECTED_ERROR, "Something went wrong on our side.")
            return
        except httptools.HttpParserError as error:
            if not self._is_stopping:
                self._refuse(MALFORMED_REQUEST, f"This is not an HTTP/1.1 request: {error}.")
            return
        if self._phase == HEADERS:
            if messages == self._messages:
                self._wire_bytes += len(data)  # the headers have not ended: all of this portion is headers
            if self._wire_bytes > self._server.header_bytes_max:
                self._refuse(HEADERS_TOO_LARGE, self._server.header_bound)
        elif self._phase == BODY:
            # Chunk sizes, their extensions and trailers are no body; they are bounded with it all the same.
            if self._wire_bytes > self._server.body_bytes_max + CHUNK_OVERHEAD_BYTES:
                self._refuse(BODY_TOO_LARGE, self._server.body_bound)
        elif was == REST and messages + 1 == self._messages:
            self._remember(data)

    def _remember(self, data: bytes) -> None:
        """`data` was exactly one request. Keep its head, if the next one may well be the same."""
        head = self._head
        if head is None or not head.keep_alive or head.is_old or head.is_head:
            return
        end = len(data) - head.content_length
        if end > HEAD_BYTES_KEPT or data.find(b"\r\n\r\n") + 4 != end:
            return  # also a body in chunks, whose length is not in its head
        if self._fields[EXPECT] is not None:
            return
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        self._heads[data[:end]] = head

    # The parser's side.

    def on_message_begin(self) -> None:
        self._phase = HEADERS
        self._started = self._server.wheel.now
        self._target = b""
        self._fields = [None] * FIELDS
        self._headers = 0
        self._head_bytes = 0
        self._wire_bytes = 0
        self._head = None

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > TARGET_BYTES_MAX:
            self._stop(URI_TOO_LONG, f"The request target is longer than {TARGET_BYTES_MAX} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != HEADERS:
            return  # a trailer: bounded with the body, and of no use to us
        self._headers += 1
        self._head_bytes += len(name) + len(value) + 4
        server = self._server
        if self._headers > server.headers_max or self._head_bytes > server.header_bytes_max:
            self._stop(HEADERS_TOO_LARGE, server.header_bound)
        field = FIELD_OF.get(name)
        if field is None:
            field = FIELD_OF.get(name.lower())
            if field is None:
                return
        held = self._fields[field]
        if held is None:
            self._fields[field] = value.strip(b" \t")
        elif field == ACCEPT:
            self._fields[field] = held + b"," + value
        else:
            # Which of the two counts is a matter of taste, and a proxy in front may have another.
            self._stop(MALFORMED_REQUEST, f"The header field {name.decode('ascii')} is given twice.")

    def on_headers_complete(self) -> None:
        fields = self._fields
        parser = self._parser
        method = parser.get_method()
        version = parser.get_http_version()
        if version == "1.1":
            if fields[HOST] is None:
                self._stop(MALFORMED_REQUEST, "An HTTP/1.1 request must have a Host header field.")
        elif version != "1.0":
            self._stop(MALFORMED_REQUEST, f"This server speaks HTTP/1.1, not HTTP/{version}.")
        operation, query = self._server.router.find(method, self._target)
        head = Head(operation)
        head.query = query
        head.authorization = fields[AUTHORIZATION]
        head.accept = fields[ACCEPT] or b""
        head.test_time = fields[TEST_TIME]
        head.metrics_off = fields[METRICS] == b"disabled"
        head.content_length = int(fields[LENGTH] or 0)
        head.keep_alive = parser.should_keep_alive()
        head.is_old = version == "1.0"
        head.is_head = method == b"HEAD"
        self._head = head
        self._phase = BODY
        self._wire_bytes = 0
        if head.content_length > self._server.body_bytes_max:
            self._stop(BODY_TOO_LARGE, self._server.body_bound)
        expectation = fields[EXPECT]
        if expectation is not None:
            if expectation.lower() != b"100-continue":
                self._stop(EXPECTATION_FAILED, "The only expectation that this server meets is 100-continue.")
            if version == "1.1":
                self._continue()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        self._server.buffered_bytes += len(data)
        if self._body_bytes > self._server.body_bytes_max:
            self._stop(BODY_TOO_LARGE, self._server.body_bound)
        if self._server.buffered_bytes > self._server.buffered_bytes_max:
            self._stop(OVERLOADED, "Too many large bodies are being received at once. Try again.")

    def on_message_complete(self) -> None:
        head = self._head
        assert head is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._drop_body()
        self._messages += 1
        self._phase = REST
        if not head.keep_alive:
            self._is_stopping = True
        if self._task is not None or self._queue:
            self._queue.append((head, body))
        else:
            self._serve(head, body)

    # Answers.

    def _continue(self) -> None:
        if self._task is not None or self._queue:
            self._queue.append(None)
        else:
            self._transport.write(CONTINUE)

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
            if self._phase == CLOSED:
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
                self._transport.write(CONTINUE)
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
        self._transport.write(
            b"".join(
                (server.status_and_date(status), lines, length_line(len(body)), b"" if head.is_head else body)
            )
        )

    def _failed(self, head: Head, error: BaseException | None) -> Answer:
        """A fault of ours. The log has the reason; the client has an id to ask with."""
        request_id = self._server.ids.take()
        logger.error("%s failed, request req_%s", head.operation.name, request_id, exc_info=error)
        refusal = Refusal(
            UNEXPECTED_ERROR, "Something went wrong on our side. The log of the server has more."
        )
        return self._server.refuse(head.accept, refusal, request_id)

    # Refusing and ending.

    def _stop(self, problem: Problem, detail: str) -> None:
        """From a callback of the parser: refuse, and parse no further."""
        self._refuse(problem, detail)
        raise _Refused

    def _refuse(self, problem: Problem, detail: str) -> None:
        """The request that is being received cannot be served, and nothing after it can be understood."""
        self._is_stopping = True
        self._held.clear()
        self._drop_body()
        refusal = Refusal(problem, detail)
        if self._task is not None or self._queue:
            self._queue.append(refusal)
        else:
            self._send_refusal(refusal)

    def _send_refusal(self, refusal: Refusal) -> None:
        server = self._server
        accept = self._fields[ACCEPT] or b""
        operation: Operation = server.router.unknown if self._head is None else self._head.operation
        status, lines, body = server.refuse(accept, refusal, server.ids.take())
        operation.count(status)
        self._transport.write(
            b"".join((server.status_and_date(status), lines, CLOSE_LINE, length_line(len(body)), body))
        )
        self._linger()

    def _linger(self) -> None:
        """Close our side, and read on for a moment: a reset would take the answer away from the client."""
        self._phase = LINGER
        self._wire_bytes = 0
        if self._is_eof or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._resume()
        self._server.wheel.watch(self, self._server.wheel.ticks(LINGER_S))

    def _settle(self) -> None:
        """After anything has happened: what is the connection waiting for now?"""
        if self._phase >= LINGER or self._task is not None or self._is_write_paused:
            return
        server = self._server
        if self._held:
            self._pause()
            server.loop.call_soon(self._feed_held)
        elif self._is_stopping or self._is_eof:
            self._phase = CLOSED
            self._transport.close()
        else:
            self._resume()
            if self._phase == REST:
                self._is_resting = True
                server.wheel.watch(self, server.idle_ticks)
            else:
                ticks = server.header_ticks if self._phase == HEADERS else server.request_ticks
                server.wheel.watch(self, max(1, self._started + ticks - server.wheel.now))

    def on_deadline(self) -> None:
        """The wheel's call: whatever the connection was waiting for has not come."""
        if self._phase >= LINGER or self._is_write_paused:
            self._transport.abort()
        elif self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            self._queue.clear()
            self._refuse(REQUEST_TIMEOUT, "The request took too long.")
        elif self._phase == REST:
            self._phase = CLOSED
            self._transport.close()
        else:
            self._refuse(REQUEST_TIMEOUT, "The request did not arrive in time.")

    def close_if_idle(self) -> None:
        """Part of a graceful stop: nothing is under way here."""
        if self._is_resting:
            self._is_resting = False
            self._is_stopping = True
            self._phase = CLOSED
            self._transport.close()

    def abort(self) -> None:
        """The deadline of a graceful stop has passed."""
        self._transport.abort()

    def _drop_body(self) -> None:
        self._server.buffered_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

    def _pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
