from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.server.http2.frames import ConnectionFault
from tidegate.server.http2.grpc import Method
from tidegate.server.http2.headers import HeaderReader, MalformedRequest, RequestHead

PATHS = [f"/test.Test/M{number}" for number in range(4)]


def reader() -> HeaderReader:
    return HeaderReader({path.encode(): Method(path, lambda data: data) for path in PATHS})


def summary(head: RequestHead) -> tuple[object, ...]:
    path = None if head.method is None else head.method.path
    status = None if head.error is None else head.error.status
    return path, status, head.http_status, head.content_length, head.timeout_s


requests = st.fixed_dictionaries(
    {
        "path": st.sampled_from([*PATHS, "/unknown"]),
        "type": st.sampled_from(["application/grpc", "application/grpc+proto", "text/plain"]),
        "timeout": st.sampled_from(["", "1S", "20m", "bad"]),
        "trace": st.sampled_from(["", "a", "b", "c" * 300]),
        "is_sensitive": st.booleans(),
        # Now and then the client changes its table's size.
        "table": st.sampled_from([None, None, None, 0, 64, 200, 4096]),
    }
)


def encoded(encoder: Encoder, request: dict[str, Any]) -> bytes:
    if request["table"] is not None:
        encoder.header_table_size = request["table"]
    fields: list[tuple[str, str, bool]] = [
        (":method", "POST", False),
        (":scheme", "http", False),
        (":path", request["path"], False),
        ("content-type", request["type"], False),
    ]
    if request["timeout"]:
        fields.append(("grpc-timeout", request["timeout"], request["is_sensitive"]))
    if request["trace"]:
        fields.append(("x-trace", request["trace"], request["is_sensitive"]))
    return encoder.encode(fields)


@settings(max_examples=300)
@given(st.lists(st.one_of(requests, st.integers(0, 10)), max_size=40))
def test_a_remembered_block_means_what_a_decoder_without_memory_reads(items: list[Any]) -> None:
    encoder, remembering, plain = Encoder(), reader(), Decoder()
    earlier: list[dict[str, Any]] = []
    for item in items:
        request = earlier[item % len(earlier)] if isinstance(item, int) and earlier else item
        if isinstance(request, int):
            continue
        earlier.append(request)
        block = encoded(encoder, request)
        fields = plain.decode(block, raw=True)
        assert summary(remembering.read(block)) == summary(reader()._head(list(fields)))


def test_the_same_request_is_decoded_twice_at_most() -> None:
    encoder, remembering = Encoder(), reader()
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", PATHS[0]),
        ("content-type", "application/grpc"),
    ]
    remembering.read(encoder.encode(fields))
    assert not remembering.blocks, "the first block filled the table"
    second = remembering.read(encoder.encode(fields))
    assert remembering.read(encoder.encode(fields)) is second


def test_an_insertion_and_a_table_size_update_forget_all_blocks() -> None:
    encoder, remembering = Encoder(), reader()
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", PATHS[0]),
        ("content-type", "application/grpc"),
    ]
    for _ in range(2):
        remembering.read(encoder.encode(fields))
    assert len(remembering.blocks) == 1
    remembering.decode(encoder.encode([("a", "b")]))
    assert not remembering.blocks
    remembering.read(encoder.encode(fields))
    assert len(remembering.blocks) == 1
    encoder.header_table_size = 2_000
    remembering.decode(encoder.encode([]))
    assert not remembering.blocks


def test_the_memory_of_blocks_is_bounded_in_number_and_in_bytes() -> None:
    remembering = reader()

    def block(value: bytes) -> bytes:
        literal = b"\x10\x01x" + bytes([len(value)]) + value
        path = PATHS[0].encode()
        return b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x0f\x10\x10application/grpc" + literal

    for number in range(1000):
        remembering.read(block(str(number).encode()))
        assert len(remembering.blocks) <= 64
    remembering.blocks.clear()
    remembering.read(b"".join([block(b"z" * 100), *[b"\x10\x01y\x64" + b"y" * 100] * 12]))
    assert not remembering.blocks


@given(st.binary(max_size=200))
def test_any_bytes_are_a_block_or_a_clear_error(block: bytes) -> None:
    with contextlib.suppress(ConnectionFault, MalformedRequest):
        reader().read(block)


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "POST"), (":path", "/a")],
        [(":method", "POST"), (":scheme", "http"), (":path", "")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":path", "/b")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":new", "x")],
        [(":method", "POST"), (":scheme", "http"), ("te", "trailers"), (":path", "/a")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "gzip")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("Upper", "x")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("connection", "close")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("x", "a\r\nb")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("content-length", "-1")],
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/a"),
            ("content-length", "1"),
            ("content-length", "2"),
        ],
    ],
)
def test_malformed_header_fields_are_refused(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(MalformedRequest):
        reader().read(Encoder().encode(fields))
