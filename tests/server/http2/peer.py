"""A raw HTTP/2 client for tests: it sends any frame in any order, and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from hpack import Decoder, Encoder

from tidegate.server.http2 import frames as h2
from tidegate.server.http2.grpc import Method
from tidegate.server.http2.listener import Http2Options, Http2Server

ECHO = "/test.Test/Echo"
TIMEOUT_S = 20.0

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ECHO),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def error_code(self) -> int:
        """Of RST_STREAM and GOAWAY."""
        at = 0 if self.kind == h2.RST_STREAM else 4
        return int.from_bytes(self.payload[at : at + 4], "big")


class Reply(NamedTuple):
    headers: dict[str, str]
    body: bytes
    trailers: dict[str, str]

    @property
    def status(self) -> str:
        """The gRPC status, wherever it is."""
        return self.trailers.get("grpc-status") or self.headers.get("grpc-status", "")


def message(data: bytes, *, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(data).to_bytes(4, "big") + data


class Peer:
    """One connection. Encodes header blocks with a table of its own, as clients do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._next_id = 1

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    def next_id(self) -> int:
        self._next_id += 2
        return self._next_id - 2

    def block(
        self, *extra: tuple[str, str], path: str = ECHO, base: Iterable[tuple[str, str]] = HEADERS
    ) -> bytes:
        fields = [(name, path if name == ":path" else value) for name, value in base]
        return self.encoder.encode([*fields, *extra])

    def call_frames(self, stream_id: int, data: bytes, *extra: tuple[str, str], path: str = ECHO) -> bytes:
        head = h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, self.block(*extra, path=path))
        return head + h2.frame(h2.DATA, h2.END_STREAM, stream_id, message(data))

    async def frame(self) -> Frame:
        async with asyncio.timeout(TIMEOUT_S):
            word, flags, stream_id = h2.FRAME_HEADER.unpack(await self._reader.readexactly(9))
            payload = await self._reader.readexactly(word >> 8)
        return Frame(word & 0xFF, flags, stream_id, payload)

    async def frame_of(self, *kinds: int) -> Frame:
        """The next frame of one of these kinds; skips all others."""
        while True:
            frame = await self.frame()
            if frame.kind in kinds:
                return frame

    async def reply(self, stream_id: int) -> Reply:
        """The answer on a stream, complete. Other streams' frames must not be mixed in."""
        headers: dict[str, str] | None = None
        body = b""
        while True:
            frame = await self.frame_of(h2.HEADERS, h2.DATA, h2.RST_STREAM, h2.GOAWAY)
            if frame.kind == h2.RST_STREAM and frame.error_code == h2.ErrorCode.NO_ERROR:
                continue  # of a call before this one, which was answered early
            assert frame.kind in {h2.HEADERS, h2.DATA}, frame
            assert frame.stream_id == stream_id, frame
            fields: dict[str, str] = {}
            if frame.kind == h2.DATA:
                body += frame.payload
            else:
                fields = {str(name): str(value) for name, value in self.decoder.decode(frame.payload)}
            is_end = bool(frame.flags & h2.END_STREAM)
            if headers is None:
                headers, fields = fields, {}
            if is_end:
                return Reply(headers, body, fields)

    async def call(self, data: bytes, *extra: tuple[str, str], path: str = ECHO) -> Reply:
        stream_id = self.next_id()
        self.send(self.call_frames(stream_id, data, *extra, path=path))
        return await self.reply(stream_id)

    async def echo(self, data: bytes) -> None:
        """A call that must go well: the connection still works."""
        reply = await self.call(data)
        assert (reply.status, reply.body) == ("0", message(data))

    async def goaway(self) -> h2.ErrorCode:
        """The error code with which the server ends the connection. Waits until it has closed it."""
        frame = await self.frame_of(h2.GOAWAY)
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(TIMEOUT_S):
                assert await self._reader.read() == b""
        return h2.ErrorCode(frame.error_code)

    async def closed(self) -> None:
        """The server sends nothing more and closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._reader.read()

    def close(self) -> None:
        self._writer.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until an observable condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event, on purpose
            await asyncio.sleep(0)


def bound_socket() -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


class Served:
    """A server in this process, and peers connected to it."""

    def __init__(self, server: Http2Server, port: int) -> None:
        self.server = server
        self.port = port
        self._peers: list[Peer] = []

    async def raw(self) -> Peer:
        """Connected, and nothing sent."""
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        self._peers.append(peer)
        return peer

    async def peer(self, settings: dict[h2.Setting, int] | None = None) -> Peer:
        """Connected, prefaces exchanged."""
        peer = await self.raw()
        peer.send(h2.PREFACE, h2.settings_frame(settings or {}))
        assert (await peer.frame()).kind == h2.SETTINGS
        await peer.frame_of(h2.SETTINGS)  # the acknowledgement
        peer.send(h2.frame(h2.SETTINGS, h2.ACK, 0))
        return peer

    def pass_time(self, seconds: float) -> None:
        """Move the time of the server's deadlines forward."""
        for _ in range(self.server.wheel.ticks(seconds)):
            self.server.run_once()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.asynccontextmanager
async def serving(
    methods: Iterable[Method] = (), options: Http2Options | None = None
) -> AsyncIterator[Served]:
    """A server with a method that answers with what it was sent, and others."""
    server = Http2Server([Method(ECHO, lambda data: data), *methods], options)
    bound = bound_socket()
    served = Served(server, bound.getsockname()[1])
    server.start(bound)
    # Deadlines and budgets move only by `pass_time`, however slow the machine is.
    assert server._tick_timer is not None
    server._tick_timer.cancel()
    try:
        yield served
    finally:
        served.close()
        await server.drain(5.0)
