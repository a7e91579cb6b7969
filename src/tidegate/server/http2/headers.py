"""Request header blocks: HPACK by the library `hpack`, RFC 9113's rules, and a cache of blocks that repeat.

Clients send the same block again and again, once the first calls have filled HPACK's dynamic table. A block may be
remembered only if decoding it changed nothing in that table, and only until something else changes it: an insertion
moves every index, and a table size update evicts. The library's table is watched for both. Nothing but equality of
bytes is asked of a block that is remembered, so a wrong entry would be a wrong answer; the property test in
tests/server/http2 compares with a decoder that remembers nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, cast

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from tidegate.server.http2.frames import ConnectionFault, ErrorCode
from tidegate.server.http2.grpc import GrpcError, Method, Status

# Names and values of one request, 32 bytes extra per field (RFC 9113 section 6.5.2): a gRPC call needs about 500.
HEADER_LIST_BYTES_MAX: Final = 16_384
# Blocks remembered for a connection. Clients alternate between a few, e.g. because their deadlines differ.
BLOCKS_MAX: Final = 64
# A block that is longer is decoded each time: remembering a few hundred such would cost more than it saves.
BLOCK_BYTES_MAX: Final = 1_024

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
# No control characters, no space at either end (RFC 9113 section 8.2.1).
_VALUE: Final = re.compile(rb"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_TIMEOUT_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_REQUEST_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
# Fields that describe a connection, which HTTP/2 does not use (RFC 9113 section 8.2.2).
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_GRPC: Final = b"application/grpc"


class MalformedRequest(Exception):
    """The header fields break RFC 9113: an error of this stream alone."""


@dataclass(slots=True, eq=False)
class RequestHead:
    """What a header block asks for. Shared by all requests with the same block, so it never changes."""

    # Exactly one of these three is set: the method to call, the error to answer with, or the HTTP status for a request
    # that is not a gRPC call (0 otherwise).
    method: Method | None
    error: GrpcError | None
    http_status: int
    # -1: the client did not say.
    content_length: int
    timeout_s: float | None


class _WatchedTable(HeaderTable):
    """hpack's table, which also counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changes += 1
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined] # mypy takes the property for an int


class HeaderReader:
    """The header blocks of one connection, in the order in which they arrive."""

    __slots__ = ("_decoder", "_methods", "_table", "blocks")

    def __init__(self, methods: dict[bytes, Method]) -> None:
        self._methods = methods
        self._decoder = Decoder(max_header_list_size=HEADER_LIST_BYTES_MAX)
        self._decoder.header_table = self._table = _WatchedTable()
        # Blocks that leave the table unchanged, as it is now. The connection looks here first.
        self.blocks: dict[bytes, RequestHead] = {}

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """The header fields of a block; the dynamic table moves on, also for a request that is then refused."""
        changes = self._table.changes
        try:
            fields = cast(list[tuple[bytes, bytes]], self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header list of more than {HEADER_LIST_BYTES_MAX} bytes"
            ) from error
        except (HPACKError, IndexError) as error:
            # The table is now in a state that the peer does not share: nothing after this block can be understood.
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block cannot be decoded") from error
        if self._table.changes != changes:
            self.blocks.clear()
        return fields

    def read(self, block: bytes) -> RequestHead:
        """The head of a request. Remembered, if the block may be."""
        head = self.blocks.get(block)
        if head is not None:
            return head
        changes = self._table.changes
        head = self._head(self.decode(block))
        if self._table.changes == changes and len(block) <= BLOCK_BYTES_MAX:
            if len(self.blocks) >= BLOCKS_MAX:
                self.blocks.clear()
            self.blocks[block] = head
        return head

    def _head(self, fields: list[tuple[bytes, bytes]]) -> RequestHead:
        pseudo, regular = _checked(fields)
        if pseudo.keys() - _REQUEST_PSEUDO:
            raise MalformedRequest("an unknown pseudo-header field")
        method, scheme, path = pseudo.get(b":method"), pseudo.get(b":scheme"), pseudo.get(b":path")
        if method == b"CONNECT":
            return RequestHead(None, None, 501, -1, None)
        if not method or not scheme or not path:
            raise MalformedRequest(":method, :scheme and :path are needed, once each")
        length = regular.get(b"content-length")
        if length is not None and _DIGITS.fullmatch(length) is None:
            raise MalformedRequest("content-length is not a number")
        content_length = -1 if length is None else int(length)
        if not _is_grpc(regular.get(b"content-type", b"")):
            return RequestHead(None, None, 415, content_length, None)
        if method != b"POST":
            return RequestHead(None, None, 405, content_length, None)
        return self._call(path, regular, content_length)

    def _call(self, path: bytes, regular: dict[bytes, bytes], content_length: int) -> RequestHead:
        error: GrpcError | None = None
        found = self._methods.get(path)
        timeout = regular.get(b"grpc-timeout")
        timeout_s: float | None = None
        if found is None:
            shown = path[:128].decode("ascii", "replace")
            error = GrpcError(Status.UNIMPLEMENTED, f"no method {shown}")
        elif timeout is not None:
            match = _TIMEOUT.fullmatch(timeout)
            if match is None:
                error = GrpcError(
                    Status.INTERNAL, "grpc-timeout: expected up to 8 digits and a unit, such as 20m"
                )
            else:
                timeout_s = int(match[1]) * _TIMEOUT_UNITS[match[2]]
        return RequestHead(None if error else found, error, 0, content_length, timeout_s)


def _is_grpc(content_type: bytes) -> bool:
    """`application/grpc`, alone, with a message format or with parameters. Only protobuf is understood here."""
    rest = content_type[len(_GRPC) :]
    return content_type.startswith(_GRPC) and (not rest or rest.startswith((b"+proto", b";")))


def _checked(fields: list[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Pseudo-header and regular fields by name; the first of several values. Malformed fields raise."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in fields:
        if _VALUE.fullmatch(value) is None:
            raise MalformedRequest("a field value with characters that are not allowed")
        if name.startswith(b":"):
            if regular or name in pseudo:
                raise MalformedRequest("a pseudo-header field that is repeated or follows regular fields")
            pseudo[name] = value
            continue
        if _NAME.fullmatch(name) is None:
            raise MalformedRequest("a field name with characters that are not allowed")
        if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            raise MalformedRequest("a field of HTTP/1.1 connections")
        if name == b"content-length" and regular.get(name, value) != value:
            raise MalformedRequest("two different content-length")
        regular.setdefault(name, value)
    return pseudo, regular


def check_trailers(fields: list[tuple[bytes, bytes]]) -> None:
    """Trailers carry no pseudo-header fields."""
    pseudo, _ = _checked(fields)
    if pseudo:
        raise MalformedRequest("a pseudo-header field among trailers")
