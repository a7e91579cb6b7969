"""Checks reservations in a simulation, on separate counters (probes) that the other checks leave out.

Clients reserve at one node and end the reservation there or at another node of the region, maybe twice, maybe never;
other clients spend from the same counter. Clients are not part of a node: when a node crashes, its
clients get no answer.

- In a region that works, reserved and counted units together never exceed the quota (11). What a client used beyond its
  estimate may exceed it, because it is already spent.
- After all faults are removed, each end is counted once, however many nodes received it, and what was released or has
  expired can be reserved again (8).

Every counter belongs to one region, and its window does not end within a simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.core.model import Limit, Request, subject_digest
from tidegate.errors import DependencyError, TidegateError
from tidegate.runtime.reservation import Taken
from tidegate.sim.plan import LONG_LIFE_MS, Event
from tidegate.sim.reset_check import PROBES_WORKSPACE

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess
    from tidegate.sim.simulation import Simulation

__all__ = ["ReservationCheck"]

T = TypeVar("T")

QUOTA: Final = 20
# No simulation starts or ends within ten minutes of the end of such a window.
COUNTER: Final = Limit(QUOTA, duration_ms=5_000_000, namespace="reservations", workspace=PROBES_WORKSPACE)
# Virtual time until everything is counted or free when nothing fails: reservations expire, and unanswered calls are
# repeated.
SETTLED_S: Final = 40.0
# No node answers from memory that is older than this.
KNOWN_S: Final = 6.0


class _Kept:
    """One reservation, as its client knows it."""

    def __init__(self, process: NodeProcess, estimate: int, life_ms: int, asked_s: float) -> None:
        self.process = process
        self.estimate = estimate
        self.life_ms = life_ms
        self.asked_s = asked_s
        # Taken at the origin, where all nodes see it.
        self.is_shared = False
        # Whether the client has begun to end it, and the usage that the client reports.
        self.is_ending = False
        self.actual = 0
        # The nodes that confirmed that it is counted; the count may depend on their memory. It may be counted
        # unconfirmed.
        self.ended_by: list[NodeProcess] = []
        self.may_be_counted = False


class _Counter:
    """What clients know of one counter."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        # (process, cost, whether the client got the answer).
        self.spent: list[tuple[NodeProcess, int, bool]] = []


