"""A listening socket, the same for HTTP/1.1 and HTTP/2: accepts connections up to a bound, ticks deadlines, drains.

At the bound the connection that has been idle the longest makes room for a new one, so that clients which open many
connections and use none of them do not exclude others. A connection that waits for this server is never closed for
another one. While all of them do, new ones wait in the kernel's queue, where they cost nothing; if that lasts longer
than a tick, a few more are accepted which may only ask for probes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from functools import partial
from heapq import nsmallest
from typing import Final, Generic, Protocol, TypeVar

from tidegate.server.schedule import Outbox, Wheel

logger = logging.getLogger(__name__)

# Deadlines are seconds long: a quarter of a second of delay is acceptable, and four wake-ups a second cost nothing.
TICK_S: Final = 0.25
BACKLOG: Final = 1_024
# Accepted in one turn of the loop, so that many new connections do not delay those that are open.
ACCEPTS_PER_TURN: Final = 64
# Connections that one tick can close to make room. It bounds what finding them costs: one pass over all connections.
EVICTIONS_PER_TICK: Final = 1_024
# After the listening socket is closed, a request may still arrive on an idle connection: answer it.
DRAIN_LINGER_S: Final = 0.25
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
TLS_SHUTDOWN_TIMEOUT_S: Final = 1.0
# TLS handshakes may hold this part of all places; at the bound the oldest one beyond it ends.
HANDSHAKES_SHARE: Final = 4
# When the process has no file descriptors left, retrying at once would only use processor time.
ACCEPT_RETRY_S: Final = 0.5


class Connection(Protocol):
    """What a listener asks of its connections."""

    def idle_since(self) -> int | None:
        """The tick since which this server waits for the client; None: the client waits for this server."""

    def drain(self) -> None:
        """Part of a graceful stop: close, unless a request is under way."""

    def abort(self) -> None:
        """Close at once, and send nothing more."""


ConnectionT = TypeVar("ConnectionT", bound=Connection)


def address_of(bound: socket.socket) -> str:
    """HOST:PORT of a socket."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Listener(ABC, Generic[ConnectionT]):
    """Serves one listening socket. Made, started and drained in one event loop."""

    def __init__(self, connections_max: int, tls: ssl.SSLContext | None, *, spare_max: int = 0) -> None:
        """`spare_max`: places for probes, beyond the bound."""
        self.loop = asyncio.get_running_loop()
        self.wheel = Wheel(TICK_S)
        self.outbox = Outbox(self.loop)
        # Added by `connected`, which every connection calls once.
        self.connections: set[ConnectionT] = set()
        # Closed because a new connection needed the place.
        self.connections_evicted = 0
        self.is_draining = False
        self._connections_max = connections_max
        self._spare_max = spare_max
        self._tls = tls
        self._socket: socket.socket | None = None
        self._is_accepting = False
        # Sockets between accept and `connected`, the oldest first. For TLS that takes as long as its handshake.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        # The tick since which there has been no place for a new connection; 0: there was one.
        self._full_since = 0
        # Of the present tick: (idle since, connection), the longest idle last. None: not looked for yet.
        self._idle: list[tuple[int, ConnectionT]] | None = None
        self._ticked_at = 0.0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    @abstractmethod
    def new_connection(self, *, is_spare: bool) -> asyncio.Protocol:
        """For an accepted socket. `is_spare`: all places are taken; this one may only ask for probes."""

    def start(self, bound: socket.socket) -> None:
        """Listen on `bound`, and own it from now on."""
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._socket = bound
        self._ticked_at = self.loop.time()
        self._tick()
        self._accept_more()
        logger.info("listening on %s", address_of(bound))

    # Connections in.

    def _accept_more(self) -> None:
        if not self._is_accepting and self._socket is not None:
            self._is_accepting = True
            self.loop.add_reader(self._socket, self._accept)

    def _accept_no_more(self) -> None:
        if self._is_accepting and self._socket is not None:
            self._is_accepting = False
            self.loop.remove_reader(self._socket)

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS_PER_TURN):
            free = self._connections_max - len(self.connections) - len(self._handshakes)
            idle = None if free > 0 else self._longest_idle()
            is_spare = free <= 0 and idle is None
            if not is_spare:
                self._full_since = 0
            else:
                self._full_since = self._full_since or self.wheel.now
                if free <= -self._spare_max or self._full_since == self.wheel.now:
                    self._accept_no_more()
                    return
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s; trying again in %s s", error, ACCEPT_RETRY_S)
                self._accept_no_more()
                self.loop.call_later(ACCEPT_RETRY_S, self._accept_more)
                return
            if idle is not None:
                self._evict(idle)
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self.loop.create_task(self._connect(accepted, is_spare))
            self._handshakes[task] = None
            task.add_done_callback(partial(self._handshaken, accepted))

    def _longest_idle(self) -> ConnectionT | asyncio.Task[None] | None:
        """The connection that has been idle the longest, for at least a tick; or a handshake, if there are many."""
        if self._tls is not None and len(self._handshakes) > self._connections_max // HANDSHAKES_SHARE:
            return next(iter(self._handshakes))
        if self._idle is None:
            found = ((each.idle_since(), each) for each in self.connections)
            idle = [(since, each) for since, each in found if since is not None and since < self.wheel.now]
            self._idle = nsmallest(EVICTIONS_PER_TICK, idle, key=lambda pair: pair[0])[::-1]
        while self._idle:
            since, connection = self._idle[-1]
            if connection in self.connections and connection.idle_since() == since:
                return connection
            self._idle.pop()
        return None

    def _evict(self, idle: ConnectionT | asyncio.Task[None]) -> None:
        self.connections_evicted += 1
        if isinstance(idle, asyncio.Task):
            del self._handshakes[idle]
            idle.cancel()
        else:
            # Its transport is gone only in the next turn of the loop. Its place is free now.
            self.connections.discard(idle)
            idle.abort()

    async def _connect(self, accepted: socket.socket, is_spare: bool) -> None:
        try:
            await self.loop.connect_accepted_socket(
                lambda: self.new_connection(is_spare=is_spare),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._tls is not None else None,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S if self._tls is not None else None,
            )
        except OSError as error:  # also ssl.SSLError, when a client does not speak TLS
            logger.debug("a connection ended before its first request: %s", error)
            accepted.close()

    def _handshaken(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            accepted.close()
        self._handshakes.pop(task, None)
        self._on_fewer()

    def connected(self, connection: ConnectionT) -> None:
        """Called by a connection when it has its transport."""
        self.connections.add(connection)

    def lost(self, connection: ConnectionT) -> None:
        """Called by a connection when its transport is gone."""
        self.connections.discard(connection)
        self._on_fewer()

    def _on_fewer(self) -> None:
        if not self.is_draining:
            self._full_since = 0
            self._accept_more()
        elif not self.connections and not self._handshakes:
            self._emptied.set()

    # Time.

    def _tick(self) -> None:
        now = self.loop.time()
        while self._ticked_at + TICK_S <= now:
            self._ticked_at += TICK_S
            self.run_once()
        self.on_tick()
        self._tick_timer = self.loop.call_at(self._ticked_at + TICK_S, self._tick)

    def run_once(self) -> None:
        """One tick."""
        self.wheel.run_once()
        self._idle = None
        if not self.is_draining:
            self._accept_more()  # a connection may have become idle

    def on_tick(self) -> None:
        """For what a listener does now and then."""

    # The end.

    def stop_accepting(self) -> None:
        """Close the listening socket. Open connections are still served."""
        self._accept_no_more()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def announce_drain(self) -> None:
        """For a protocol in which a server can ask its clients to send no more."""

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more, finish running requests, close all connections. False if time ran out."""
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        self.stop_accepting()
        self.announce_drain()
        self._on_fewer()
        is_empty = await self._wait_until_empty(min(DRAIN_LINGER_S, timeout_s))
        for connection in list(self.connections):
            connection.drain()
        if not is_empty:
            is_empty = await self._wait_until_empty(deadline - self.loop.time())
        for task in self._handshakes:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        await self._wait_until_empty(1.0)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        return is_empty

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
