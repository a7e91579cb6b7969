"""A TCP proxy between a client and a real server that injects network faults, which can change at any time.

It runs in its own thread, so that synchronous and asynchronous tests can use it; a method returns when its effect is in
place. Bytes keep their order: what a stall holds back is delivered after it, unless the connection was reset. Random
numbers come from the seed, separately for each connection and direction; the kernel decides how bytes are split into
chunks.

It does not know the protocol. If the server is down, the proxy first accepts a connection and then resets it; use
`Faults(refuse=True)` to refuse connections.
"""

from __future__ import annotations

import asyncio
import fcntl
import random
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from tidegate.testing.servers.reservation import LOOPBACK, PortReservation

T = TypeVar("T")

# How many bytes one direction of a connection holds back before it stops reading, like a TCP window.
HELD_BYTES_MAX = 1024 * 1024
# The part of a second's bytes that a limited rate sends at once: small enough to be smooth, large enough to be cheap.
RATE_SLICE_S = 0.01
CALL_TIMEOUT_S = 10.0
BACKLOG = 1024
UNSENT_POLL_S = 0.001
# l_onoff = 1, l_linger = 0: close() sends RST and drops unsent bytes.
LINGER_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of every connection. They can be combined; the default is none.

    latency_ms, jitter_ms     each direction is delayed by latency_ms plus up to jitter_ms (a round trip by twice that)
    bytes_per_s               the rate of each direction of each connection
    stall_requests            bytes of clients are accepted and held back
    stall_replies             replies of the server are held back: applied, but the client times out
    reset_after_reply_bytes   each connection is reset after this many more bytes of replies
    refuse                    new connections are refused; existing ones continue
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_s: int | None = None
    stall_requests: bool = False
    stall_replies: bool = False
    reset_after_reply_bytes: int | None = None
    refuse: bool = False

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.jitter_ms < 0:
            raise ValueError(
                f"latency_ms {self.latency_ms} and jitter_ms {self.jitter_ms} must not be negative"
            )
        if self.bytes_per_s is not None and self.bytes_per_s < 1:
            raise ValueError(f"bytes_per_s {self.bytes_per_s} must be at least 1; to forward nothing, stall")
        if self.reset_after_reply_bytes is not None and self.reset_after_reply_bytes < 0:
            raise ValueError(f"reset_after_reply_bytes {self.reset_after_reply_bytes} must not be negative")


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Counts since the start. Bytes count when they are forwarded, not while they are held back."""

    connections_accepted: int
    connections_open: int
    connections_reset: int  # by the proxy: `reset_connections`, a fault, or an unreachable server
    request_bytes: int
    reply_bytes: int


class _End(Enum):
    """How a stream of bytes ends; queued behind its bytes."""

    CLOSED = "FIN"
    RESET = "RST"


class _Pipe:
    """One direction of one connection: a queue of chunks, forwarded as the faults allow."""

    def __init__(self, link: _Link, *, is_reply: bool, chance: random.Random) -> None:
        self._link = link
        self._board = link.board
        self._is_reply = is_reply
        self._chance = chance
        # Arrival time and random number, not a due time: when the faults change, they apply to queued chunks too.
        self._queue: deque[tuple[float, float, bytes | _End]] = deque()
        self._held_bytes = 0
        self._bytes_since_faults = 0
        self._sent_until_s = 0.0  # when the limited rate allows the next chunk
        self._timer: asyncio.TimerHandle | None = None
        self._is_target_full = False
        self.source: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.has_ended = False

    def feed(self, item: bytes | _End) -> None:
        if self.has_ended:
            if item is _End.RESET:  # after a FIN that has been forwarded
                self._link.reset()
            return
        self._queue.append((self._board.loop.time(), self._chance.random(), item))
        if isinstance(item, bytes):
            self._held_bytes += len(item)
            if self._held_bytes > HELD_BYTES_MAX and self.source is not None:
                self.source.pause_reading()
        self.pump()

    def on_new_faults(self) -> None:
        self._bytes_since_faults = 0
        self._sent_until_s = 0.0
        self.pump()

    def on_target_full(self, is_full: bool) -> None:
        self._is_target_full = is_full
        self.pump()

    def discard(self) -> None:
        """The connection has ended: drop the queue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue.clear()
        self.has_ended = True

    def pump(self) -> None:
        """Forward all chunks that are due, and set a timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and not self.has_ended and not self._is_held():
            arrived_s, chance, item = self._queue[0]
            faults = self._board.faults
            late_s = (faults.latency_ms + chance * faults.jitter_ms) / 1000
            due_s = max(arrived_s + late_s, self._sent_until_s)
            if due_s > self._board.loop.time():
                self._timer = self._board.loop.call_at(due_s, self.pump)
                return
            if isinstance(item, bytes):
                self._forward(item, faults)
            else:
                self._queue.popleft()
                self._end(item)

    def _is_held(self) -> bool:
        faults = self._board.faults
        is_stalled = faults.stall_replies if self._is_reply else faults.stall_requests
        return is_stalled or self._is_target_full or self.target is None

    def _forward(self, item: bytes, faults: Faults) -> None:
        sent_bytes = len(item)
        if faults.bytes_per_s is not None:
            sent_bytes = min(sent_bytes, max(1, int(faults.bytes_per_s * RATE_SLICE_S)))
            # Catch up after a late timer, by one slice at most.
            since_s = max(self._sent_until_s, self._board.loop.time() - RATE_SLICE_S)
            self._sent_until_s = since_s + sent_bytes / faults.bytes_per_s
        is_last = False
        if self._is_reply and faults.reset_after_reply_bytes is not None:
            left_bytes = faults.reset_after_reply_bytes - self._bytes_since_faults
            is_last = sent_bytes >= left_bytes
            sent_bytes = min(sent_bytes, left_bytes)
        arrived_s, chance, _ = self._queue.popleft()
        if sent_bytes < len(item):
            self._queue.appendleft((arrived_s, chance, item[sent_bytes:]))
        self._held_bytes -= sent_bytes
        self._bytes_since_faults += sent_bytes
        self._board.count_bytes(sent_bytes, is_reply=self._is_reply)
        assert self.target is not None, "a pipe without a target is held"
        self.target.write(item[:sent_bytes])
        if is_last:
            self.has_ended = True
            self._link.reset_when_sent()
        elif self._held_bytes <= HELD_BYTES_MAX and self.source is not None:
            self.source.resume_reading()

    def _end(self, end: _End) -> None:
        self.has_ended = True
        if end is _End.RESET:
            self._link.reset()
            return
        assert self.target is not None, "a pipe without a target is held"
        try:
            self.target.write_eof()
        except OSError:
            return  # the other side has sent RST: `connection_lost` comes next
        self._link.close_if_both_ended()


class _Side(asyncio.Protocol):
    """One end of a connection: the client's or the server's."""

    def __init__(self, link: _Link, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._link = link
        self._incoming = incoming  # what arrives here
        self._outgoing = outgoing  # what is written here
        self.transport: asyncio.Transport | None = None
        self.is_lost = link.board.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _socket_of(self.transport).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming.source = self.transport
        self._outgoing.target = self.transport
        self._link.on_side_made(self)

    def data_received(self, data: bytes) -> None:
        self._incoming.feed(data)

    def eof_received(self) -> bool:
        self._incoming.feed(_End.CLOSED)
        return True  # half closed: the other direction stays open

    def pause_writing(self) -> None:
        self._outgoing.on_target_full(True)

    def resume_writing(self) -> None:
        self._outgoing.on_target_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._outgoing.discard()
        if not self.is_lost.done():
            self.is_lost.set_result(None)
        if (
            error is not None and not self._link.is_over
        ):  # the peer sent RST: forward it after the queued bytes
            self._incoming.source = None
            self._incoming.feed(_End.RESET)
        self._link.on_side_lost()


class _Link:
    """The connection of a client, and the connection to the server for it."""

    def __init__(self, board: _Switchboard, number: int) -> None:
        def chance(direction: str) -> random.Random:
            return random.Random(f"{board.seed}/{number}/{direction}")

        self.board = board
        self.requests = _Pipe(self, is_reply=False, chance=chance("requests"))
        self.replies = _Pipe(self, is_reply=True, chance=chance("replies"))
        self.client = _Side(self, incoming=self.requests, outgoing=self.replies)
        self.server = _Side(self, incoming=self.replies, outgoing=self.requests)
        self.is_over = False
        self.connecting: asyncio.Task[None] | None = None  # set when the client is connected

    @property
    def made_sides(self) -> list[_Side]:
        return [side for side in (self.client, self.server) if side.transport is not None]

    def on_side_made(self, side: _Side) -> None:
        if side is self.client:
            self.connecting = self.board.loop.create_task(self._connect_upstream())
        elif self.is_over:
            _abort(self.server)
        else:
            self.requests.pump()

    async def _connect_upstream(self) -> None:
        host, port = self.board.upstream
        try:
            await self.board.loop.create_connection(lambda: self.server, host, port)
        except OSError:
            self.reset()

    def on_new_faults(self) -> None:
        self.requests.on_new_faults()
        self.replies.on_new_faults()

    def reset_when_sent(self) -> None:
        """Wait until all bytes have left: RST would drop the rest, and fewer bytes than configured would arrive."""
        transport = self.client.transport
        if transport is None or transport.is_closing() or _unsent_bytes(transport) == 0:
            self.reset()
        else:
            self.board.loop.call_later(UNSENT_POLL_S, self.reset_when_sent)

    def reset(self) -> None:
        """Send RST to both sides; held bytes are lost."""
        if self.is_over:
            return
        self.board.reset += 1
        self._finish()
        for side in self.made_sides:
            _abort(side)
        self.on_side_lost()

    def close_if_both_ended(self) -> None:
        if self.requests.has_ended and self.replies.has_ended and not self.is_over:
            self._finish()
            for side in self.made_sides:
                assert side.transport is not None, "made_sides has those only"
                side.transport.close()
            self.on_side_lost()

    def _finish(self) -> None:
        self.is_over = True
        self.requests.discard()
        self.replies.discard()
        if self.connecting is not None and self.connecting is not asyncio.current_task(self.board.loop):
            self.connecting.cancel()

    def on_side_lost(self) -> None:
        if self.is_over and all(side.is_lost.done() for side in self.made_sides):
            self.board.links.discard(self)


class _Switchboard:
    """All connections, their faults and the counts. Only used in the thread of the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, port: int, upstream: tuple[str, int], seed: int
    ) -> None:
        self.loop = loop
        self.upstream = upstream
        self.seed = seed
        self.faults = Faults()
        self.links: set[_Link] = set()
        self.accepted = 0
        self.reset = 0
        self._bytes = {False: 0, True: 0}
        self._port = port
        self._listener: socket.socket | None = None
        self._accepting: set[asyncio.Task[None]] = set()  # accepted, but not connected to the server side yet

    def count_bytes(self, count: int, *, is_reply: bool) -> None:
        self._bytes[is_reply] += count

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((LOOPBACK, self._port), backlog=BACKLOG)
            self._listener.setblocking(False)
            self.loop.add_reader(self._listener, self._accept_waiting)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._accept_waiting()  # a client that has already connected counts as a connection
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept_waiting(self) -> None:
        assert self._listener is not None, "read only while it listens"
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            client.setblocking(False)
            self.accepted += 1
            link = _Link(self, self.accepted)
            self.links.add(link)
            attaching = self.loop.create_task(self._attach(link, client))
            self._accepting.add(attaching)
            attaching.add_done_callback(self._accepting.discard)

    async def _attach(self, link: _Link, client: socket.socket) -> None:
        await self.loop.connect_accepted_socket(lambda: link.client, client)

    async def apply(self, faults: Faults) -> None:
        self.faults = faults
        if faults.refuse:
            self._stop_listening()
        else:
            self._listen()
        for link in list(self.links):
            link.on_new_faults()

    async def reset_connections(self) -> None:
        if self._listener is not None:
            self._accept_waiting()
        await asyncio.gather(*self._accepting)
        links = list(self.links)
        for link in links:
            link.reset()
        connecting = [link.connecting for link in links if link.connecting is not None]
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.gather(*(side.is_lost for link in links for side in link.made_sides))

    async def statistics(self) -> ProxyStatistics:
        return ProxyStatistics(
            connections_accepted=self.accepted,
            connections_open=len(self.links),
            connections_reset=self.reset,
            request_bytes=self._bytes[False],
            reply_bytes=self._bytes[True],
        )

    async def open(self) -> None:
        self._listen()

    async def shut_down(self) -> None:
        self._stop_listening()
        await self.reset_connections()


