"""From bytes to requests: llhttp parses, this class keeps what it finds within bounds and turns it into heads.

A bound that is passed ends the reading for good: what follows could not be understood any more. Nothing that a
client sends is kept beyond its bound: not a header that never ends, not a body in a million chunks, not a trailer.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import httptools

from tidegate.server.api.problems import (
    BODY_TOO_LARGE,
    EXPECTATION_FAILED,
    HEADERS_TOO_LARGE,
    MALFORMED_REQUEST,
    OVERLOADED,
    UNEXPECTED_ERROR,
    URI_TOO_LONG,
    Problem,
    Refusal,
)
from tidegate.server.messages import Head, Router
from tidegate.server.process.config import HttpConfig

__all__ = ["BODY", "HEADERS", "REST", "Intake", "RequestReader", "Sink"]

logger = logging.getLogger(__name__)

TARGET_BYTES_MAX: Final = 8_192
# Larger heads are not worth remembering.
HEAD_BYTES_KEPT: Final = 2_048
# What chunk sizes, extensions and trailers may add to a body in chunks.
CHUNK_OVERHEAD_BYTES: Final = 65_536
# Bodies that are being received take at most this much memory together, or eight of the largest.
BUFFERED_BYTES_MIN: Final = 67_108_864
# Bodies up to this size are taken even then: a few clients with large ones must not shut out everybody else. The bound
# of connections bounds what they add up to.
SMALL_BODY_BYTES: Final = 16_384

# Where in a request the bytes are.
REST, HEADERS, BODY = range(3)

HOST, AUTHORIZATION, ACCEPT, EXPECT, LENGTH, ENCODING, TEST_TIME, METRICS, FIELDS = range(9)
FIELD_OF: Final[dict[bytes, int]] = {
    b"host": HOST,
    b"authorization": AUTHORIZATION,
    b"accept": ACCEPT,
    b"expect": EXPECT,
    b"content-length": LENGTH,
    b"transfer-encoding": ENCODING,
    b"x-test-time": TEST_TIME,
    b"x-unkey-metrics": METRICS,
}
# The usual spelling needs no lower().
FIELD_OF.update({name.title(): index for name, index in list(FIELD_OF.items())})


class Intake:
    """The bounds of what may be received, and how much is being received now by all connections."""

    def __init__(self, config: HttpConfig) -> None:
        self.header_bytes_max = config.header_bytes_max
        self.headers_max = config.headers_max
        self.body_bytes_max = config.body_bytes_max
        self.buffered_bytes_max = max(BUFFERED_BYTES_MIN, 8 * config.body_bytes_max)
        # Bytes of bodies that are not complete yet. Written by all readers.
        self.buffered_bytes = 0

    @property
    def header_bound(self) -> str:
        fields, size = self.headers_max, self.header_bytes_max
        return f"The headers of a request may have {fields} fields and {size} bytes."

    @property
    def body_bound(self) -> str:
        return f"The body of a request may have {self.body_bytes_max} bytes."


class Sink(Protocol):
    """Who takes what was read, in order."""

    def on_begin(self) -> None: ...
    def on_continue(self) -> None: ...
    def on_request(self, head: Head, body: bytes) -> None: ...
    def on_refused(self, refusal: Refusal) -> None: ...


class _Refused(Exception):
    """Ends a feed from inside a callback of the parser. The sink has been told."""


class RequestReader:
    """Reads one connection's requests. After `on_refused` it must not be fed again."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_completed",
        "_fields",
        "_head_bytes",
        "_headers",
        "_intake",
        "_is_refused",
        "_is_upgrade",
        "_parser",
        "_raw_bytes",
        "_router",
        "_sink",
        "_target",
        "_wire_bytes",
        "head",
        "phase",
    )

    def __init__(self, intake: Intake, router: Router, sink: Sink) -> None:
        self._intake = intake
        self._router = router
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self.phase = REST
        # The request that is being read, or was read last.
        self.head: Head | None = None
        self._target = b""
        self._fields: list[bytes | None] = [None] * FIELDS
        self._headers = 0
        self._head_bytes = 0
        # Bytes of an unfinished head, or of a body as it was sent.
        self._wire_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        # Requests completed by the last feed.
        self._completed = 0
        # The request asks for another protocol; and what is still to come of its body.
        self._is_upgrade = False
        self._raw_bytes = 0
        self._is_refused = False

    @property
    def accept(self) -> bytes:
        """Of the request that is being read, as far as it has come."""
        return self._fields[ACCEPT] or b""

    def feed(self, data: bytes) -> bytes:
        """Parse. What is answered is left over, for another call."""
        self._completed = 0
        if self._raw_bytes:
            return self._feed_raw(data)
        if self.phase == BODY:
            self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # We speak nothing else, and answer as if nobody had asked. llhttp is done after it.
            self._parser = httptools.HttpRequestParser(self)
            rest: bytes = data[upgrade.args[0] :]
            return rest
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                logger.exception("a callback of the HTTP parser failed")
                self._refuse(UNEXPECTED_ERROR, "Something went wrong on our side.")
            return b""
        except httptools.HttpParserError as error:
            # Bytes after a request that said it was the last are none of our business.
            if self.head is None or self.head.keep_alive or self.phase != REST:
                self._refuse(MALFORMED_REQUEST, f"This is not an HTTP/1.1 request: {error}.")
            return b""
        if self.phase == HEADERS:
            if self._completed == 0:
                self._wire_bytes += len(data)  # the headers have not ended: all of this portion is headers
            if self._wire_bytes > self._intake.header_bytes_max:
                self._refuse(HEADERS_TOO_LARGE, self._intake.header_bound)
        elif self.phase == BODY and self._wire_bytes > self._intake.body_bytes_max + CHUNK_OVERHEAD_BYTES:
            self._refuse(BODY_TOO_LARGE, self._intake.body_bound)
        return b""

    def _feed_raw(self, data: bytes) -> bytes:
        """The body of a request that asked for an upgrade: llhttp takes it for the other protocol."""
        body, rest = data[: self._raw_bytes], data[self._raw_bytes :]
        try:
            self.on_body(body)
        except _Refused:
            return b""
        self._raw_bytes -= len(body)
        if self._raw_bytes == 0:
            self._complete()
        return rest

    def repeatable(self, data: bytes) -> tuple[bytes, Head] | None:
        """After `feed(data)` from rest: if that was exactly one request, and its head may well come again,
        (the bytes of the head, the head). From rest the same bytes would be parsed to the same head."""
        head = self.head
        if self.phase != REST or self._completed != 1 or head is None or self._is_refused:
            return None
        if not head.keep_alive or head.is_old or head.is_head or self._fields[EXPECT] is not None:
            return None
        end = len(data) - head.content_length
        if end > HEAD_BYTES_KEPT or data.find(b"\r\n\r\n") + 4 != end:
            return None  # also a body in chunks, whose length is not in its head
        return data[:end], head

    def drop(self) -> None:
        """Forget the body that has been received so far."""
        self._intake.buffered_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

    # The parser calls these.

    def on_message_begin(self) -> None:
        self.phase = HEADERS
        self.head = None
        self._target = b""
        self._fields = [None] * FIELDS
        self._headers = 0
        self._head_bytes = 0
        self._wire_bytes = 0
        self._sink.on_begin()

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > TARGET_BYTES_MAX:
            self._stop(URI_TOO_LONG, f"The request target is longer than {TARGET_BYTES_MAX} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase != HEADERS:
            return  # a trailer: bounded with the body, and of no use to us
        self._headers += 1
        self._head_bytes += len(name) + len(value) + 4
        intake = self._intake
        if self._headers > intake.headers_max or self._head_bytes > intake.header_bytes_max:
            self._stop(HEADERS_TOO_LARGE, intake.header_bound)
        field = FIELD_OF.get(name)
        if field is None:
            field = FIELD_OF.get(name.lower())
            if field is None:
                return
        held = self._fields[field]
        if held is None:
            self._fields[field] = value.strip(b" \t")
        elif field in (ACCEPT, ENCODING):
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
        operation, query = self._router.find(method, self._target)
        self.head = head = Head(operation)
        head.query = query
        head.authorization = fields[AUTHORIZATION]
        head.accept = fields[ACCEPT] or b""
        head.test_time = fields[TEST_TIME]
        head.metrics_off = fields[METRICS] == b"disabled"
        head.content_length = int(fields[LENGTH] or 0)
        head.keep_alive = parser.should_keep_alive()
        head.is_old = version == "1.0"
        head.is_head = method == b"HEAD"
        self.phase = BODY
        self._wire_bytes = 0
        self._is_upgrade = parser.should_upgrade()
        if self._is_upgrade and fields[ENCODING] is not None:
            self._stop(MALFORMED_REQUEST, "A request to upgrade may not have a body in chunks.")
        if head.content_length > self._intake.body_bytes_max:
            self._stop(BODY_TOO_LARGE, self._intake.body_bound)
        expectation = fields[EXPECT]
        if expectation is not None:
            if expectation.lower() != b"100-continue":
                self._stop(EXPECTATION_FAILED, "The only expectation that this server meets is 100-continue.")
            if version == "1.1":
                self._sink.on_continue()

    def on_body(self, data: bytes) -> None:
        intake = self._intake
        self._body.append(data)
        self._body_bytes += len(data)
        intake.buffered_bytes += len(data)
        if self._body_bytes > intake.body_bytes_max:
            self._stop(BODY_TOO_LARGE, intake.body_bound)
        if intake.buffered_bytes > intake.buffered_bytes_max and self._body_bytes > SMALL_BODY_BYTES:
            self._stop(OVERLOADED, "Too many large bodies are being received at once. Try again.")

    def on_message_complete(self) -> None:
        assert self.head is not None
        if self._is_upgrade and self.head.content_length:
            self._raw_bytes = self.head.content_length
        else:
            self._complete()

    def _complete(self) -> None:
        assert self.head is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self.drop()
        self._completed += 1
        self.phase = REST
        self._sink.on_request(self.head, body)

    def _stop(self, problem: Problem, detail: str) -> None:
        """From a callback of the parser: refuse, and parse no further."""
        self._refuse(problem, detail)
        raise _Refused

    def _refuse(self, problem: Problem, detail: str) -> None:
        self._is_refused = True
        self.drop()
        self._sink.on_refused(Refusal(problem, detail))
