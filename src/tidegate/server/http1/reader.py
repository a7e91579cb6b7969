"""From bytes to requests: llhttp parses, `RequestReader` keeps what it finds within bounds and builds heads.

A bound that is exceeded ends the reading for good, because what follows cannot be parsed reliably. Nothing that a
client sends is kept beyond its bound: not a header without end, not a body in a million chunks, not a trailer.
"""

from __future__ import annotations

import logging
from typing import Final, NoReturn, Protocol

import httptools

from tidegate.server.http1.bounds import Intake, Rejection
from tidegate.server.http1.repeats import RequestHead
from tidegate.server.messages import Head, Router, Whole

__all__ = ["BODY", "HEADERS", "REST", "RequestReader", "Sink"]

logger = logging.getLogger(__name__)

TARGET_BYTES_MAX: Final = 8_192
# Larger heads are not remembered.
HEAD_BYTES_KEPT: Final = 2_048
# Chunk sizes, extensions and trailers may add this much to a body in chunks.
CHUNK_OVERHEAD_BYTES: Final = 65_536
# What the next byte belongs to: a new request, its head, or its body.
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


class Sink(Protocol):
    """Receives what was read, in order."""

    def peer(self) -> str: ...
    def on_begin(self) -> None: ...
    def on_continue(self) -> None: ...
    def on_request(self, head: RequestHead, body: bytes) -> None: ...
    def on_rejected(self, rejection: Rejection) -> None: ...


class _Rejected(Exception):
    """Ends a feed from inside a callback of the parser, after `on_rejected`."""


