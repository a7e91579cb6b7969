"""gRPC over HTTP/2: methods, statuses, and how an answer is laid out in frames.

An answer is HEADERS, DATA with one message, HEADERS with the status. Header blocks are written without HPACK's dynamic
table: every block is a constant, and the peer never has to remember anything. The first block of a connection says so
(a table size of 0), which is also within every smaller size that the peer may set later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import IntEnum
from struct import Struct
from typing import Final
from urllib.parse import quote

from tidegate.server.http2.frames import DATA, END_HEADERS, END_STREAM, FRAME_HEADER, HEADERS, frame

PREFIX_BYTES: Final = 5
# A dynamic table size update to 0 (RFC 7541 section 6.3).
TABLE_SIZE_ZERO: Final = b"\x20"
# Shown to the caller of a failed call, percent-encoded. Our own messages are much shorter.
MESSAGE_CHARS_MAX: Final = 512


class Status(IntEnum):
    """The gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GrpcError(Exception):
    """A call that fails with a status. The caller sees `message`."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


UnaryHandler = Callable[[bytes], "bytes | Awaitable[bytes]"]


class Method:
    """One unary method, and how its calls ended."""

    __slots__ = ("handler", "path", "statuses")

    def __init__(self, path: str, handler: UnaryHandler) -> None:
        self.path = path
        self.handler = handler
        # Calls by status. Written by connections; OK calls of the short path are added there.
        self.statuses: dict[int, int] = {}

    def count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


def _literal(name: bytes, value: bytes) -> bytes:
    """A literal header field without indexing, new name, no Huffman code: at most 126 bytes each."""
    assert len(name) < 127 and len(value) < 127
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _long_literal(name: bytes, value: bytes) -> bytes:
    """The same for a value of any length."""
    if len(value) < 127:
        return _literal(name, value)
    length = bytearray(b"\x7f")
    rest = len(value) - 127
    while rest >= 128:
        length.append(rest & 127 | 128)
        rest >>= 7
    length.append(rest)
    return b"\x00" + bytes([len(name)]) + name + bytes(length) + value


# :status 200 is entry 8 of the static table, content-type the name of entry 31.
_CONTENT_TYPE: Final = b"\x0f\x10\x10application/grpc"
ANSWER_BLOCK: Final = b"\x88" + _CONTENT_TYPE
TRAILER_BLOCK: Final = _literal(b"grpc-status", b"0")

# The start of an answer up to its message: HEADERS and the header of DATA with gRPC's own five bytes. The end of an
# answer: HEADERS with the trailers. One call of struct for each.
_HEADERS_WORD: Final = len(ANSWER_BLOCK) << 8 | HEADERS
_TRAILERS_WORD: Final = len(TRAILER_BLOCK) << 8 | HEADERS
_START: Final = Struct(f">IBI{len(ANSWER_BLOCK)}sIBIBI").pack
_END: Final = Struct(f">IBI{len(TRAILER_BLOCK)}s").pack


def answer_start(stream_id: int, message_bytes: int) -> bytes:
    """HEADERS and the beginning of DATA, for a message that is sent whole."""
    return _START(
        _HEADERS_WORD, END_HEADERS, stream_id, ANSWER_BLOCK,
        (message_bytes + PREFIX_BYTES) << 8 | DATA, 0, stream_id, 0, message_bytes,
    )  # fmt: skip


def answer_head(stream_id: int) -> bytes:
    """HEADERS alone, for a message whose DATA has to wait for the peer's window."""
    return FRAME_HEADER.pack(_HEADERS_WORD, END_HEADERS, stream_id) + ANSWER_BLOCK


def answer_trailers(stream_id: int) -> bytes:
    """The last HEADERS of a successful call."""
    return _END(_TRAILERS_WORD, END_HEADERS | END_STREAM, stream_id, TRAILER_BLOCK)


def status_answer(stream_id: int, error: GrpcError, prefix: bytes) -> bytes:
    """An answer without a message: one HEADERS with status and reason."""
    message = quote(error.message[:MESSAGE_CHARS_MAX], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~").encode("ascii")
    block = (
        prefix
        + ANSWER_BLOCK
        + _literal(b"grpc-status", str(int(error.status)).encode("ascii"))
        + _long_literal(b"grpc-message", message)
    )
    if error.status == Status.UNIMPLEMENTED:
        block += _literal(b"grpc-accept-encoding", b"identity")
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


def plain_answer(status: int) -> bytes:
    """The header block of an HTTP answer to a request that is not a gRPC call."""
    return _literal(b":status", str(status).encode("ascii")) + _literal(b"content-type", b"text/plain")
