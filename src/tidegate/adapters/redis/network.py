"""Where commands go: to the one server there is, or to the master that the sentinels name. `cluster.py` has the rest.

A network runs commands and returns their replies in order. Of error replies it returns only those that concern a
single command (`refusals.KEPT`); a script that the server no longer has is loaded and the command repeated; every
other error reply fails the call. Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.redis.layout import Command
from tidegate.adapters.redis.link import ConnectionOptions, Greeting, Link, Statistics
from tidegate.adapters.redis.refusals import is_kept, is_script_unknown, refused, server_is_wrong
from tidegate.adapters.redis.scripts import LOAD_SCRIPTS, LOAD_SCRIPTS_PACKED
from tidegate.adapters.redis.settings import Address, RedisSettings
from tidegate.adapters.redis.wire import Reply, ReplyError
from tidegate.errors import ConfigurationError, DependencyUnavailable

__all__ = ["Network", "OneMaster", "connection_options"]


class Network(Protocol):
    """The servers of an origin."""

    async def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """The reply to each command, in order, in one round trip if nothing fails."""

    async def marked_buckets(self, deadline: Deadline) -> list[int]:
        """One bucket for each master: what is written there is lost when that master is wiped."""

    def buckets(self) -> Sequence[int]:
        """All buckets that may become marked ones."""

    async def close(self) -> None: ...


def connection_options(settings: RedisSettings) -> ConnectionOptions:
    return ConnectionOptions(settings.tls, settings.username, settings.password, settings.db)


class OneMaster:
    """A single server, or the master behind Sentinel."""

    def __init__(
        self, settings: RedisSettings, find: Callable[[], Awaitable[Address]], statistics: Statistics
    ) -> None:
        self._shown = settings.shown
        self._statistics = statistics
        self._link = Link(
            find,
            connection_options(settings),
            accept=self._accept,
            first=LOAD_SCRIPTS,
            statistics=statistics,
        )

    async def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        count = len(commands)
        self._statistics.commands += count
        packed = commands[0][1] if count == 1 else b"".join([packed for _, packed in commands])
        replies = await self._link.exchange(packed, count, deadline)
        unknown = []
        for index, reply in enumerate(replies):
            if isinstance(reply, ReplyError):
                if is_script_unknown(str(reply)):
                    unknown.append(index)
                else:
                    self._check(reply)
        if unknown:
            await self._run_again(commands, unknown, replies, deadline)
        return replies

    async def _run_again(
        self, commands: Sequence[Command], unknown: list[int], replies: list[Reply], deadline: Deadline
    ) -> None:
        """After SCRIPT FLUSH or a restart: load the scripts and repeat the commands, in one round trip."""
        scripts = len(LOAD_SCRIPTS)
        self._statistics.commands += len(unknown) + scripts
        self._statistics.scripts_loaded += scripts
        packed = b"".join([*LOAD_SCRIPTS_PACKED, *(commands[index][1] for index in unknown)])
        replies_again = await self._link.exchange(packed, len(unknown) + scripts, deadline)
        for reply in replies_again:
            if isinstance(reply, ReplyError):
                self._check(reply)
        for index, reply in zip(unknown, replies_again[scripts:], strict=True):
            replies[index] = reply

    def _check(self, reply: ReplyError) -> None:
        message = str(reply)
        if is_kept(message):
            return
        if server_is_wrong(message):
            self._link.drop()
        raise refused(self._shown, message)

    async def marked_buckets(self, deadline: Deadline) -> list[int]:
        return [0]

    def buckets(self) -> Sequence[int]:
        return (0,)

    async def close(self) -> None:
        await self._link.close()

    @staticmethod
    def _accept(greeting: Greeting, shown: str) -> None:
        if greeting.mode == "cluster":
            raise ConfigurationError(f"{shown}: is part of a Redis Cluster; use redis+cluster://")
        if greeting.mode == "sentinel":
            raise ConfigurationError(f"{shown}: is a sentinel; use redis+sentinel://host:port/service")
        if greeting.role != "master":
            raise DependencyUnavailable(f"{shown}: is a {greeting.role}, not the master")