class ReservationCheck:
    """Makes reservations, ends them, and judges them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._clients: dict[asyncio.Task[None], None] = {}
        # The names of those whose end was lost with the memory of a node.
        self._lost_ends: set[str] = set()
        self.made = 0

    # -- clients

    def start(self, event: Event) -> None:
        """Start a client. Without credit, other nodes do not see reservations."""
        process = self._simulation.processes[event.who]
        if not self._simulation.tuning.credit or not process.is_running:
            return
        client = self._reserve if event.kind == "reserve" else self._spend
        task = self._simulation.loop.create_task(client(process, event))
        self._clients[task] = None

    def close(self) -> None:
        for task in self._clients:
            task.cancel()

    async def _ask(self, process: NodeProcess, call: Coroutine[Any, Any, T]) -> T | None:
        """The answer of a node; None if the node ends first."""
        task = self._simulation.loop.create_task(call, context=process.request_context)
        await asyncio.wait([task])
        if task.cancelled() or isinstance(task.exception(), TidegateError):
            return None
        return task.result()

    def _counter(self, process: NodeProcess, number: int) -> tuple[str, _Counter]:
        name = f"kept-{process.region}-{number}"
        counter = self._counters.get((process.region, name))
        if counter is None:
            counter = self._counters[process.region, name] = _Counter()
            key = (PROBES_WORKSPACE, COUNTER.namespace, COUNTER.duration_ms)
            self._simulation.auditor.know_probe(key, name)
        return name, counter

    async def _spend(self, process: NodeProcess, event: Event) -> None:
        name, counter = self._counter(process, event.what["counter"])
        cost = event.what["cost"]
        decision = await self._ask(process, process.limiter.limit(COUNTER, name, cost))
        if decision is None:
            counter.spent.append((process, cost, False))
        elif decision.allowed:
            self._judge(process, counter, name, cost, decision.source)
            counter.spent.append((process, cost, True))

    async def _reserve(self, process: NodeProcess, event: Event) -> None:
        what = event.what
        name, counter = self._counter(process, what["counter"])
        kept = _Kept(process, what["estimate"], what["life_ms"], self._simulation.loop.time())
        request = Request(COUNTER, name, kept.estimate)
        taken = await self._ask(process, process.limiter.take([request], kept.life_ms))
        if taken is not None and not taken.name:
            return
        self.made += 1
        if taken is not None:
            source = taken.decisions[0].source
            self._judge(process, counter, name, kept.estimate, source)
            kept.is_shared = source == "origin"
        counter.kept.append(kept)
        if taken is not None and what["actual"] is not None:
            await asyncio.sleep(what["hold_ms"] / 1000)
            await self._end(kept, taken, name, what)

    async def _end(self, kept: _Kept, taken: Taken, name: str, what: Any) -> None:
        """End it once at each of these nodes: a client may repeat a call that was answered."""
        kept.is_ending = True
        kept.actual = what["actual"]
        if self._simulation.loop.time() >= kept.asked_s + kept.life_ms / 1000:
            # Its life is over: what was used is counted beside what others have reserved or spent since.
            kept.is_shared = False
        for who in what["ends_at"]:
            process = self._simulation.processes[who]
            if process.is_running:
                items = [(COUNTER, name, kept.actual)]
                ending = await self._ask(process, process.limiter.end(taken.name, items))
                self._simulation.auditor.note("ended", name, process.node_id, ending)
                if ending is None:
                    kept.may_be_counted = True
                elif ending.is_known:
                    kept.ended_by.append(process)

    def record_end(self, process: NodeProcess) -> None:
        """A process ended, and with it the ends of reservations that the origin had not confirmed."""
        if process.node.reserving is not None:
            self._lost_ends.update(process.node.reserving.waiting)

    # -- what a region has accepted

    def _judge(self, process: NodeProcess, counter: _Counter, name: str, cost: int, source: str) -> None:
        """Check that a request that was just allowed fits beside everything that is certainly counted or reserved."""
        self._simulation.auditor.note("kept", name, process.node_id, cost, source)
        truth_check = self._simulation.truth_check
        if source == "degraded":
            truth_check.note_degraded(process.region)
        if not truth_check.is_exact(process):
            return
        now_s = self._simulation.loop.time()
        used = cost + sum(each for by, each, is_known in counter.spent if is_known and by.is_running)
        for kept in counter.kept:
            if not kept.is_shared:
                # Taken during an outage: its end may reach the origin much later (`LATE_S` of `reserving`).
                continue
            if kept.ended_by:
                used += min(kept.estimate, kept.actual)
            elif now_s < kept.asked_s + kept.life_ms / 1000:
                used += min(kept.estimate, kept.actual) if kept.is_ending else kept.estimate
        if used > QUOTA:
            self._simulation.auditor.fail(
                11, f"{process.node_id}: {name} allowed {cost}, {used} of {QUOTA} are counted or reserved"
            )

    # -- at the end

    def _bounds(self, region: str, counter: _Counter) -> tuple[int, int, int]:
        """The least and the most that may be counted, and the most that may still be reserved."""
        is_certain = not self._simulation.truth_check.losses[region]
        least = most = held = 0
        for process, cost, is_known in counter.spent:
            most += cost
            if is_certain and is_known and process.is_running:
                least += cost
        for kept in counter.kept:
            if kept.ended_by or kept.may_be_counted:
                most += kept.actual
            if is_certain and any(process.is_running for process in kept.ended_by):
                least += kept.actual
            if kept.life_ms >= LONG_LIFE_MS and not kept.ended_by:
                held += kept.estimate
        # The node that took a reservation may count it again if the origin lost the first count.
        return least, most if is_certain else 2 * most, held

    def _held_by_lost(self, region: str, name: str) -> int:
        """What the origin holds for reservations whose end was lost."""
        digest = subject_digest(COUNTER.workspace, COUNTER.namespace, name, COUNTER.duration_ms)
        record = self._simulation.origins[region].memory.snapshot().records.get(digest)
        holds = {} if record is None else record.holds
        return sum(hold.spare for holder, hold in holds.items() if holder in self._lost_ends)

    async def check(self) -> None:
        """All faults are removed: everything that was used is counted once, and the rest can be reserved."""
        if not self._counters:
            return
        deadline_s = self._simulation.loop.time() + SETTLED_S + self._simulation.convergence.ahead_ms / 1000
        while True:
            await asyncio.sleep(KNOWN_S)
            found = await self._find()
            if not found or self._simulation.loop.time() >= deadline_s:
                break
        for text in found:
            self._simulation.auditor.fail(8, text)

    async def _find(self) -> list[str]:
        """What is still wrong."""
        found: list[str] = []
        for (region, name), counter in self._counters.items():
            least, most, held = self._bounds(region, counter)
            held += self._held_by_lost(region, name)
            running = [one for one in self._simulation.processes.values() if one.region == region]
            for process in running:
                known = (await process.limiter.peek(COUNTER, name)).effective
                if not least <= known <= most + held:
                    found.append(
                        f"{process.node_id} counts {known} of {name}: {least} to {most} were used, {held} held"
                    )
            left = QUOTA - most - held
            if left > 0:
                taken = await running[0].limiter.take([Request(COUNTER, name, left)], 1_000)
                if not taken.name:
                    found.append(
                        f"{running[0].node_id}: {left} of {name} must be free, and cannot be reserved"
                    )
                else:
                    try:
                        await running[0].limiter.end(taken.name, [(COUNTER, name, 0)])
                    except DependencyError:
                        found.append(f"{running[0].node_id} could not release {name}")
        return found
