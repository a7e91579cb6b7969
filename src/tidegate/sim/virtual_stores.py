"""The virtual origins and the virtual ledger: the in-memory adapters behind the virtual network.

A port belongs to one node, and reports what that node sends and receives to an observer. The ledger is read from a
replica that may lag behind; without a lag it is the ledger itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from copy import copy
from typing import Protocol

from tidegate.adapters.memory import MemoryLedger, MemoryOrigin, OriginSnapshot
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import DependencyUnavailable, RegionMismatch
from tidegate.ports import Changes, Clock, LedgerOverview, Pulse, RegionBeat
from tidegate.sim.network import Link, Network, Server

__all__ = ["LedgerPort", "Observer", "OriginPort", "VirtualLedger", "VirtualOrigin"]


class Observer(Protocol):
    """Is called for the messages that nodes send and receive."""

    def on_merge_sent(self, components: Sequence[Component]) -> None:
        """The node sends these to the origin, to be merged."""

    def on_exchange(self, request: CreditRequest) -> None:
        """The origin is about to answer this message."""

    def on_merge_applied(
        self, components: Sequence[Component], before: Sequence[OriginReply], after: Sequence[OriginReply]
    ) -> None:
        """The origin merged them: its values before and after."""

    def on_reply(self, components: Sequence[Component], merged: bool, asked_s: float) -> None:
        """The node received the origin's reply for these components. It sent the request at `asked_s` (loop time)."""

    def on_publish(self, rows: Sequence[LedgerRow]) -> None:
        """The node sends these to the ledger."""

    def on_ledger_call(self) -> None:
        """The node is about to call the ledger."""

    def on_origin_call(self, cells: int) -> None:
        """The node is about to call the origin for something else: its lease, a pulse, or counts from the ledger."""


