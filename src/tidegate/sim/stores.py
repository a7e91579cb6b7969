"""Virtual origins and the virtual ledger: the embedded ones behind the virtual network.

A port belongs to one node and tells the auditor what that node sent and heard. The ledger is read from a replica that
may lag behind; with a lag of nothing it is the ledger itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Protocol

from tidegate.adapters.memory import MemoryLedger, MemoryOrigin, OriginSnapshot
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.errors import DependencyUnavailable, RegionMismatch
from tidegate.ports import Changes, Clock, LedgerOverview, Pulse, RegionBeat
from tidegate.sim.network import Link, Server, Weather

__all__ = ["LedgerPort", "OriginPort", "VirtualLedger", "VirtualOrigin", "Witness"]


class Witness(Protocol):
    """Who watches what one node sends and hears."""

    def sending(self, components: Sequence[Component]) -> None:
        """These leave for the origin, to be merged."""

    def merged(
        self, components: Sequence[Component], before: Sequence[OriginReply], after: Sequence[OriginReply]
    ) -> None:
        """They arrived at the origin, which held this before and holds that now."""

    def heard(self, components: Sequence[Component], merged: bool) -> None:
        """The origin's answer for these has come."""

    def publishing(self, rows: Sequence[LedgerRow]) -> None:
        """These leave for the ledger."""

    def touching_ledger(self) -> None:
        """The ledger is about to be called."""


class VirtualOrigin(Server):
    """One region's origin."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.memory = MemoryOrigin(clock=clock)
        self.older: OriginSnapshot | None = None


class OriginPort:
    """Honours `Origin` for one node, over its link."""

    def __init__(self, origin: VirtualOrigin, link: Link, witness: Witness) -> None:
        self._memory = origin.memory.another()
        self._link = link
        self._witness = witness

    async def open(self, region: str, *, timeout_s: float) -> None:
        pulse = await self.pulse(region, timeout_s=timeout_s)
        if pulse.region != region:
            raise RegionMismatch(region, pulse.region)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        answers = await self._link.call(lambda: self._memory.read_nowait(wanted), timeout_s)
        self._witness.heard(wanted, False)
        return answers

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        def apply() -> list[OriginReply]:
            before = self._memory.read_nowait(components)
            answers = self._memory.merge_nowait(components)
            self._witness.merged(components, before, self._memory.read_nowait(components))
            return answers

        self._witness.sending(components)
        answers = await self._link.call(apply, timeout_s)
        self._witness.heard(components, True)
        return answers

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        # Which incarnation of the origin a node knows is in the node's memory: an answer that is lost teaches nothing.
        def apply() -> tuple[MemoryOrigin, Pulse]:
            taught = copy(self._memory)
            return taught, taught.pulse_nowait(region)

        self._memory, pulse = await self._link.call(apply, timeout_s)
        return pulse

    async def close(self) -> None:
        """Nothing to release."""

    def statistics(self) -> Mapping[str, int]:
        return self._memory.statistics()


class VirtualLedger(Server):
    """The ledger, and the replica that is read."""

    def __init__(self, clock: Clock, weather: Weather, lag_ms: int) -> None:
        super().__init__()
        self.memory = MemoryLedger(clock=clock)
        self._replica = MemoryLedger(clock=clock) if lag_ms else self.memory
        self._weather = weather
        self._behind: list[list[LedgerRow]] = []
        self.lag_ms = lag_ms
        # How many more publishes fail, and what refuses rows for their content.
        self.failing_chunks = 0

    def reject(self, rejects: Callable[[LedgerRow], bool] | None) -> None:
        self.memory.rejects = rejects

    def publish(self, rows: Sequence[LedgerRow]) -> None:
        if self.failing_chunks:
            self.failing_chunks -= 1
            self._weather.fired["chunk failed"] += 1
            raise DependencyUnavailable("deadlock, and no time left to repeat")
        self.memory.publish_nowait(rows)
        if self._replica is not self.memory:
            self._behind.append(list(rows))
            self._weather.fired["replica lagged"] += 1
            self._weather.loop.call_later(self.lag_ms / 1000, self._catch_up)

    def _catch_up(self) -> None:
        self._replica.publish_nowait(self._behind.pop(0))

    def changes(self, cursor: str | None, now_ms: int) -> Changes:
        return self._replica.changes_nowait(cursor, now_ms=now_ms)


class LedgerPort:
    """Honours `Ledger` for one node, over its link."""

    def __init__(self, ledger: VirtualLedger, link: Link, witness: Witness) -> None:
        self._ledger = ledger
        self._link = link
        self._witness = witness

    async def open(self, *, timeout_s: float) -> None:
        await self._link.call(lambda: None, timeout_s)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        self._witness.touching_ledger()
        self._witness.publishing(rows)
        await self._link.call(lambda: self._ledger.publish(rows), timeout_s)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        self._witness.touching_ledger()
        return await self._link.call(lambda: self._ledger.changes(cursor, now_ms), timeout_s)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        self._witness.touching_ledger()
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
