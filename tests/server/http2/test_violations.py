"""What RFC 9113 forbids a client: the error code of each, and what goes on after it. h2spec, where it is installed,
asks for the same and more (`test_clients`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.server.http2.peer import HEADERS, Peer, message, serving
from tidegate.server.http2 import frames as h2
from tidegate.server.http2.frames import ErrorCode, Setting
from tidegate.server.http2.grpc import Method

SLOW = "/test.Test/Slow"


def opened(peer: Peer, flags: int = h2.END_HEADERS, *extra: tuple[str, str], path: str = "") -> bytes:
    """HEADERS of a call that has sent nothing else yet, on the next stream."""
    block = peer.block(*extra, path=path) if path else peer.block(*extra)
    return h2.frame(h2.HEADERS, flags, peer.next_id(), block)


def setting(key: Setting, value: int) -> bytes:
    return h2.settings_frame({key: value})


CONNECTION: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "a frame above the largest size": (
        lambda _: h2.frame(h2.DATA, 0, 1, bytes(h2.FRAME_BYTES_MAX + 1)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "HEADERS on stream 0": (
        lambda peer: h2.frame(h2.HEADERS, h2.END_HEADERS, 0, peer.block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS on a stream of the server": (
        lambda peer: h2.frame(h2.HEADERS, h2.END_HEADERS, 2, peer.block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS shorter than their priority": (
        lambda _: h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PRIORITY_FLAG, 1, b"\0\0\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a stream that depends on itself": (
        lambda peer: h2.frame(
            h2.HEADERS, h2.END_HEADERS | h2.PRIORITY_FLAG, 1, b"\0\0\0\1\x10" + peer.block()
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS on a stream below the last": (
        lambda peer: (
            h2.frame(h2.HEADERS, h2.END_HEADERS, 5, peer.block())
            + h2.frame(h2.HEADERS, h2.END_HEADERS, 3, peer.block())
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block that cannot be decoded": (
        lambda _: h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a header block that is interrupted": (
        lambda peer: opened(peer, 0) + h2.frame(h2.PING, 0, 0, b"12345678"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block that another stream continues": (
        lambda peer: opened(peer, 0) + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION without HEADERS": (
        lambda _: h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "DATA on stream 0": (lambda _: h2.frame(h2.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA on a stream that was never opened": (
        lambda _: h2.frame(h2.DATA, 0, 1, b"x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padding that is longer than its frame": (
        lambda peer: opened(peer) + h2.frame(h2.DATA, h2.PADDED, 1, b"\x05abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PRIORITY on stream 0": (
        lambda _: h2.frame(h2.PRIORITY, 0, 0, b"\0\0\0\1\x10"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "RST_STREAM on a stream that was never opened": (
        lambda _: h2.reset_frame(1, ErrorCode.CANCEL),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "RST_STREAM of a wrong length": (
        lambda peer: opened(peer) + h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "SETTINGS on a stream": (lambda _: h2.frame(h2.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of a wrong length": (
        lambda _: h2.frame(h2.SETTINGS, 0, 0, b"12345"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "an acknowledgement with settings": (
        lambda _: h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "ENABLE_PUSH of 2": (lambda _: setting(Setting.ENABLE_PUSH, 2), ErrorCode.PROTOCOL_ERROR),
    "an initial window that is too large": (
        lambda _: setting(Setting.INITIAL_WINDOW_SIZE, h2.WINDOW_MAX + 1),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a frame size that is too small": (
        lambda _: setting(Setting.MAX_FRAME_SIZE, h2.FRAME_BYTES_MAX - 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PUSH_PROMISE": (lambda _: h2.frame(h2.PUSH_PROMISE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "PING on a stream": (lambda _: h2.frame(h2.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "PING of a wrong length": (lambda _: h2.frame(h2.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY on a stream": (lambda _: h2.frame(h2.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "GOAWAY that is too short": (lambda _: h2.frame(h2.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a wrong length": (
        lambda _: h2.frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "WINDOW_UPDATE by 0": (lambda _: h2.window_frame(0, 0), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE on a stream that was never opened": (
        lambda _: h2.window_frame(1, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows too large": (
        lambda _: h2.window_frame(0, h2.WINDOW_MAX),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("what", CONNECTION)
async def test_a_violation_by_the_connection_ends_it_with_its_code(what: str) -> None:
    frames, code = CONNECTION[what]
    async with serving() as served:
        peer = await served.peer()
        peer.send(frames(peer))
        assert await peer.goaway() == code
        assert served.server.statistics().connections_failed == 1
        await (await served.peer()).echo(b"others are served")


@pytest.mark.parametrize("first", [h2.frame(h2.PING, 0, 0, bytes(8)), h2.frame(h2.SETTINGS, h2.ACK, 0)])
async def test_a_connection_begins_with_settings(first: bytes) -> None:
    async with serving() as served:
        peer = await served.raw()
        peer.send(h2.PREFACE, first)
        assert await peer.goaway() == ErrorCode.PROTOCOL_ERROR


def without(name: str) -> list[tuple[str, str]]:
    return [field for field in HEADERS if field[0] != name]


STREAM: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "PRIORITY of a wrong length": (
        lambda peer: opened(peer) + h2.frame(h2.PRIORITY, 0, 1, bytes(4)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a request without a path": (
        lambda peer: h2.frame(h2.HEADERS, h2.END_HEADERS, peer.next_id(), peer.block(base=without(":path"))),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers that do not end the request": (
        lambda peer: (
            opened(peer) + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, peer.encoder.encode([("x-after", "1")]))
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers with a field of requests": (
        lambda peer: (
            opened(peer)
            + h2.frame(
                h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, peer.encoder.encode([(":path", "/other")])
            )
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a body of another length than it says": (
        lambda peer: (
            opened(peer, h2.END_HEADERS, ("content-length", "5"))
            + h2.frame(h2.DATA, h2.END_STREAM, 1, message(b"longer"))
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE by 0": (
        lambda peer: opened(peer) + h2.window_frame(1, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows too large": (
        lambda peer: opened(peer) + h2.window_frame(1, h2.WINDOW_MAX),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "DATA after the end of the request": (
        lambda peer: (
            opened(peer, path=SLOW)
            + h2.frame(h2.DATA, h2.END_STREAM, 1, message(b""))
            + h2.frame(h2.DATA, 0, 1, b"x")
        ),
        ErrorCode.STREAM_CLOSED,
    ),
    "HEADERS after the end of the request": (
        lambda peer: (
            opened(peer, path=SLOW)
            + h2.frame(h2.DATA, h2.END_STREAM, 1, message(b""))
            + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, peer.encoder.encode([("x-after", "1")]))
        ),
        ErrorCode.STREAM_CLOSED,
    ),
}


@pytest.mark.parametrize("what", STREAM)
async def test_a_violation_by_a_stream_ends_only_the_stream(what: str) -> None:
    frames, code = STREAM[what]

    async def slow(_data: bytes) -> bytes:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with serving([Method(SLOW, slow)]) as served:
        peer = await served.peer()
        peer.send(frames(peer))
        frame = await peer.frame_of(h2.RST_STREAM, h2.GOAWAY)
        assert (frame.kind, frame.stream_id, frame.error_code) == (h2.RST_STREAM, 1, code)
        await peer.echo(b"the connection goes on")
