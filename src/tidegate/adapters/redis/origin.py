"""The region's origin in Redis or Valkey: one server, Sentinel or Cluster, by URL.

Laws: a merge is a script, so that a cell's components, total and expiry change together; a read is plain HMGETs,
pipelined; both take one round trip. The region's name is stored beside the cells with a random incarnation: when that
is new, the cells were lost, even if another node has put the name back already. On a Cluster each master holds the
name, because each can be wiped alone. Another server process in the place of a known one may be a replica that was
behind, or have lost its last second: it counts as wiped too, because merging again what is there is harmless.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.forks import INHERITED
from tidegate.adapters.redis.cluster import Cluster
from tidegate.adapters.redis.credit import CreditLayout, replies_of
from tidegate.adapters.redis.layout import Command, Layout, replies_from_merges, replies_from_reads
from tidegate.adapters.redis.link import Statistics
from tidegate.adapters.redis.network import Network, OneMaster
from tidegate.adapters.redis.recalls import Recalls
from tidegate.adapters.redis.refusals import refused
from tidegate.adapters.redis.reserving import claim_command, claim_reply
from tidegate.adapters.redis.resets import resets_command, resets_reply
from tidegate.adapters.redis.scripts import MERGE_SHA
from tidegate.adapters.redis.sentinel import Sentinels
from tidegate.adapters.redis.settings import Address, RedisSettings, parse_settings
from tidegate.adapters.redis.sharing import (
    lease_command,
    lease_of,
    replies_of_shares,
    share_commands,
    usage_commands,
    usage_reply,
)
from tidegate.adapters.redis.wire import Reply, ReplyError, pack
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import ConfigurationError, DependencyUnavailable, RegionMismatch
from tidegate.ports import Pulse

__all__ = ["RedisMemory", "RedisOrigin"]

TIME: Final = pack(("TIME",))
INFO_SERVER: Final = pack(("INFO", "server"))
INFO_MEMORY: Final = pack(("INFO", "memory"))
# Over a network credit may live long, because it can be recalled.
CREDIT_RULES: Final = GrantRules()
# The format of the records that this version writes, and the newest that it reads.
FORMAT: Final = 1
RUN_ID: Final = re.compile(rb"run_id:(\w+)")
MEMORY: Final = re.compile(rb"(?s)used_memory:(\d+).*maxmemory:(\d+).*maxmemory_policy:([\w-]+)")


class RedisMemory(NamedTuple):
    """The memory of one server."""

    used_bytes: int
    bytes_max: int
    """0 for no bound."""
    policy: str
    """What it does when that is used up (`maxmemory-policy`)."""


class RedisOrigin:
    """Implements `tidegate.ports.Origin`. One event loop at a time; after a fork the child connects by itself."""

    def __init__(self, url: str) -> None:
        self._settings: Final[RedisSettings] = parse_settings(url)
        self._layout: Final = Layout(
            self._settings.prefix,
            script_sha=MERGE_SHA.decode(),
            spreads=self._settings.kind == "cluster",
        )
        self._credit: Final = CreditLayout(
            self._settings.prefix, CREDIT_RULES, spreads=self._settings.kind == "cluster"
        )
        self._recalls: Recalls | None = None
        self._statistics: Final = Statistics()
        self._cells_read = 0
        self._cells_merged = 0
        self._messages = 0
        self._shares = 0
        self._incarnations: dict[int, bytes] = {}  # by bucket, as `pulse` last read them
        self._processes: set[bytes] = set()  # the servers that a pulse has met, by their run ids
        self._connections_known = 0  # how many had been opened when they were last asked for it
        self._network_now: Network | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False

    async def open(self, region: str, *, timeout_s: float) -> None:
        held = (await self._pulse(region, Deadline.after(timeout_s, loop_time()))).region
        if held != region:
            raise RegionMismatch(region, held)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        if not wanted:
            return []
        replies = await self._run(self._layout.reads(wanted), Deadline.after(timeout_s, loop_time()))
        self._cells_read += len(wanted)
        return replies_from_reads(wanted, replies)

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        if not components:
            return []
        deadline = Deadline.after(timeout_s, loop_time())
        plan = self._layout.merges(components)
        replies = await self._run([merge.command for merge in plan.merges], deadline)
        moving = {index for index, reply in enumerate(replies) if isinstance(reply, ReplyError)}
        if moving:
            # A slot that is being moved to another master serves commands with one key only.
            singles = [
                single
                for index in moving
                for single in self._layout.single_merges(components, plan.merges[index].indexes)
            ]
            answers = await self._run([single.command for single in singles], deadline)
            for answer in answers:
                if isinstance(answer, ReplyError):
                    raise refused(self._settings.shown, str(answer))
            settled = [merge for index, merge in enumerate(plan.merges) if index not in moving]
            plan = plan._replace(merges=settled + singles)
            replies = [reply for reply in replies if not isinstance(reply, ReplyError)] + answers
        self._cells_merged += len(components)
        return replies_from_merges(components, plan, replies)

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        """One round trip: answer each message (`core.grants.grant`), in the order of the arguments.

        Recalls are pushed to the nodes that hold credit, which `listen`.
        """
        if not requests:
            return []
        commands = self._credit.commands(requests)
        answers = await self._run_scripts([one.command for one in commands], timeout_s)
        replies, _ = replies_of(requests, commands, answers)
        self._messages += len(requests)
        return replies

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        if not shares:
            return []
        commands = share_commands(
            self._credit, CREDIT_RULES, shares, spreads=self._settings.kind == "cluster"
        )
        answers = await self._run_scripts([one.command for one in commands], timeout_s)
        self._shares += len(shares)
        return replies_of_shares(shares, commands, answers)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        commands = usage_commands(self._credit, digest, sequence)
        commands.append((commands[0][0], TIME))
        cell, holds, clock = await self._run(commands, Deadline.after(timeout_s, loop_time()))
        return usage_reply(cell, holds, self._milliseconds(clock))

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        if not claims:
            return []
        commands = [claim_command(self._credit, entry) for entry in claims]
        return [claim_reply(answer) for answer in await self._run_scripts(commands, timeout_s)]

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        command = lease_command(self._layout.lease_key(), node_id, life_ms, state, has_lost=has_lost)
        (answer,) = await self._run_scripts([(0, command)], timeout_s)
        return lease_of(answer)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        command = resets_command(self._layout.resets_key(), known, since)
        (answer,) = await self._run_scripts([(0, command)], timeout_s)
        return resets_reply(answer)

    async def _run_scripts(self, commands: Sequence[Command], timeout_s: float) -> list[Reply]:
        answers = await self._run(commands, Deadline.after(timeout_s, loop_time()))
        for answer in answers:
            if isinstance(answer, ReplyError):
                # A slot that is being moved to another master: a moment later it has arrived.
                raise refused(self._settings.shown, str(answer))
        return answers

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        """Call `on_recall(digest, writer)` for each request to give credit back, until cancelled.

        Connects again by itself; `can_be_recalled` says whether recalls arrive at the moment.
        """
        self._recalls = Recalls(self._settings, self._credit.channel(node_id), on_recall)
        try:
            await self._recalls.run()
        finally:
            self._recalls = None

    @property
    def can_be_recalled(self) -> bool:
        return self._recalls is not None and self._recalls.is_listening

    @property
    def rules(self) -> GrantRules:
        return CREDIT_RULES

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        try:
            return await self._pulse(region, Deadline.after(timeout_s, loop_time()))
        except ConfigurationError as error:
            raise DependencyUnavailable(str(error)) from error

    async def memory(self, *, timeout_s: float) -> list[RedisMemory]:
        """The memory of each server; empty where this user may not ask."""
        deadline = Deadline.after(timeout_s, loop_time())
        network = self._network()
        asked = [(bucket, INFO_MEMORY) for bucket in await network.marked_buckets(deadline)]
        try:
            replies = await network.run(asked, deadline)
        except DependencyUnavailable as error:
            if "NOPERM" not in str(error):
                raise
            return []
        found = [MEMORY.search(reply) for reply in replies if isinstance(reply, bytes)]
        return [
            RedisMemory(int(match[1]), int(match[2]), match[3].decode("ascii"))
            for match in found
            if match is not None
        ]

    async def close(self) -> None:
        self._closed = True
        network = self._network_now
        if network is not None and self._is_ours():
            self._network_now = None
            await network.close()

    def statistics(self) -> Mapping[str, int]:
        return {
            "commands": self._statistics.commands,
            "round_trips": self._statistics.round_trips,
            "connections_opened": self._statistics.connections_opened,
            "scripts_loaded": self._statistics.scripts_loaded,
            "redirections": self._statistics.redirections,
            "timeouts": self._statistics.timeouts,
            "cells_read": self._cells_read,
            "cells_merged": self._cells_merged,
            "messages": self._messages,
            "shares": self._shares,
        }

    # ---- the network

    def _is_ours(self) -> bool:
        return self._loop is asyncio.get_running_loop() and self._pid == os.getpid()

    def _network(self) -> Network:
        """The connections of this process on this event loop."""
        if self._closed:
            raise DependencyUnavailable(f"{self._settings.shown}: the origin was closed")
        if self._network_now is None or not self._is_ours():
            if self._network_now is not None and self._pid != os.getpid():
                INHERITED.append(self._network_now)
            self._network_now = self._new_network()
            self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        return self._network_now

    def _new_network(self) -> Network:
        settings = self._settings
        if settings.kind == "cluster":
            return Cluster(settings, self._statistics)
        if settings.kind == "sentinel":
            return OneMaster(settings, Sentinels(settings).find, self._statistics)

        async def find() -> Address:
            return settings.hosts[0]

        return OneMaster(settings, find, self._statistics)

    async def _run(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        try:
            return await self._network().run(commands, deadline)
        except ConfigurationError as error:
            # Only `open` raises a ConfigurationError: later it may be a password that is being changed.
            raise DependencyUnavailable(str(error)) from error

    # ---- the region's name

    async def _pulse(self, region: str, deadline: Deadline) -> Pulse:
        network = self._network()
        marked = await network.marked_buckets(deadline)
        if not marked:
            raise DependencyUnavailable(f"{self._settings.shown}: no master has any slots")
        asked = [(bucket, pack((b"GET", self._layout.region_key(bucket)))) for bucket in marked]
        asked += [(bucket, pack((b"GET", self._layout.format_key(bucket)))) for bucket in marked]
        asked.append((0, pack((b"HGET", self._layout.resets_key(), b""))))
        *held, resets, clock = await network.run([*asked, (marked[0], TIME)], deadline)
        held, formats = held[: len(marked)], held[len(marked) :]
        self._check_formats(formats)
        names = dict(zip(marked, held, strict=True))
        is_missing = any(value is None for value in held)
        if is_missing and self._other(region, names) is None:
            names = await self._claim(network, region, deadline)
        was_empty = is_missing or any(
            self._incarnations.get(bucket, value) != value for bucket, value in names.items()
        )
        was_empty |= await self._has_new_process(network, marked, deadline)
        self._incarnations |= {bucket: value for bucket, value in names.items() if isinstance(value, bytes)}
        number = int(resets) if isinstance(resets, bytes) and resets.isdigit() else 0
        return Pulse(self._other(region, names) or region, was_empty, self._milliseconds(clock), number)

    def _check_formats(self, formats: Sequence[Reply]) -> None:
        for value in formats:
            if isinstance(value, bytes) and value.isdigit() and int(value) > FORMAT:
                raise ConfigurationError(
                    f"{self._settings.shown}: a newer version of Tidegate uses it (record format {int(value)}; this "
                    f"one knows {FORMAT}); update this node, or give it another prefix"
                )

    async def _has_new_process(self, network: Network, marked: Sequence[int], deadline: Deadline) -> bool:
        """A server answers that no earlier pulse has met. Asked only when a connection is new."""
        opened = self._statistics.connections_opened
        if opened == self._connections_known:
            return False
        had_any = self._connections_known > 0
        try:
            replies = await network.run([(bucket, INFO_SERVER) for bucket in marked], deadline)
        except DependencyUnavailable as error:
            if "NOPERM" not in str(error):
                raise
            # The user may not ask. Every new connection could then lead to another server.
            replies = [b"run_id:%d" % opened]
        found = {
            match[1] for reply in replies if isinstance(reply, bytes) and (match := RUN_ID.search(reply))
        }
        is_new = had_any and not found <= self._processes
        self._processes |= found
        self._connections_known = opened
        return is_new

    async def _claim(self, network: Network, region: str, deadline: Deadline) -> dict[int, Reply]:
        """Write the name wherever there is none; return what is there now.

        One bucket first: of two regions that start at once on a new origin only one gets that far.
        """
        value = f"{secrets.token_hex(8)}:{region}".encode("utf-8", "surrogatepass")
        names: dict[int, Reply] = {}
        first, *others = network.buckets()
        for buckets in ([first], others):
            if not buckets or self._other(region, names) is not None:
                break
            commands = []
            for bucket in buckets:
                key = self._layout.region_key(bucket)
                commands.append((bucket, pack((b"SET", key, value, b"NX"))))
                commands.append((bucket, pack((b"GET", key))))
            replies = await network.run(commands, deadline)
            names |= dict(zip(buckets, replies[1::2], strict=True))
        return names

    @staticmethod
    def _other(region: str, names: Mapping[int, Reply]) -> str | None:
        """A name that is held and is not `region`."""
        for value in names.values():
            if isinstance(value, bytes):
                name = value.partition(b":")[2].decode("utf-8", "surrogatepass")
                if name != region:
                    return name
        return None

    def _milliseconds(self, clock: Reply) -> int:
        if isinstance(clock, list) and len(clock) == 2:
            seconds, microseconds = clock
            return int(seconds) * 1000 + int(microseconds) // 1000
        raise DependencyUnavailable(f"{self._settings.shown}: answered TIME with {clock!r:.80}")