class RequestReader:
    """Reads one connection's requests. After `on_rejected` it must not be fed again."""

    __slots__ = (
        "_body",
        "_completed",
        "_every_field",
        "_fields",
        "_head_bytes",
        "_headers",
        "_intake",
        "_is_rejected",
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
        self.head: RequestHead | None = None
        self._target = b""
        self._fields: list[bytes | None] = [None] * FIELDS
        # Every field of the head that is being read, if its operation wants them all.
        self._every_field: list[tuple[bytes, bytes]] | None = None
        self._headers = 0
        self._head_bytes = 0
        # Bytes of an unfinished head, or of a body as it was sent.
        self._wire_bytes = 0
        # Its first piece, or all of them in one buffer: a list would take forty times the bytes of a body that comes in
        # chunks of two.
        self._body: bytes | bytearray = b""
        # Requests completed by the last feed.
        self._completed = 0
        # The request asks for another protocol; and how many bytes of its body are still to come.
        self._is_upgrade = False
        self._raw_bytes = 0
        self._is_rejected = False

    @property
    def accept(self) -> bytes:
        """The Accept field of the request that is being read, or what has arrived of it."""
        return self._fields[ACCEPT] or b""

    @property
    def body_bytes_missing(self) -> int:
        """How much of the body is still to come, if the head said its length; else 0."""
        if self.phase != BODY or self.head is None or self.head.content_length == 0:
            return 0
        return self.head.content_length - len(self._body)

    def feed(self, data: bytes) -> bytes:
        """Parse. Returns what is left over, for another call."""
        self._completed = 0
        if self._raw_bytes:
            return self._feed_raw(data)
        if self.phase == BODY:
            self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The server speaks no other protocol and answers as usual. llhttp cannot continue after an upgrade.
            self._parser = httptools.HttpRequestParser(self)
            rest: bytes = data[upgrade.args[0] :]
            return rest
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Rejected):
                logger.exception("a callback of the HTTP parser failed")
                self._reject(Rejection(500, "The server failed. Its log has the reason."))
            return b""
        except httptools.HttpParserError as error:
            # Bytes after a request with Connection: close are ignored.
            if self.head is None or self.head.keep_alive or self.phase != REST:
                self._reject(Rejection(400, f"This is not an HTTP/1.1 request: {error}."))
            return b""
        if self.phase == HEADERS:
            if self._completed == 0:
                self._wire_bytes += len(data)  # the headers have not ended: all of this portion is headers
            if self._wire_bytes > self._intake.config.header_bytes_max:
                self._reject(self._intake.headers_too_large)
        elif (
            self.phase == BODY
            and self._wire_bytes > self._intake.config.body_bytes_max + CHUNK_OVERHEAD_BYTES
        ):
            self._reject(self._intake.body_too_large)
        return b""

    def _feed_raw(self, data: bytes) -> bytes:
        """The body of a request that asked for an upgrade: llhttp takes it for the other protocol."""
        body, rest = data[: self._raw_bytes], data[self._raw_bytes :]
        try:
            self.on_body(body)
        except _Rejected:
            return b""
        self._raw_bytes -= len(body)
        if self._raw_bytes == 0:
            self._complete()
        return rest

    def repeatable(self, data: bytes) -> tuple[bytes, RequestHead] | None:
        """After `feed(data)` from REST: (the bytes of the head, the head) if `data` was exactly one request whose head
        may come again. From REST the same bytes are always parsed to the same head."""
        head = self.head
        if self.phase != REST or self._completed != 1 or head is None or self._is_rejected:
            return None
        if head.fields.whole is not None:
            return None  # it takes several times the memory of its bytes, and gateways rarely repeat one
        if not head.keep_alive or head.is_http10 or head.is_head or self._fields[EXPECT] is not None:
            return None
        end = len(data) - head.content_length
        if end > HEAD_BYTES_KEPT or data.find(b"\r\n\r\n") + 4 != end:
            return None  # also for a body in chunks, whose length is not in its head
        return data[:end], head

    def drop(self) -> None:
        """Drop what has been received of a body."""
        self._intake.buffered_bytes -= len(self._body)
        self._body = b""

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.phase = HEADERS
        self.head = None
        self._target = b""
        self._fields = [None] * FIELDS
        self._every_field = None
        self._headers = 0
        self._head_bytes = 0
        self._wire_bytes = 0
        self._sink.on_begin()

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > TARGET_BYTES_MAX:
            self._stop(414, f"The request target is longer than {TARGET_BYTES_MAX} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase != HEADERS:
            return  # a trailer: bounded with the body, and not used
        self._headers += 1
        self._head_bytes += len(name) + len(value) + 4
        config = self._intake.config
        if self._headers > config.headers_max or self._head_bytes > config.header_bytes_max:
            self._stop(*self._intake.headers_too_large)
        if self._headers == 1 and self._router.find(self._parser.get_method(), self._target).reads_whole:
            self._every_field = []
        if self._every_field is not None:
            self._every_field.append((name, value))
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
            # Parsers differ in which of the two they use, and a proxy in front may have checked the other one.
            self._stop(400, f"The header field {name.decode('ascii')} is given twice.")

    def on_headers_complete(self) -> None:
        fields = self._fields
        parser = self._parser
        method = parser.get_method()
        version = parser.get_http_version()
        if version == "1.1":
            if fields[HOST] is None:
                self._stop(400, "An HTTP/1.1 request must have a Host header field.")
        elif version != "1.0":
            self._stop(400, f"This server speaks HTTP/1.1, not HTTP/{version}.")
        encoding = fields[ENCODING]
        if encoding is not None and (version == "1.0" or encoding.strip(b" \t").lower() != b"chunked"):
            # Others read such a request differently, or to its end only when the connection closes.
            self._stop(400, "The only Transfer-Encoding that this server takes is chunked, in HTTP/1.1.")
        length = int(fields[LENGTH] or 0)
        operation = self._router.find(method, self._target)
        self.head = RequestHead(
            operation,
            Head(
                fields[AUTHORIZATION],
                fields[ACCEPT] or b"",
                fields[TEST_TIME],
                fields[METRICS] == b"disabled",
                self._whole() if operation.reads_whole else None,
            ),
            length,
            parser.should_keep_alive(),
            version == "1.0",
            method == b"HEAD",
        )
        self.phase = BODY
        self._wire_bytes = 0
        self._is_upgrade = parser.should_upgrade()
        if self._is_upgrade and encoding is not None:
            self._stop(400, "A request to upgrade may not have a body in chunks.")
        if length > self._intake.config.body_bytes_max:
            self._stop(*self._intake.body_too_large)
        expectation = fields[EXPECT]
        if expectation is not None:
            if expectation.lower() != b"100-continue":
                self._stop(417, "The only expectation that this server meets is 100-continue.")
            if version == "1.1":
                self._sink.on_continue()

    def _whole(self) -> Whole:
        every_field, self._every_field = self._every_field or [], None
        fields: dict[str, str] = {}
        for raw_name, raw_value in every_field:
            name, value = raw_name.decode("ascii").lower(), text_of(raw_value.strip(b" \t"))
            fields[name] = f"{fields[name]},{value}" if name in fields else value
        return Whole(self._target, fields, self._sink.peer())

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._body = data
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data
        rejection = self._intake.take(len(data), len(self._body))
        if rejection is not None:
            self._stop(*rejection)

    def on_message_complete(self) -> None:
        assert self.head is not None
        if self._is_upgrade and self.head.content_length:
            self._raw_bytes = self.head.content_length
        else:
            self._complete()

    def _complete(self) -> None:
        assert self.head is not None
        body = bytes(self._body)
        self.drop()
        self._completed += 1
        self.phase = REST
        self._sink.on_request(self.head, body)

    def _stop(self, status: int, detail: str) -> NoReturn:
        """From a callback of the parser: reject, and parse no further."""
        self._reject(Rejection(status, detail))
        raise _Rejected

    def _reject(self, rejection: Rejection) -> None:
        self._is_rejected = True
        self.drop()
        self._sink.on_rejected(rejection)


def text_of(value: bytes) -> str:
    """A header value as text: UTF-8, or as Latin-1, in which all bytes mean something."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
