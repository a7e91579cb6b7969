"""A fleet for measurements: real nodes in virtual time, with bounded delays and without faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Final, NamedTuple

from tidegate.core.grants import CreditRequest
from tidegate.core.model import Component, Decision, LedgerRow, Limit, OriginReply, Tuning
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.sim.network import Link, Network
from tidegate.sim.node_process import QuietStalls, parts_of
from tidegate.sim.plan import EPOCH_MS, NetworkConditions
from tidegate.sim.virtual_stores import LedgerPort, OriginPort, VirtualLedger, VirtualOrigin
from tidegate.sim.virtual_time import VirtualClock, VirtualLoop, recorded_errors
from tidegate.testing.limiters import make_async_limiter

__all__ = ["ORIGIN_DELAY_MS", "Fleet", "Offer", "TrafficCounts"]

# The longest delay in one direction between a node and the origin of its region.
ORIGIN_DELAY_MS: Final = 1


class Offer(NamedTuple):
    """One request: when, to which node, for which identifier."""

    at_us: int
    """Microseconds since the start."""
    node: int
    identifier: str = "attacker"


class TrafficCounts:
    """Counts the messages of all nodes: an `Observer`."""

    def __init__(self) -> None:
        self.merges = 0
        self.cells_merged = 0
        self.reads = 0
        self.cells_read = 0
        self.publishes = 0
        self.rows_published = 0
        self.ledger_calls = 0
        # Commands for leases, pulses and counts from the ledger, and the cells in them.
        self.other_calls = 0
        self.other_cells = 0

    def on_merge_sent(self, components: Sequence[Component]) -> None:
        self.merges += 1
        self.cells_merged += len(components)

    def on_exchange(self, request: CreditRequest) -> None:
        """Counted when it was sent."""

    def on_merge_applied(
        self, components: Sequence[Component], before: Sequence[OriginReply], after: Sequence[OriginReply]
    ) -> None:
        """Counted when it was sent."""

    def on_reply(self, components: Sequence[Component], merged: bool, asked_s: float) -> None:
        if not merged:
            self.reads += 1
            self.cells_read += len(components)

    def on_publish(self, rows: Sequence[LedgerRow]) -> None:
        self.publishes += 1
        self.rows_published += len(rows)

    def on_ledger_call(self) -> None:
        self.ledger_calls += 1

    def on_origin_call(self, cells: int) -> None:
        self.other_calls += 1
        self.other_cells += cells


class Fleet:
    """Several regions. `nodes` is the number of nodes of each region."""

    def __init__(
        self,
        nodes: Sequence[int],
        tuning: Tuning,
        *,
        ledger_delay_ms: int,
        seed: int,
        start_ms: int = EPOCH_MS,
        origin_delay_ms: int = ORIGIN_DELAY_MS,
    ) -> None:
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop, start_ms)
        self.traffic = TrafficCounts()
        near = Network(self.loop, Random(f"near {seed}"), NetworkConditions(delay_ms=origin_delay_ms))
        far = Network(self.loop, Random(f"far {seed}"), NetworkConditions(delay_ms=ledger_delay_ms))
        self.ledger = VirtualLedger(self.clock, far, 0)
        self.origins = [VirtualOrigin(self.clock) for _ in nodes]
        self.limiters: list[AsyncLimiter] = []
        # The region of each limiter.
        self.regions: list[int] = []
        for region, (origin, count) in enumerate(zip(self.origins, nodes, strict=True)):
            for number in range(count):
                self.regions.append(region)
                limiter = make_async_limiter(
                    region=f"region-{region}",
                    origin=OriginPort(origin, Link(near, origin), self.traffic),
                    ledger=LedgerPort(self.ledger, Link(far, self.ledger), self.traffic),
                    clock=self.clock,
                    tuning=tuning,
                    node_id=f"{region}.{number}",
                    random=Random(f"node {seed} {region} {number}"),
                    monotonic_ns=lambda: self.loop.now_us() * 1_000,
                )
                node = parts_of(limiter).node
                assert node is not None
                node.stalls = QuietStalls()
                self.limiters.append(limiter)
        # A dict keyed by number, because the order of a set differs between runs.
        self._pending: dict[int, asyncio.Task[None]] = {}

    def run(
        self,
        limit: Callable[[str], Limit],
        offers: Iterable[Offer],
        answered: Callable[[Offer, Decision], None],
    ) -> None:
        """Send all offers, and call `answered` with every decision."""
        with recorded_errors() as errors:
            self.loop.run_until_complete(self._run(limit, offers, answered))
            self.loop.close()
        if errors:
            raise RuntimeError(f"a node logged: {errors[0]}")

    async def _run(
        self,
        limit: Callable[[str], Limit],
        offers: Iterable[Offer],
        answered: Callable[[Offer, Decision], None],
    ) -> None:
        await asyncio.gather(*(limiter.start() for limiter in self.limiters))
        for number, offer in enumerate(offers):
            wait_s = offer.at_us / 1e6 - self.loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            limiter = self.limiters[offer.node]
            wanted = limit(offer.identifier)
            decision = limiter.limit_nowait(wanted, offer.identifier)
            if decision is None:
                asked = limiter.limit(wanted, offer.identifier)
                self._pending[number] = self.loop.create_task(self._wait(number, asked, offer, answered))
            else:
                answered(offer, decision)
        await asyncio.gather(*self._pending.values())
        await asyncio.gather(*(limiter.stop() for limiter in self.limiters))

    async def _wait(
        self,
        number: int,
        asked: Awaitable[Decision],
        offer: Offer,
        answered: Callable[[Offer, Decision], None],
    ) -> None:
        answered(offer, await asked)
        del self._pending[number]
