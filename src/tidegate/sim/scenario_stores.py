"""The origin and the ledger of a scenario: the in-memory adapters, with switches for faults and counters of calls.

They reply or fail immediately. Failed attempts are counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import DependencyUnavailable
from tidegate.ports import Changes, Clock, LedgerOverview, Pulse, RegionBeat

__all__ = ["RegionOrigin", "ScenarioLedger", "ScenarioOrigin"]

# The writer of what an `origin_add` step adds.
UNNAMED = "unnamed"


class RegionOrigin:
    """The origin of a region, shared by its nodes and changed by steps."""

    def __init__(self, clock: Clock) -> None:
        self.memory = MemoryOrigin(clock=clock)
        self.is_down = False
        self._cells_read = 0
        self._cells_merged = 0

    def use(self, *, read: int = 0, merged: int = 0) -> None:
        self._cells_read += read
        self._cells_merged += merged
        if self.is_down:
            raise DependencyUnavailable("the origin is down")

    def take_statistics(self) -> dict[str, int]:
        """The counters since the last call."""
        taken = {"cells_read": self._cells_read, "cells_merged": self._cells_merged}
        self._cells_read = self._cells_merged = 0
        return taken

    def count(self, digest: bytes, sequence: int) -> int:
        return self.memory.read_nowait([Component(digest, sequence, UNNAMED, 0, 0)])[0].total

    def add(self, digest: bytes, sequence: int, duration_ms: int, amount: int) -> None:
        """Add to the component of another, unnamed node of the region."""
        wanted = Component(digest, sequence, UNNAMED, 0, (sequence + 3) * duration_ms)
        held = self.memory.read_nowait([wanted])[0].component
        self.memory.merge_nowait([wanted._replace(own=held + amount)])


class ScenarioOrigin:
    """The connection of one node to the origin of its region."""

    def __init__(self, region: RegionOrigin) -> None:
        self._region = region
        self._memory = region.memory.another()

    async def open(self, region: str, *, timeout_s: float) -> None:
        # Never fails: nodes of a scenario are already running, and faults come from its steps.
        await self._memory.open(region, timeout_s=timeout_s)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        self._region.use(read=len(wanted))
        return self._memory.read_nowait(wanted)

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        self._region.use(merged=len(components))
        return self._memory.merge_nowait(components)

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        self._region.use(merged=sum(part.own > 0 for request in requests for part in request.cells))
        return await self._memory.exchange(requests, timeout_s=timeout_s)

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        self._region.use()
        return await self._memory.share(shares, timeout_s=timeout_s)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        self._region.use(read=1)
        return self._memory.usage_nowait(digest, sequence)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        self._region.use()
        return self._memory.claim_nowait(claims)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        self._region.use()
        return self._memory.resets_nowait(known, since)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        self._region.use()
        return self._memory.lease_nowait(node_id, life_ms, state, has_lost=has_lost)

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        await self._memory.listen(node_id, on_recall)

    @property
    def can_be_recalled(self) -> bool:
        return self._memory.can_be_recalled

    @property
    def rules(self) -> GrantRules:
        return self._memory.rules

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        self._region.use()
        return self._memory.pulse_nowait(region)

    async def close(self) -> None:
        """Nothing to release."""

    def statistics(self) -> Mapping[str, int]:
        return self._memory.statistics()


class ScenarioLedger:
    """The ledger of a scenario, shared by all its nodes."""

    def __init__(self, clock: Clock) -> None:
        self.memory = MemoryLedger(clock=clock)
        self.is_down = False
        # Sizes of the chunks of the current publish, and the index of the one that fails.
        self.chunks: list[int] = []
        self.fail_chunk: int | None = None
        # Key -> (count, time) of its last increase: the in-memory ledger returns rows without times.
        self._raised: dict[tuple[object, ...], tuple[int, int]] = {}
        self._clock = clock
        self._reads = 0
        self._writes = 0

    def _use(self) -> None:
        if self.is_down:
            raise DependencyUnavailable("the ledger is down")

    def take_statistics(self) -> dict[str, int]:
        """The counters since the last call."""
        taken = {"reads": self._reads, "writes": self._writes}
        self._reads = self._writes = 0
        return taken

    def put(self, rows: Sequence[LedgerRow]) -> None:
        """Store rows that another region published."""
        self.memory.publish_nowait(rows)
        now_ms = self._clock.now_ms()
        for row in rows:
            if row.regional > self._raised.get(row[:6], (-1, 0))[0]:
                self._raised[row[:6]] = (row.regional, now_ms)

    def updated_at_ms(self, row: LedgerRow) -> int:
        return self._raised[row[:6]][1]

    async def open(self, *, timeout_s: float) -> None:
        """Never fails: faults come from the steps."""

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        self._writes += 1
        index = len(self.chunks)
        self.chunks.append(len(rows))
        self._use()
        if index == self.fail_chunk:
            self.fail_chunk = None
            raise DependencyUnavailable(f"chunk {index} fails, as the scenario demands")
        self.put(rows)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        self._reads += 1
        self._use()
        return self.memory.changes_nowait(cursor, now_ms=now_ms)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        self._use()
        return self.memory.heartbeat_nowait(region)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        self._use()
        return self.memory.cleanup_nowait(cutoff_ms, rows_max=rows_max)

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        return self.memory.overview_nowait(now_ms=now_ms, hottest_max=hottest_max)

    async def close(self) -> None:
        """Nothing to release."""

    def statistics(self) -> Mapping[str, int]:
        return self.memory.statistics()