class FaultProxy:
    """A proxy with its own port in front of `upstream_host:upstream_port`.

    `apply` replaces the faults, for existing connections too; `heal` removes them; `reset_connections` resets once. Can
    be used as a context manager.
    """

    host = LOOPBACK

    def __init__(self, upstream_port: int, upstream_host: str = LOOPBACK, *, seed: int = 0) -> None:
        self._reservation = PortReservation()
        self._loop = asyncio.SelectorEventLoop()
        self._board = _Switchboard(self._loop, self.port, (upstream_host, upstream_port), seed)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"tidegate-fault-proxy-{self.port}", daemon=True
        )
        self._is_closed = False

    @property
    def port(self) -> int:
        return self._reservation.port

    def through(self, url: str) -> str:
        """The URL of a server with the address of the proxy: `proxy.through(redis.url)`."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}{self.host}:{self.port}"))

    def start(self) -> Self:
        self._thread.start()
        try:
            self._call(self._board.open())
        except BaseException:
            self.close()
            raise
        return self

    def apply(self, faults: Faults) -> None:
        """Replace the current faults."""
        self._call(self._board.apply(faults))

    def heal(self) -> None:
        """Remove all faults; held bytes are delivered."""
        self.apply(Faults())

    def reset_connections(self) -> None:
        """Send RST on every connection, on both sides; held bytes are lost."""
        self._call(self._board.reset_connections())

    def statistics(self) -> ProxyStatistics:
        return self._call(self._board.statistics())

    def close(self) -> None:
        """Reset all connections and end the thread. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            self._call(self._board.shut_down())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()
        self._reservation.release()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _socket_of(transport: asyncio.Transport) -> socket.socket:
    return cast(socket.socket, transport.get_extra_info("socket"))


def _abort(side: _Side) -> None:
    """Close with RST."""
    if side.transport is not None and not side.is_lost.done():
        _socket_of(side.transport).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        side.transport.abort()


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that asyncio or the kernel has not sent, or the peer has not acknowledged."""
    answer = fcntl.ioctl(_socket_of(transport).fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return transport.get_write_buffer_size() + int(struct.unpack("i", answer)[0])
