"""Redis Cluster: sends every command to the master that has its bucket, to all masters at once.

Laws:
- The map of buckets is learned from any node that answers, in the background; a call waits for it only while there
  is none. Masters correct what is wrong in it (MOVED, ASK) within the same call.
- A call succeeds as a whole or fails as a whole. What part of a failed merge was applied does not matter: merging
  again is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.redis.layout import BUCKETS, TAGS, Command, slot_of
from tidegate.adapters.redis.link import Greeting, Link, Statistics, settle, shown_address
from tidegate.adapters.redis.network import connection_options
from tidegate.adapters.redis.refusals import (
    is_kept,
    is_script_unknown,
    parse_redirection,
    refused,
    server_is_wrong,
)
from tidegate.adapters.redis.scripts import LOAD_SCRIPTS, LOAD_SCRIPTS_PACKED
from tidegate.adapters.redis.settings import Address, RedisSettings
from tidegate.adapters.redis.wire import Reply, ReplyError, pack
from tidegate.errors import ConfigurationError, DependencyError, DependencyTimeout, DependencyUnavailable

__all__ = ["Cluster", "owners_of"]

# How long one node may take to describe the cluster before the next is asked.
MAP_TIMEOUT_S: Final = 0.5
# MOVED, then ASK, then a script that the target has not loaded: more in one call means a broken cluster.
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


class _Refusal(NamedTuple):
    """An error reply to one of the commands."""

    place: int
    address: Address
    message: str


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
        places: dict[Address, list[int]] = {}  # for each master, which of the commands it gets
        for place, (bucket, _) in enumerate(commands):
            address = owners[bucket]
            if address in places:
                places[address].append(place)
            elif address is not None:
                places[address] = [place]
            else:
                self._map_soon()
                raise DependencyUnavailable(
                    f"{self._settings.shown}: no master has slot {BUCKET_SLOTS[bucket]}"
                )
        prefixes: dict[int, list[bytes]] = {}
        refusals: list[_Refusal] = []
        try:
            for _ in range(ROUNDS_MAX):
                refusals = await self._round(commands, places, prefixes, replies, deadline)
                if not refusals:
                    return replies
                places, prefixes = self._corrected(commands, refusals)
        except DependencyError:
            self._map_soon()
            raise
        self._map_soon()
        raise DependencyUnavailable(
            f"{self._settings.shown}: {len(refusals)} commands are sent from one master to the next"
        )

    async def _round(
        self,
        commands: Sequence[Command],
        places: Mapping[Address, Sequence[int]],
        prefixes: Mapping[int, Sequence[bytes]],
        replies: list[Reply],
        deadline: Deadline,
    ) -> list[_Refusal]:
        """Send every command to its master, all masters at once; return what they refused."""
        links = [self._link(address) for address in places]
        if not all(link.is_connected for link in links):
            await asyncio.gather(*(link.wire(deadline) for link in links))
        sent = []
        for link, mine in zip(links, places.values(), strict=True):
            if prefixes:
                parts = [part for place in mine for part in (*prefixes.get(place, ()), commands[place][1])]
            else:
                parts = [commands[place][1] for place in mine]
            wire = await link.wire(deadline)
            self._statistics.commands += len(parts)
            sent.append((wire, wire.send(b"".join(parts), len(parts))))
        self._statistics.round_trips += 1
        refusals: list[_Refusal] = []
        answered = await settle(sent, deadline, self._statistics)
        for (address, mine), answers in zip(places.items(), answered, strict=True):
            position = 0
            for place in mine:
                if prefixes:
                    position += len(prefixes.get(place, ()))
                reply = replies[place] = answers[position]
                position += 1
                if isinstance(reply, ReplyError) and not is_kept(str(reply)):
                    refusals.append(_Refusal(place, address, str(reply)))
        return refusals

    def _corrected(
        self, commands: Sequence[Command], refusals: Sequence[_Refusal]
    ) -> tuple[dict[Address, list[int]], dict[int, list[bytes]]]:
        """Where to send what was refused, and what to send before it; or raise the refusal that it is."""
        places: dict[Address, list[int]] = {}
        prefixes: dict[int, list[bytes]] = {}
        for place, address, message in refusals:
            redirection = parse_redirection(message, address)
            if is_script_unknown(message):
                self._statistics.scripts_loaded += len(LOAD_SCRIPTS)
                places.setdefault(address, []).append(place)
                prefixes[place] = list(LOAD_SCRIPTS_PACKED)
            elif redirection is None:
                if server_is_wrong(message):
                    self._link(address).drop()
                raise refused(shown_address(address), message)
            else:
                self._statistics.redirections += 1
                places.setdefault(redirection.address, []).append(place)
                if not redirection.is_final:
                    prefixes[place] = [ASKING]
                elif self._owners is not None:
                    self._owners[commands[place][0]] = redirection.address
                    self._map_soon()
        return places, prefixes

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
            remaining_s = deadline.remaining(loop_time())
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
            task.exception()  # raised to those that wait for it; otherwise the old map stays in use

    async def _map(self) -> None:
        known = list(dict.fromkeys(owner for owner in self._owners or () if owner is not None))
        known.sort(key=lambda address: not self._link(address).is_connected)
        failures: list[Exception] = []
        for address in dict.fromkeys((*known, *self._settings.hosts)):
            link = self._link(address)
            try:
                (reply,) = await link.exchange(DESCRIBE, 1, Deadline.after(MAP_TIMEOUT_S, loop_time()))
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
                connection_options(self._settings),
                accept=self._accept,
                first=LOAD_SCRIPTS,
                statistics=self._statistics,
            )
        return link

    @staticmethod
    def _accept(greeting: Greeting, shown: str) -> None:
        if greeting.mode != "cluster":
            raise ConfigurationError(f"{shown}: is not part of a Redis Cluster; use redis://")
