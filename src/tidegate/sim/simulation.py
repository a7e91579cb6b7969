"""One simulation: real nodes in virtual regions run a plan of traffic and faults, and an auditor checks them.

In the safety phase, traffic and faults happen as planned; every decision and every message is checked when it happens.
Then traffic stops and all faults are removed. In the liveness phase, all nodes must agree with what was accepted. A
simulation runs on one virtual event loop; the same plan gives the same trace.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tidegate.adapters.memory import OriginSnapshot
from tidegate.core.model import Decision, Limit, Request
from tidegate.runtime.importer import LOSS_INTERVALS
from tidegate.sim.auditor import WORKSPACE, Auditor, Violation
from tidegate.sim.convergence_check import ConvergenceCheck
from tidegate.sim.network import Link, Network
from tidegate.sim.node_process import NodeProcess
from tidegate.sim.plan import Event, Plan
from tidegate.sim.reservation_check import ReservationCheck
from tidegate.sim.reset_check import ResetCheck
from tidegate.sim.truth_check import TruthCheck
from tidegate.sim.virtual_stores import LedgerPort, OriginPort, VirtualLedger, VirtualOrigin
from tidegate.sim.virtual_time import LoopStalled, VirtualClock, VirtualLoop, recorded_errors
from tidegate.testing.limiters import make_async_limiter

__all__ = ["Report", "Simulation", "run_plan"]

# How often the whole memory of every node is checked. Decisions and messages are checked when they happen.
SWEEP_MS = 1_000


@dataclass(frozen=True)
class Report:
    """The result of a simulation."""

    seed: int
    violations: tuple[Violation, ...]
    trace: str
    fired: Mapping[str, int]
    decisions: int
    virtual_s: float
    description: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations


class Simulation:
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tuning = plan.tuned()
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop, plan.epoch_ms)
        self.auditor = Auditor(self.tuning, plan.subjects, self.clock, self.loop.now_us)
        # The text is part of the seed: another one would change every trace.
        self.network = Network(self.loop, Random(f"weather {plan.seed}"), plan.network)
        self.origins = {region: VirtualOrigin(self.clock) for region in plan.regions}
        self.ledger = VirtualLedger(self.clock, self.network, plan.replica_lag_ms)
        self.processes: dict[str, NodeProcess] = {}
        self.all_processes: list[NodeProcess] = []
        self.convergence = ConvergenceCheck(self)
        self.truth_check = self.auditor.truth_check = TruthCheck(self)
        self.resets = ResetCheck(self)
        self.reservations = ReservationCheck(self)
        self.ledger.on_visible = self.truth_check.rows_visible
        self.fault_kinds = frozenset(event.kind for event in plan.events)
        # Loop time of the last fault of the ledger.
        self.ledger_disturbed_s = 0.0
        self.limits = [
            tuple(
                Limit(limit, duration_ms=one.duration_ms, namespace=one.namespace, workspace=WORKSPACE)
                for limit in one.limits
            )
            for one in plan.subjects
        ]
        self._fault_timers: list[asyncio.TimerHandle] = []
        self._failovers = 0
        # Requests whose client disconnected. Use it for membership tests only: the order of a set differs between runs.
        self._disconnected: set[object] = set()
        self._swept_ms = 0

    # -- nodes

    def start_process(self, name: str, region: str, number: int) -> NodeProcess:
        """Start a node, as a process with its own clock and links."""
        offset_ms, drift_ppm = self.plan.clocks[name]
        clock = VirtualClock(self.loop, self.plan.epoch_ms, offset_ms=offset_ms, drift_ppm=drift_ppm)
        process = NodeProcess(name, region, number, self.loop, clock, self.auditor)
        process.origin_link = Link(self.network, self.origins[region])
        process.ledger_link = Link(self.network, self.ledger)
        process.bind(
            make_async_limiter(
                region=region,
                origin=OriginPort(self.origins[region], process.origin_link, process),
                ledger=LedgerPort(self.ledger, process.ledger_link, process),
                clock=clock,
                tuning=self.tuning,
                node_id=process.node_id,
                random=Random(f"node {self.plan.seed} {process.node_id}"),
                monotonic_ns=lambda: self.loop.now_us() * 1_000,
            )
        )
        self.processes[name] = process
        self.all_processes.append(process)
        self.auditor.truth.regions[process.node_id] = region
        self.loop.create_task(process.limiter.start(), context=process.context)
        return process

    # -- requests

    def _request(self, event: Event) -> None:
        process = self.processes[event.who]
        if not process.is_running:
            return
        what = event.what
        if "nowait" in what and not process.is_paused:
            limit = self.limits[what["subject"]][what["limit"]]
            identifier = self.plan.subjects[what["subject"]].identifier
            at_ms = process.clock.now_ms()
            self.auditor.memory.check(process)
            # In the context of the process, so that tasks which the decision starts belong to it.
            decision = process.request_context.run(
                process.limiter.limit_nowait, limit, identifier, what["cost"]
            )
            if decision is not None:
                item = (limit, identifier, what["cost"])
                self.auditor.decided(process, [item], [decision], at_ms)
                return
        task = self.loop.create_task(self._answer(process, event), context=process.request_context)
        if "patience_ms" in what:
            # The client disconnects; requests that share its read must not be affected.
            self.loop.call_later(what["patience_ms"] / 1000, self._disconnect, task)

    def _disconnect(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.network.fired["client left"] += 1
            self._disconnected.add(task)
            task.cancel()

    async def _answer(self, process: NodeProcess, event: Event) -> None:
        """Serve a request. A running node must answer every client that is still waiting."""
        try:
            await (self._serve_batch if event.kind == "batch" else self._serve)(process, event)
        except asyncio.CancelledError:
            if process.is_running and asyncio.current_task() not in self._disconnected:
                self.auditor.fail(1, f"{process.node_id}: a request got no answer")
            raise

    async def _serve(self, process: NodeProcess, event: Event) -> None:
        what = event.what
        limit = self.limits[what["subject"]][what["limit"]]
        identifier = self.plan.subjects[what["subject"]].identifier
        started_s = self.loop.time()
        at_ms = process.clock.now_ms()
        at_ms += what.get("own_time_ms", 0)
        self.auditor.memory.check(process)
        decision = await process.limiter.limit(limit, identifier, what["cost"], now_ms=at_ms)
        self._answered(process, [(limit, identifier, what["cost"])], [decision], at_ms)
        self._check_wait(process, started_s)

    async def _serve_batch(self, process: NodeProcess, event: Event) -> None:
        items = [
            (self.limits[subject][limit], self.plan.subjects[subject].identifier, cost)
            for subject, limit, cost in event.what["items"]
        ]
        started_s = self.loop.time()
        at_ms = process.clock.now_ms()
        self.auditor.memory.check(process)
        decisions = await process.limiter.limit_many([Request(*item) for item in items], now_ms=at_ms)
        self._answered(process, items, decisions, at_ms)
        self._check_wait(process, started_s)

    def _answered(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
    ) -> None:
        """A caller got these decisions; those that waited for credit were reported when they were made."""
        if id(decisions[0]) not in process.reported:
            self.auditor.decided(process, items, decisions, at_ms)

    def _check_wait(self, process: NodeProcess, started_s: float) -> None:
        """No request waits longer than one read, whatever has failed."""
        waited_s = self.loop.time() - started_s
        allowed_s = self.tuning.read_timeout_ms / 1000 * 1.1 + 0.001
        if started_s < process.started_s + allowed_s:
            # The node was starting, which may add the time of one read.
            allowed_s *= 2
        if waited_s > allowed_s and process.resumed_s < started_s:
            self.auditor.fail(
                1, f"{process.node_id}: a request waited {waited_s:.3f} s, allowed {allowed_s:.3f} s"
            )

    def _spray(self, event: Event) -> None:
        """A client sends one request for each of many new identifiers."""
        process = self.processes[event.who]
        if process.is_running and not process.is_paused:
            spec = self.plan.subjects[event.what["subject"]]
            limit = self.limits[event.what["subject"]][0]
            for number in range(event.what["count"]):
                identifier = f"spray-{event.at_ms}-{number}"
                self.auditor.know_subject((WORKSPACE, spec.namespace, spec.duration_ms), identifier)
                self.loop.create_task(
                    self._serve_one(process, limit, identifier, event.what["cost"]),
                    context=process.request_context,
                )

    async def _serve_one(self, process: NodeProcess, limit: Limit, identifier: str, cost: int) -> None:
        at_ms = process.clock.now_ms()
        self.auditor.memory.check(process)
        decision = await process.limiter.limit(limit, identifier, cost, now_ms=at_ms)
        self._answered(process, [(limit, identifier, cost)], [decision], at_ms)

    # -- counters that are reset

    def _probe(self, event: Event) -> None:
        process = self.processes[event.who]
        if process.is_running and not process.is_paused:
            self.loop.create_task(
                self.resets.request(process, event.what["probe"], event.what["cost"]),
                context=process.request_context,
            )

    def _reset(self, event: Event) -> None:
        process = self.processes[event.who]
        if process.is_running and not process.is_paused:
            self.loop.create_task(self.resets.reset(process, event.what["probe"]), context=process.context)

    # -- faults: each starts, and is undone after `lasts_ms`

    def _after(self, event: Event, undo: object) -> None:
        assert callable(undo)
        self._fault_timers.append(self.loop.call_later(event.what["lasts_ms"] / 1000, undo))

    def _cut(self, links: list[Link], is_cut: bool) -> None:
        for link in links:
            link.is_cut = is_cut
            link.disturbed_s = self.loop.time()

    def _cut_node(self, event: Event) -> None:
        links = [self.processes[event.who].origin_link]
        self._cut(links, True)
        self._after(event, lambda: self._cut(links, False))

    def _cut_region(self, event: Event) -> None:
        links = [process.ledger_link for process in self.processes.values() if process.region == event.who]
        self._cut(links, True)
        self._after(event, lambda: self._cut(links, False))

    def _cut_half(self, event: Event) -> None:
        """The origin of a region is partitioned from half of its nodes."""
        names = [name for name, region in self.plan.nodes if region == event.who]
        links = [self.processes[name].origin_link for name in names[: (len(names) + 1) // 2]]
        self._cut(links, True)
        self._after(event, lambda: self._cut(links, False))

    def _importer(self, region: str) -> NodeProcess | None:
        lease = self.origins[region].memory.lease_nowait("", 0, None)
        return next((one for one in self.processes.values() if one.node_id == lease.holder), None)

    def _importer_pause(self, event: Event) -> None:
        """The node that imports for a region freezes, and continues before or after another node has taken over."""
        process = self._importer(event.who)
        if process is not None:
            self._node_pause(Event(event.at_ms, "node_pause", process.name, event.what))

    def _importer_crash(self, event: Event) -> None:
        process = self._importer(event.who)
        if process is not None:
            self._node_crash(Event(event.at_ms, "node_crash", process.name, event.what))

    def _lease_lost(self, event: Event) -> None:
        """The origin loses the import lease: another node takes it while the holder continues."""
        self.origins[event.who].memory.drop_lease()

    def _mark_region_disturbed(self, region: str) -> None:
        for process in self.processes.values():
            if process.region == region:
                process.origin_link.disturbed_s = self.loop.time()

    def _origin_crash(self, event: Event) -> None:
        origin = self.origins[event.who]
        origin.is_down = True
        self._mark_region_disturbed(event.who)
        if event.what["comes_back"] == "wiped":
            self.convergence.record_loss(event.who, origin.memory.wipe)

        def restart() -> None:
            origin.is_down = False
            self._mark_region_disturbed(event.who)

        self._after(event, restart)

    def _origin_freeze(self, event: Event) -> None:
        origin = self.origins[event.who]
        origin.freeze()
        self._mark_region_disturbed(event.who)

        def thaw() -> None:
            origin.thaw()
            self._mark_region_disturbed(event.who)

        self._after(event, thaw)

    def _origin_wipe(self, event: Event) -> None:
        self._mark_region_disturbed(event.who)
        self.convergence.record_loss(event.who, self.origins[event.who].memory.wipe)

    def _origin_failover(self, event: Event) -> None:
        """An older copy takes over. It is another process, which every pulse can see."""
        memory = self.origins[event.who].memory
        older = memory.snapshot()
        self._failovers += 1
        older = replace(older, incarnation=-self._failovers)

        def fail_over() -> None:
            self._mark_region_disturbed(event.who)
            self.convergence.record_loss(event.who, lambda: memory.restore(older))

        self._fault_timers.append(self.loop.call_later(event.what["age_ms"] / 1000, fail_over))

    def _origin_readonly(self, event: Event) -> None:
        origin = self.origins[event.who]
        origin.refuses_writes = True
        origin.refuses_since_s = self.loop.time()

        def accept_writes() -> None:
            origin.refuses_writes = False
            self._mark_region_disturbed(event.who)

        self._after(event, accept_writes)

    def _origin_evicts(self, event: Event) -> None:
        """The origin is out of memory, and drops some subjects."""
        memory = self.origins[event.who].memory
        held = memory.snapshot()
        dropped = {
            digest for number, digest in enumerate(sorted(held.records)) if number % 2 == event.what["odd"]
        }
        left = OriginSnapshot(
            {digest: record for digest, record in held.records.items() if digest not in dropped},
            [due for due in held.expiries if due[1][0] not in dropped],
            held.region,
            held.incarnation,
        )
        self._mark_region_disturbed(event.who)
        self.convergence.record_loss(event.who, lambda: memory.restore(left))

    def _mark_ledger_disturbed(self) -> None:
        self.ledger_disturbed_s = max(self.loop.time(), self.ledger_disturbed_s)

    def _ledger_down(self, event: Event) -> None:
        self.ledger.is_down = True

        def restart() -> None:
            self.ledger.is_down = False
            self._mark_ledger_disturbed()

        self._after(event, restart)

    def _ledger_freeze(self, event: Event) -> None:
        self.ledger.freeze()

        def thaw() -> None:
            self.ledger.thaw()
            self._mark_ledger_disturbed()

        self._after(event, thaw)

    def _ledger_chunk(self, _event: Event) -> None:
        self.ledger.failing_chunks += 1
        self._mark_ledger_disturbed()

    def _ledger_wipe(self, _event: Event) -> None:
        self.ledger.wipe()
        for delay_ms in {0, self.ledger.lag_ms}:
            self.loop.call_later(delay_ms / 1000, self._forget_rows)

    def _forget_rows(self) -> None:
        self.auditor.truth.ledger_wiped(self.loop.now_us())
        # Only a full import shows what is missing, and it runs no sooner than this.
        self.ledger_disturbed_s = (
            self.loop.time() + (LOSS_INTERVALS + 1) * self.tuning.import_interval_ms / 1000
        )

    def _ledger_rejects(self, event: Event) -> None:
        identifier = self.plan.subjects[event.what["subject"]].identifier
        self.ledger.reject(lambda row: row.identifier == identifier)
        self._after(event, lambda: self.ledger.reject(None))

    def _node_crash(self, event: Event) -> None:
        process = self.processes[event.who]
        if process.is_running:
            self.convergence.check_crash(process)
            self._end_process(process)
            self._after(event, lambda: self._restart(process))

    def _end_process(self, process: NodeProcess) -> None:
        process.is_running = False
        process.crashed_s = self.loop.time()
        process.origin_link.is_dead = process.ledger_link.is_dead = True
        self.loop.kill(process.node_id)
        self.convergence.record_end(process)
        self.reservations.record_end(process)

    def _restart(self, process: NodeProcess) -> None:
        if self.processes[process.name] is process:
            self.start_process(process.name, process.region, process.number + 1)

    def _node_stop(self, event: Event) -> None:
        process = self.processes[event.who]
        if process.is_running and not process.is_paused:
            process.is_running = False
            self.loop.create_task(self._stop(process, event), context=process.context)

    async def _stop(self, process: NodeProcess, event: Event) -> None:
        # Like a server, answer the requests in progress first.
        await asyncio.sleep(self.tuning.read_timeout_ms / 1000 * 2.5)
        started_s = self.loop.time()
        # These requests are answered in the same step in which the stop begins: only the flush can deliver them.
        for spec, limits in zip(self.plan.subjects, self.limits, strict=True):
            at_ms = process.clock.now_ms()
            decision = process.limiter.limit_nowait(limits[0], spec.identifier)
            if decision is not None:
                self.auditor.decided(process, [(limits[0], spec.identifier, 1)], [decision], at_ms)
        await process.limiter.stop()
        self.convergence.check_stop(process, started_s)
        self.convergence.record_end(process)
        self.reservations.record_end(process)
        self._after(event, lambda: self._restart(process))

    def _region_deploy(self, event: Event) -> None:
        """Every node of a region stops and is replaced, one after the other or all at once; the origin may come back
        empty in between."""
        names = [name for name, region in self.plan.nodes if region == event.who]
        for number, name in enumerate(names):
            stop = Event(event.at_ms, "node_stop", name, {"lasts_ms": event.what["lasts_ms"]})
            after_s = number * event.what["apart_ms"] / 1000
            self._fault_timers.append(self.loop.call_later(after_s, self._node_stop, stop))
        if event.what["wipes"]:
            wipe = Event(event.at_ms, "origin_wipe", event.who, {})
            after_s = (len(names) * event.what["apart_ms"] + event.what["lasts_ms"] / 2) / 1000
            self._fault_timers.append(self.loop.call_later(after_s, self._origin_wipe, wipe))

    def _node_pause(self, event: Event) -> None:
        process = self.processes[event.who]
        if process.is_running and not process.is_paused:
            process.is_paused = True
            self.loop.pause(process.node_id)
            self._after(event, lambda: self._resume(process))

    def _resume(self, process: NodeProcess) -> None:
        if process.is_paused:
            process.is_paused = False
            process.resumed_s = process.origin_link.disturbed_s = self.loop.time()
            self.loop.resume(process.node_id)

    def _clock_step(self, event: Event) -> None:
        process = self.processes[event.who]
        # Recorded before and after the step: the latest time that the clock has shown decides which cells may be
        # dropped.
        self.truth_check.knowledge(process)
        process.clock.offset_ms += event.what["by_ms"]
        self.truth_check.knowledge(process)
        process.has_stepped = True
        process.stepped_s = self.loop.time()
        process.stepped_ms = event.what["by_ms"]

    # -- the run

    async def _run_phases(self) -> None:
        for name, region in self.plan.nodes:
            self.start_process(name, region, 1)
        for event in self.plan.events:
            await self._run_until_ms(event.at_ms)
            if self.auditor.violations:
                return
            if event.kind in {"limit", "batch"}:
                self._request(event)
            elif event.kind in {"reserve", "spend"}:
                self.reservations.start(event)
            else:
                self.auditor.note(event.kind, event.who)
                self.network.fired[event.kind.replace("_", " ")] += 1
                getattr(self, f"_{event.kind}")(event)
        await self._run_until_ms(self.plan.trouble_ms)
        await self._heal()
        if not self.auditor.violations:
            await self.resets.check()
            await self.reservations.check()
            await self.convergence.check()
            self.truth_check.check_refusals()

    async def _run_until_ms(self, at_ms: int) -> None:
        while True:
            wait_s = at_ms / 1000 - self.loop.time()
            sweep_s = self._swept_ms / 1000 + SWEEP_MS / 1000 - self.loop.time()
            if wait_s <= 0:
                return
            await asyncio.sleep(min(wait_s, max(sweep_s, 0.001)))
            if self.loop.time() * 1000 >= self._swept_ms + SWEEP_MS:
                self._swept_ms = int(self.loop.time() * 1000)
                self.sweep()

    def sweep(self) -> None:
        for process in self.processes.values():
            if process.is_running:
                self.auditor.sweep(process)
                self.resets.sweep(process)

    async def _heal(self) -> None:
        """Remove all faults: links, stores and clocks work again, and every node has a running process."""
        for timer in self._fault_timers:
            timer.cancel()
        self.network.remove_faults()
        for origin in self.origins.values():
            origin.is_down = origin.refuses_writes = False
            origin.thaw()
        self.ledger.is_down = False
        self.ledger.thaw()
        self.ledger.failing_chunks = 0
        self.ledger.reject(None)
        self._mark_ledger_disturbed()
        for process in list(self.processes.values()):
            self._resume(process)
            self._cut([process.origin_link, process.ledger_link], False)
        # A stop in progress may take its whole timeout.
        await asyncio.sleep(self.tuning.flush_timeout_ms / 1000 + 1)
        for process in list(self.processes.values()):
            if not process.is_running:
                self._restart(process)
            ahead_ms = self.processes[process.name].clock.now_ms() - self.clock.now_ms()
            self.convergence.ahead_ms = max(self.convergence.ahead_ms, ahead_ms)
            self._correct_clock(self.processes[process.name])

    def _correct_clock(self, process: NodeProcess) -> None:
        if process.clock.now_ms() != self.clock.now_ms():
            self.truth_check.knowledge(process)
            process.has_stepped = True
            process.stepped_s = self.loop.time()
            process.stepped_ms = self.clock.now_ms() - process.clock.now_ms()
        process.clock.offset_ms = 0
        process.clock.drift_ppm = 0

    def run(self) -> Report:
        asyncio.set_event_loop(None)
        self.loop.set_exception_handler(self._record_exception)
        with recorded_errors() as errors:
            try:
                self.loop.run_until_complete(self._run_phases())
            except LoopStalled as stopped:
                self.auditor.fail(8, str(stopped))
            finally:
                self._close()
        # asyncio reports the exception of a task that nothing awaits when the task is collected.
        gc.collect()
        for error in errors:
            self.auditor.fail(8, f"logged: {error}")
        return Report(
            seed=self.plan.seed,
            violations=tuple(self.auditor.violations),
            trace=self.auditor.trace_hash(),
            fired=dict(sorted(self.network.fired.items())),
            decisions=self.auditor.decisions,
            virtual_s=self.loop.time(),
            description=self.convergence.describe(),
            counts=self._counts(),
        )

    def _record_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or a task failed with an exception that nothing handles."""
        loop.default_exception_handler(context)  # logs it, with the traceback
        if "exception" in context:
            self.auditor.fail(8, f"{context['message']}: {context['exception']!r}")

    def _counts(self) -> dict[str, int]:
        """How much was compared with the truth, and how much was not."""
        counts = {
            "answers": self.truth_check.judged,
            "answers compared with a single counter": self.truth_check.exact,
            "answers denied although a single counter might have allowed them": self.truth_check.refused,
            "resets": self.resets.made,
            "reservations": self.reservations.made,
            "cells": self.convergence.compared,
            "cells excused": self.convergence.excused,
            "cells over admitted": len(self.truth_check.over_admitted),
        }
        for reason, times in sorted(self.truth_check.excused.items()):
            counts[f"answers excused: {reason}"] = times
        return counts

    def _close(self) -> None:
        """Cancel all tasks that still run."""
        self.reservations.close()
        for process in self.all_processes:
            process.is_running = False
            process.origin_link.is_dead = process.ledger_link.is_dead = True
            self.loop.kill(process.node_id)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0.001))
        self.loop.close()


def run_plan(plan: Plan) -> Report:
    """Run a plan to its end, or to the first violation."""
    return Simulation(plan).run()
