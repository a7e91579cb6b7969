"""Which of the masters? Sends every command to the one that has its bucket, all masters at once.

Laws:
- The map of buckets is learned from any node that answers, in the background; a call waits for it only while there
  is none. What it has wrong the masters correct themselves (MOVED, ASK) within the same call.
- A call succeeds as a whole or fails as a whole. What part of a failed merge was applied does not matter: merging
  again is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidegate.adapters.redis.layout import BUCKETS, LOAD_SCRIPT, TAGS, Command, slot_of
from tidegate.adapters.redis.link import Deadline, Greeting, Link, Statistics, settle, shown_address
from tidegate.adapters.redis.network import LOAD_SCRIPT_PACKED, way_of
from tidegate.adapters.redis.refusals import (
    is_kept,
    is_script_unknown,
    parse_redirection,
    refused,
    server_is_wrong,
)
from tidegate.adapters.redis.settings import Address, RedisSettings
from tidegate.adapters.redis.wire import Reply, ReplyError, pack
from tidegate.errors import ConfigurationError, DependencyError, DependencyTimeout, DependencyUnavailable

__all__ = ["Cluster", "owners_of"]

# How long one node may take to describe the cluster before the next is asked.
MAP_TIMEOUT_S: Final = 0.5
# MOVED, then ASK, then a script that the target has not loaded: more in one call is a cluster in pieces.
ROUNDS_MAX: Final = 5

ASKING: Final = pack(("ASKING",))
DESCRIBE: Final = pack(("CLUSTER", "SLOTS"))
BUCKET_SLOTS: Final = tuple(slot_of(tag) for tag in TAGS)


def owners_of(slots: Reply, asked: Address) -> list[Address | None]:
    """The master of each bucket, from the answer to CLUSTER SLOTS of the node at `asked`."""
    owners: list[Address | None] = [None] * BUCKETS
    if not isinstance(slots, list):
        raise DependencyUnavailable(f"{shown_address(asked)}: answered CLUSTER SLOTS with {slots!r:.80}")
    for first, last, master, *_ in slots:
        host = (master[0] or b"").decode(errors="replace")
        if host == "?":
            continue  # the node itself does not know
        for bucket, slot in enumerate(BUCKET_SLOTS):
            if first <= slot <= last:
                owners[bucket] = (host or asked[0], master[1])
    return owners


class _Attempt(NamedTuple):
    """A command on its way to one master."""

    place: int
    """Of the command among those of the call."""
    address: Address
    asking: bool = False
    loading: bool = False


class Cluster:
    """The masters of a Redis Cluster. Satisfies `network.Network`."""

    def __init__(self, settings: RedisSettings, statistics: Statistics) -> None:
        self._settings = settings
        self._statistics = statistics
        self._links: dict[Address, Link] = {}
        self._owners: list[Address | None] | None = None
        self._mapping: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        owners = await self._mapped(deadline)
        replies: list[Reply] = [None] * len(commands)
        attempts = []
        for index, command in enumerate(commands):
            address = owners[command.bucket]
            if address is None:
                self._map_soon()
                raise DependencyUnavailable(
                    f"{self._settings.shown}: no master has slot {BUCKET_SLOTS[command.bucket]}"
                )
            attempts.append(_Attempt(index, address))
        try:
            for _ in range(ROUNDS_MAX):
                attempts = await self._round(commands, attempts, replies, deadline)
                if not attempts:
                    return replies
        except DependencyError:
            self._map_soon()
            raise
        self._map_soon()
        raise DependencyUnavailable(
            f"{self._settings.shown}: {len(attempts)} commands are sent from one master to the next"
        )

    async def _round(
        self,
        commands: Sequence[Command],
        attempts: Sequence[_Attempt],
        replies: list[Reply],
        deadline: Deadline,
    ) -> list[_Attempt]:
        """Send every attempt to its master, all at once; return those to be made again elsewhere."""
        by_master: dict[Address, list[_Attempt]] = {}
        for attempt in attempts:
            by_master.setdefault(attempt.address, []).append(attempt)
        links = [self._link(address) for address in by_master]
        if not all(link.is_connected for link in links):
            await asyncio.gather(*(link.wire(deadline) for link in links))
        sent = []
        for link, mine in zip(links, by_master.values(), strict=True):
            parts, count = [], 0
            for attempt in mine:
                if attempt.loading:
                    parts.append(LOAD_SCRIPT_PACKED)
                if attempt.asking:
                    parts.append(ASKING)
                parts.append(commands[attempt.place].packed)
                count += 1 + attempt.loading + attempt.asking
            wire = await link.wire(deadline)
            self._statistics.commands += count
            sent.append((wire, wire.send(b"".join(parts), count)))
        self._statistics.round_trips += 1
        again: list[_Attempt] = []
        for mine, answers in zip(
            by_master.values(), await settle(sent, deadline, self._statistics), strict=True
        ):
            position = 0
            for attempt in mine:
                position += attempt.loading + attempt.asking
                reply = answers[position]
                position += 1
                if isinstance(reply, ReplyError) and not is_kept(str(reply)):
                    again.append(self._corrected(attempt, commands[attempt.place].bucket, str(reply)))
                else:
                    replies[attempt.place] = reply
        return again

    def _corrected(self, attempt: _Attempt, bucket: int, message: str) -> _Attempt:
        """Where to try again after an error reply, or the refusal that it is."""
        if is_script_unknown(message):
            self._statistics.scripts_loaded += 1
            return attempt._replace(loading=True)
        redirection = parse_redirection(message, attempt.address)
        if redirection is None:
            if server_is_wrong(message):
                self._link(attempt.address).drop()
            raise refused(shown_address(attempt.address), message)
        self._statistics.redirections += 1
        if redirection.is_final:
            if self._owners is not None:
                self._owners[bucket] = redirection.address
            self._map_soon()
            return _Attempt(attempt.place, redirection.address)
        return _Attempt(attempt.place, redirection.address, asking=True)

    async def marked_buckets(self, deadline: Deadline) -> list[int]:
        first: dict[Address, int] = {}
        for bucket, address in enumerate(await self._mapped(deadline)):
            if address is not None:
                first.setdefault(address, bucket)
        return list(first.values())

    def buckets(self) -> Sequence[int]:
        return range(BUCKETS)

    async def close(self) -> None:
        self._closed = True
        if self._mapping is not None:
            self._mapping.cancel()
            await asyncio.wait([self._mapping])
        await asyncio.gather(*(link.close() for link in self._links.values()))

    # ---- the map

    async def _mapped(self, deadline: Deadline) -> list[Address | None]:
        if self._owners is None:
            task = self._map_soon()
            remaining_s = max(0.0, deadline.at - asyncio.get_running_loop().time())
            await asyncio.wait([task], timeout=remaining_s)
            if not task.done():
                raise DependencyTimeout(
                    f"{self._settings.shown}: no description of the cluster within {deadline.timeout_s:g} s"
                )
            if task.cancelled():
                raise DependencyUnavailable("the origin was closed")
            task.result()
        assert self._owners is not None
        return self._owners

    def _map_soon(self) -> asyncio.Task[None]:
        """Learn the map in the background: one task, owned by the network and not by a caller."""
        if self._mapping is None:
            if self._closed:
                raise DependencyUnavailable("the origin was closed")
            self._mapping = asyncio.get_running_loop().create_task(self._map())
            self._mapping.add_done_callback(self._map_done)
        return self._mapping

    def _map_done(self, task: asyncio.Task[None]) -> None:
        self._mapping = None
        if not task.cancelled():
            task.exception()  # who waits for it hears it; a map that was only to be renewed stays as it is

    async def _map(self) -> None:
        known = list(dict.fromkeys(owner for owner in self._owners or () if owner is not None))
        known.sort(key=lambda address: not self._link(address).is_connected)
        failures: list[Exception] = []
        for address in dict.fromkeys((*known, *self._settings.hosts)):
            link = self._link(address)
            try:
                (reply,) = await link.exchange(DESCRIBE, 1, Deadline.after(MAP_TIMEOUT_S))
                if isinstance(reply, ReplyError):
                    raise refused(shown_address(address), str(reply))
                self._owners = owners_of(reply, address)
            except (DependencyError, ConfigurationError) as error:
                failures.append(error)
            else:
                return
        for failure in failures:
            if isinstance(failure, ConfigurationError):
                raise failure
        raise DependencyUnavailable(f"no node of the cluster answers: {'; '.join(map(str, failures))}")

    def _link(self, address: Address) -> Link:
        link = self._links.get(address)
        if link is None:

            async def find() -> Address:
                return address

            link = self._links[address] = Link(
                find,
                way_of(self._settings),
                accept=self._accept,
                first=[LOAD_SCRIPT],
                statistics=self._statistics,
            )
        return link

    @staticmethod
    def _accept(greeting: Greeting, shown: str) -> None:
        if greeting.mode != "cluster":
            raise ConfigurationError(f"{shown}: is no part of a Redis Cluster; use redis://")
