"""The connection to one server: made when needed, bounded in time, and replaced when the server does not answer.

Laws:
- Connecting is shared and belongs to the link: a caller that gives up or is cancelled does not stop it, so that a
  connection that takes longer than one caller waits is there for the next.
- A call that runs out of time does not close the connection, which others use. A connection that has been silent for
  `SILENCE_MAX_S` while answers are outstanding is closed: the server is frozen or gone, not slow.
- Nothing is repeated here. What a failed call left undone is known to the caller only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.redis.settings import Address
from tidegate.adapters.redis.wire import Reply, ReplyError, Wire, pack
from tidegate.adapters.running_time import RunningTimer
from tidegate.errors import ConfigurationError, DependencyTimeout, DependencyUnavailable

__all__ = [
    "ConnectionOptions",
    "Greeting",
    "Link",
    "Statistics",
    "connect",
    "greet",
    "settle",
    "shown_address",
]

# Name, TCP, TLS and greeting together. An origin is near: this is a thousand round trips.
CONNECT_TIMEOUT_S: Final = 2.0
# Longer than any caller waits for a slow server, short enough to find a new master soon.
SILENCE_MAX_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.0

# How error replies begin that mean wrong credentials or missing permissions: waiting does not help.
REFUSED_FOR_GOOD: Final = (
    "WRONGPASS",
    "NOAUTH",
    "NOPERM",
    "ERR AUTH",
    "ERR invalid password",
    "ERR DB index",
)


@dataclass
class Statistics:
    """Counters of one origin, written by its links."""

    commands: int = 0
    round_trips: int = 0
    connections_opened: int = 0
    scripts_loaded: int = 0
    redirections: int = 0
    timeouts: int = 0


class ConnectionOptions(NamedTuple):
    """How to reach and greet a server."""

    tls: ssl.SSLContext | None
    username: str | None
    password: str | None
    db: int


class Greeting(NamedTuple):
    """What a server says of itself."""

    mode: str
    """standalone, cluster or sentinel."""
    role: str
    """master or replica."""


def shown_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(address: Address, options: ConnectionOptions) -> Wire:
    """A connection, not yet greeted. The caller brings the time limit."""
    loop = asyncio.get_running_loop()
    shown = shown_address(address)
    try:
        _, wire = await loop.create_connection(lambda: Wire(loop, shown), *address, ssl=options.tls)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"{shown}: its certificate is not trusted ({error.verify_message}); name the right authority in "
            "ssl_ca_certs, or the host as the certificate has it"
        ) from error
    except OSError as error:
        raise DependencyUnavailable(f"{shown}: {error.strerror or error}") from error
    return wire


async def greet(
    wire: Wire, options: ConnectionOptions, more: Sequence[tuple[bytes | str | int, ...]] = ()
) -> Greeting:
    """Log in, choose the database, send `more` that must succeed, all in one round trip."""
    hello: tuple[bytes | str | int, ...] = ("HELLO", 2)
    if options.password is not None:
        hello += ("AUTH", options.username or "default", options.password)
    commands = [(*hello, "SETNAME", "tidegate")]
    if options.db:
        commands.append(("SELECT", options.db))
    commands += more
    replies = await wire.send(b"".join(map(pack, commands)), len(commands))
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, ReplyError):
            raise _refusal(wire, str(command[0]), str(reply))
    facts = replies[0]
    if not isinstance(facts, list):
        raise ConfigurationError(f"{wire.shown}: answered HELLO with {facts!r}; it is not Redis or Valkey")
    said = {
        name: value for name, value in zip(facts[::2], facts[1::2], strict=False) if isinstance(name, bytes)
    }
    return Greeting(_text(said.get(b"mode")), _text(said.get(b"role")))


def _text(value: Reply) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _refusal(wire: Wire, command: str, message: str) -> Exception:
    if message.startswith(REFUSED_FOR_GOOD):
        return ConfigurationError(f"{wire.shown}: {command} was refused: {message}")
    if "unknown command" in message:
        return ConfigurationError(
            f"{wire.shown}: does not know {command}; Redis 6 or Valkey 7 or newer is needed"
        )
    return DependencyUnavailable(f"{wire.shown}: {command} was refused: {message}")


def _expire(
    sent: Iterable[tuple[Wire, asyncio.Future[list[Reply]]]], statistics: Statistics, timeout_s: float
) -> None:
    for wire, future in sent:
        if not future.done():
            statistics.timeouts += 1
            future.set_exception(DependencyTimeout(f"{wire.shown}: no answer within {timeout_s:g} s"))
        if wire.is_silent(SILENCE_MAX_S):
            wire.abort()


async def settle(
    sent: Sequence[tuple[Wire, asyncio.Future[list[Reply]]]], deadline: Deadline, statistics: Statistics
) -> list[list[Reply]]:
    """The replies to everything that was sent, or the first failure."""
    loop = asyncio.get_running_loop()
    timer = RunningTimer(
        loop, deadline.remaining(loop.time()), lambda: _expire(sent, statistics, deadline.timeout_s)
    )
    try:
        return [await future for _, future in sent]
    finally:
        timer.cancel()
        for _, future in sent:
            if not future.done():
                future.cancel()  # its place in the wire's queue stays, its replies are dropped
            elif not future.cancelled():
                future.exception()  # taken note of: it need not be the one that was raised


class Link:
    """One server, wherever `find` says it is at the time of connecting."""

    def __init__(
        self,
        find: Callable[[], Awaitable[Address]],
        options: ConnectionOptions,
        *,
        accept: Callable[[Greeting, str], None],
        first: Sequence[tuple[bytes | str | int, ...]],
        statistics: Statistics,
    ) -> None:
        self._find = find
        self._options = options
        self._accept = accept  # raises when this server is not the kind that is wanted
        self._first = first  # commands to send on every new connection
        self._statistics = statistics
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._closed = False

    @property
    def is_connected(self) -> bool:
        return self._wire is not None and not self._wire.is_lost

    async def wire(self, deadline: Deadline) -> Wire:
        """A connection that is worth sending on."""
        wire = self._wire
        if wire is not None and not wire.is_lost:
            if not wire.is_silent(SILENCE_MAX_S):
                return wire
            wire.abort()
        if self._closed:
            raise DependencyUnavailable("the origin was closed")
        loop = asyncio.get_running_loop()
        task = self._connecting
        if task is None:
            task = self._connecting = loop.create_task(self._connect())
            task.add_done_callback(self._connected)
        await asyncio.wait([task], timeout=deadline.remaining(loop.time()))
        if not task.done():
            self._statistics.timeouts += 1
            raise DependencyTimeout(f"no connection within {deadline.timeout_s:g} s")
        if task.cancelled():
            raise DependencyUnavailable("the origin was closed")
        return task.result()

    async def exchange(self, packed: bytes, count: int, deadline: Deadline) -> list[Reply]:
        """Send, and wait for `count` replies."""
        wire = await self.wire(deadline)
        self._statistics.round_trips += 1
        return (await settle([(wire, wire.send(packed, count))], deadline, self._statistics))[0]

    def drop(self) -> None:
        """Close the connection, because it leads to the wrong server. The next call connects again."""
        if self._wire is not None:
            self._wire.abort()

    async def close(self) -> None:
        self._closed = True
        endings: list[asyncio.Future[None] | asyncio.Task[Wire]] = []
        if self._connecting is not None:
            self._connecting.cancel()
            endings.append(self._connecting)
        if self._wire is not None:
            self._wire.abort()
            endings.append(self._wire.lost)
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT_S)

    async def _connect(self) -> Wire:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                address = await self._find()
                wire = await connect(address, self._options)
                try:
                    greeting = await greet(wire, self._options, self._first)
                    self._accept(greeting, wire.shown)
                except BaseException:
                    wire.abort()
                    raise
        except TimeoutError:
            raise DependencyTimeout(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        self._statistics.connections_opened += 1
        self._statistics.scripts_loaded += len(self._first)
        return wire

    def _connected(self, task: asyncio.Task[Wire]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._wire = task.result()