class VirtualOrigin(Server):
    """One region's origin."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.memory = MemoryOrigin(clock=clock)
        self.older: OriginSnapshot | None = None
        # Like a Redis server that is read-only or out of memory: it answers only reads and pulses. And since when.
        self.refuses_writes = False
        self.refuses_since_s = 0.0
        # By node id: how a recall is sent to the node.
        self.listeners: dict[str, Callable[[bytes, str], None]] = {}

    def check_writable(self) -> None:
        if self.refuses_writes:
            raise DependencyUnavailable("READONLY You can't write against a read only replica.")

    def ask_back(self, recalls: Sequence[tuple[bytes, str]]) -> None:
        for digest, writer in recalls:
            listener = self.listeners.get(writer.partition("~")[0])
            if listener is not None:
                listener(digest, writer)


class OriginPort:
    """Implements `Origin` for one node, over its link."""

    def __init__(self, origin: VirtualOrigin, link: Link, observer: Observer) -> None:
        self._origin = origin
        self._memory = origin.memory.another()
        self._link = link
        self.can_be_recalled: bool = False
        self._observer = observer

    async def open(self, region: str, *, timeout_s: float) -> None:
        pulse = await self.pulse(region, timeout_s=timeout_s)
        if pulse.region != region:
            raise RegionMismatch(region, pulse.region)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        asked_s = asyncio.get_running_loop().time()
        answers = await self._link.call(lambda: self._memory.read_nowait(wanted), timeout_s)
        self._observer.on_reply(wanted, False, asked_s)
        return answers

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        def apply() -> list[OriginReply]:
            self._origin.check_writable()
            before = self._memory.read_nowait(components)
            answers = self._memory.merge_nowait(components)
            self._observer.on_merge_applied(components, before, self._memory.read_nowait(components))
            return answers

        self._observer.on_merge_sent(components)
        asked_s = asyncio.get_running_loop().time()
        answers = await self._link.call(apply, timeout_s)
        self._observer.on_reply(components, True, asked_s)
        return answers

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        asked = [
            Component(
                request.digest,
                part.sequence,
                request.writer,
                part.own,
                (part.sequence + 3) * request.duration_ms,
            )
            for request in requests
            for part in request.cells
            if part.sequence > 0
        ]
        components = [one for one in asked if one.own > 0]

        def apply() -> list[CreditReply]:
            self._origin.check_writable()
            before = self._memory.read_nowait(components)
            for request in requests:
                self._observer.on_exchange(request)
            replies, recalls = self._memory.exchange_nowait(requests)
            self._observer.on_merge_applied(components, before, self._memory.read_nowait(components))
            self._origin.ask_back(recalls)
            return replies

        self._observer.on_merge_sent(components)
        asked_s = asyncio.get_running_loop().time()
        replies = await self._link.call(apply, timeout_s)
        self._observer.on_reply(asked, True, asked_s)
        return replies

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        def apply() -> list[ShareReply]:
            self._origin.check_writable()
            replies, recalls = self._memory.share_nowait(shares)
            self._origin.ask_back(recalls)
            return replies

        self._observer.on_origin_call(len(shares))
        return await self._link.call(apply, timeout_s)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        self._observer.on_origin_call(1)
        return await self._link.call(lambda: self._memory.usage_nowait(digest, sequence), timeout_s)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        def apply() -> list[ClaimReply]:
            self._origin.check_writable()
            return self._memory.claim_nowait(claims)

        return await self._link.call(apply, timeout_s)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        def apply() -> ResetsReply:
            if known:
                self._origin.check_writable()
            return self._memory.resets_nowait(known, since)

        return await self._link.call(apply, timeout_s)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        def apply() -> Lease:
            self._origin.check_writable()
            return self._memory.lease_nowait(node_id, life_ms, state, has_lost=has_lost)

        self._observer.on_origin_call(0)
        return await self._link.call(apply, timeout_s)

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        # A recall arrives in the process of this node, not in that of the node whose message caused it.
        context = copy_context()

        def deliver(digest: bytes, writer: str) -> None:
            if self.can_be_recalled:  # the node may have stopped listening meanwhile
                on_recall(digest, writer)

        self._origin.listeners[node_id] = lambda digest, writer: self._link.push(
            lambda: deliver(digest, writer), context
        )
        self.can_be_recalled = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.can_be_recalled = False
            self._origin.listeners.pop(node_id, None)

    @property
    def rules(self) -> GrantRules:
        return self._memory.rules

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        # The node remembers which incarnation of the origin it has seen: a reply that is lost must not change that.
        def apply() -> tuple[MemoryOrigin, Pulse]:
            updated = copy(self._memory)
            return updated, updated.pulse_nowait(region)

        self._observer.on_origin_call(0)
        self._memory, pulse = await self._link.call(apply, timeout_s)
        return pulse

    async def close(self) -> None:
        """Nothing to release."""

    def statistics(self) -> Mapping[str, int]:
        return self._memory.statistics()


def _ignore(_rows: Sequence[LedgerRow]) -> None:
    """Does nothing."""


class VirtualLedger(Server):
    """The ledger, and the replica from which nodes read."""

    def __init__(self, clock: Clock, network: Network, lag_ms: int) -> None:
        super().__init__()
        self.memory = MemoryLedger(clock=clock)
        self._replica = MemoryLedger(clock=clock) if lag_ms else self.memory
        self._network = network
        # Writes that the replica has not applied yet; None for a wipe.
        self._behind: list[list[LedgerRow] | None] = []
        self.lag_ms = lag_ms
        # How many of the next publishes fail.
        self.failing_chunks = 0
        # Called with rows that nodes can read from now on.
        self.on_visible: Callable[[Sequence[LedgerRow]], None] = _ignore

    def reject(self, rejects: Callable[[LedgerRow], bool] | None) -> None:
        self.memory.rejects = rejects

    def publish(self, rows: Sequence[LedgerRow]) -> None:
        if self.failing_chunks:
            self.failing_chunks -= 1
            self._network.fired["chunk failed"] += 1
            raise DependencyUnavailable("deadlock, and no time left to retry")
        self.memory.publish_nowait(rows)
        if self._replica is not self.memory:
            self._behind.append(list(rows))
            self._network.fired["replica lagged"] += 1
            self._network.call_later(self.lag_ms / 1000, self._catch_up)
        else:
            self.on_visible(rows)

    def _catch_up(self) -> None:
        rows = self._behind.pop(0)
        if rows is None:
            self._replica.wipe()
        else:
            self._replica.publish_nowait(rows)
            self.on_visible(rows)

    def wipe(self) -> None:
        """Lose every row; the replica follows."""
        self.memory.wipe()
        if self._replica is not self.memory:
            self._behind.append(None)
            self._network.call_later(self.lag_ms / 1000, self._catch_up)

    def changes(self, cursor: str | None, now_ms: int) -> Changes:
        return self._replica.changes_nowait(cursor, now_ms=now_ms)


class LedgerPort:
    """Implements `Ledger` for one node, over its link."""

    def __init__(self, ledger: VirtualLedger, link: Link, observer: Observer) -> None:
        self._ledger = ledger
        self._link = link
        self._observer = observer

    async def open(self, *, timeout_s: float) -> None:
        await self._link.call(lambda: None, timeout_s)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        self._observer.on_ledger_call()
        self._observer.on_publish(rows)
        await self._link.call(lambda: self._ledger.publish(rows), timeout_s)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        self._observer.on_ledger_call()
        return await self._link.call(lambda: self._ledger.changes(cursor, now_ms), timeout_s)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        self._observer.on_ledger_call()
        return await self._link.call(lambda: self._ledger.memory.heartbeat_nowait(region), timeout_s)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        return await self._link.call(
            lambda: self._ledger.memory.cleanup_nowait(cutoff_ms, rows_max=rows_max), timeout_s
        )

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        return await self._link.call(
            lambda: self._ledger.memory.overview_nowait(now_ms=now_ms, hottest_max=hottest_max), timeout_s
        )

    async def close(self) -> None:
        """Nothing to release."""

    def statistics(self) -> Mapping[str, int]:
        return self._ledger.memory.statistics()
