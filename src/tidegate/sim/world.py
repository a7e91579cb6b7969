"""A seeded world: real nodes in virtual regions, through trouble into peace, under the eyes of an auditor.

First the safety phase: traffic and faults as planned, every answer and every message checked as it happens. Then
everything heals, traffic stops, and the liveness phase must end with all nodes in agreement with the truth. A world
runs on one virtual event loop; the same plan gives the same trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from tidegate.core.model import Limit, Request
from tidegate.sim.auditor import WORKSPACE, Auditor, Violation
from tidegate.sim.life import Life
from tidegate.sim.network import Link, Weather
from tidegate.sim.plan import Event, Plan
from tidegate.sim.settlement import Settlement
from tidegate.sim.stores import LedgerPort, OriginPort, VirtualLedger, VirtualOrigin
from tidegate.sim.virtual_time import StandStill, VirtualClock, VirtualLoop, recorded_errors
from tidegate.testing.limiters import make_async_limiter

__all__ = ["Report", "World", "run_world"]

# Every node is looked at as a whole this often; answers and messages are checked as they happen.
SWEEP_MS = 1_000


@dataclass(frozen=True)
class Report:
    """How a world went."""

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


class World:
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tuning = plan.tuned()
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop, plan.epoch_ms)
        self.auditor = Auditor(self.tuning, plan.subjects, self.clock, self.loop.now_us)
        self.weather = Weather(self.loop, Random(f"weather {plan.seed}"), plan.network)
        self.origins = {region: VirtualOrigin(self.clock) for region in plan.regions}
        self.ledger = VirtualLedger(self.clock, self.weather, plan.replica_lag_ms)
        self.lives: dict[str, Life] = {}
        self.all_lives: list[Life] = []
        self.settlement = Settlement(self)
        self.limits = [
            tuple(
                Limit(limit, duration_ms=one.duration_ms, namespace=one.namespace, workspace=WORKSPACE)
                for limit in one.limits
            )
            for one in plan.subjects
        ]
        self._in_trouble: list[asyncio.TimerHandle] = []
        # Requests whose client went away. Only asked for membership: the order of a set is not the same every time.
        self._left: set[object] = set()
        self._swept_ms = 0

    # -- nodes

    def begin_life(self, name: str, region: str, number: int) -> Life:
        """Start a node, as a process of its own."""
        offset_ms, drift_ppm = self.plan.clocks[name]
        clock = VirtualClock(self.loop, self.plan.epoch_ms, offset_ms=offset_ms, drift_ppm=drift_ppm)
        life = Life(name, region, number, self.loop, clock, self.auditor)
        life.origin_link = Link(self.weather, self.origins[region])
        life.ledger_link = Link(self.weather, self.ledger)
        life.bind(
            make_async_limiter(
                region=region,
                origin=OriginPort(self.origins[region], life.origin_link, life),
                ledger=LedgerPort(self.ledger, life.ledger_link, life),
                clock=clock,
                tuning=self.tuning,
                node_id=life.node_id,
                random=Random(f"node {self.plan.seed} {life.node_id}"),
            )
        )
        self.lives[name] = life
        self.all_lives.append(life)
        self.loop.create_task(life.limiter.start(), context=life.context)
        return life

    # -- requests

    def _request(self, event: Event) -> None:
        life = self.lives[event.who]
        if not life.is_running:
            return
        what = event.what
        if "nowait" in what and not life.is_paused:
            limit = self.limits[what["subject"]][what["limit"]]
            identifier = self.plan.subjects[what["subject"]].identifier
            at_ms = life.clock.now_ms()
            decision = life.limiter.limit_nowait(limit, identifier, what["cost"])
            if decision is not None:
                item = (limit, identifier, what["cost"])
                self.auditor.decided(life, [item], [decision], at_ms, False)
                return
        task = self.loop.create_task(self._answered(life, event), context=life.request_context)
        if "patience_ms" in what:
            # The client goes away; whoever shares its read must not notice.
            self.loop.call_later(what["patience_ms"] / 1000, self._leave, task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.weather.fired["client left"] += 1
            self._left.add(task)
            task.cancel()

    async def _answered(self, life: Life, event: Event) -> None:
        """Serve a request. Whoever still waits for an answer of a living node gets one."""
        try:
            await (self._serve_batch if event.kind == "batch" else self._serve)(life, event)
        except asyncio.CancelledError:
            if life.is_running and asyncio.current_task() not in self._left:
                self.auditor.fail(1, f"{life.node_id}: a request was never answered")
            raise

    async def _serve(self, life: Life, event: Event) -> None:
        what = event.what
        limit = self.limits[what["subject"]][what["limit"]]
        identifier = self.plan.subjects[what["subject"]].identifier
        started_s = self.loop.time()
        at_ms = life.clock.now_ms()
        own_time = "own_time_ms" in what
        if own_time:
            at_ms += what["own_time_ms"]
        decision = await life.limiter.limit(limit, identifier, what["cost"], now_ms=at_ms)
        self.auditor.decided(life, [(limit, identifier, what["cost"])], [decision], at_ms, own_time)
        self._check_patience(life, started_s)

    async def _serve_batch(self, life: Life, event: Event) -> None:
        items = [
            (self.limits[subject][limit], self.plan.subjects[subject].identifier, cost)
            for subject, limit, cost in event.what["items"]
        ]
        started_s = self.loop.time()
        at_ms = life.clock.now_ms()
        decisions = await life.limiter.limit_many([Request(*item) for item in items], now_ms=at_ms)
        self.auditor.decided(life, items, decisions, at_ms, False)
        self._check_patience(life, started_s)

    def _check_patience(self, life: Life, started_s: float) -> None:
        """No request waits longer than for one read, whatever is broken."""
        waited_s = self.loop.time() - started_s
        allowed_s = self.tuning.read_timeout_ms / 1000 * 1.1 + 0.001
        if started_s < life.born_s + allowed_s:
            # Its node was starting, which may take as long as a read, once.
            allowed_s *= 2
        if waited_s > allowed_s and life.resumed_s < started_s:
            self.auditor.fail(
                1, f"{life.node_id}: a request waited {waited_s:.3f} s, allowed {allowed_s:.3f} s"
            )

    # -- faults: each happens, and undoes itself after `lasts_ms`

    def _after(self, event: Event, undo: object) -> None:
        assert callable(undo)
        self._in_trouble.append(self.loop.call_later(event.what["lasts_ms"] / 1000, undo))

    def _cut(self, links: list[Link], is_cut: bool) -> None:
        for link in links:
            link.is_cut = is_cut
            link.troubled_s = self.loop.time()

    def _cut_node(self, event: Event) -> None:
        links = [self.lives[event.who].origin_link]
        self._cut(links, True)
        self._after(event, lambda: self._cut(links, False))

    def _cut_region(self, event: Event) -> None:
        links = [life.ledger_link for life in self.lives.values() if life.region == event.who]
        self._cut(links, True)
        self._after(event, lambda: self._cut(links, False))

    def _trouble_region(self, region: str) -> None:
        for life in self.lives.values():
            if life.region == region:
                life.origin_link.troubled_s = self.loop.time()

    def _origin_crash(self, event: Event) -> None:
        origin = self.origins[event.who]
        origin.is_down = True
        self._trouble_region(event.who)
        if event.what["comes_back"] == "wiped":
            self.settlement.lose(event.who, origin.memory.wipe)

        def restart() -> None:
            origin.is_down = False
            self._trouble_region(event.who)

        self._after(event, restart)

    def _origin_freeze(self, event: Event) -> None:
        origin = self.origins[event.who]
        origin.freeze()
        self._trouble_region(event.who)

        def thaw() -> None:
            origin.thaw()
            self._trouble_region(event.who)

        self._after(event, thaw)

    def _origin_wipe(self, event: Event) -> None:
        self._trouble_region(event.who)
        self.settlement.lose(event.who, self.origins[event.who].memory.wipe)

    def _origin_failover(self, event: Event) -> None:
        memory = self.origins[event.who].memory
        older = memory.snapshot()

        def fail_over() -> None:
            self._trouble_region(event.who)
            self.settlement.lose(event.who, lambda: memory.restore(older))

        self._in_trouble.append(self.loop.call_later(event.what["age_ms"] / 1000, fail_over))

    def _ledger_down(self, event: Event) -> None:
        self.ledger.is_down = True

        def restart() -> None:
            self.ledger.is_down = False

        self._after(event, restart)

    def _ledger_freeze(self, event: Event) -> None:
        self.ledger.freeze()
        self._after(event, self.ledger.thaw)

    def _ledger_chunk(self, _event: Event) -> None:
        self.ledger.failing_chunks += 1

    def _ledger_rejects(self, event: Event) -> None:
        identifier = self.plan.subjects[event.what["subject"]].identifier
        self.ledger.reject(lambda row: row.identifier == identifier)
        self._after(event, lambda: self.ledger.reject(None))

    def _node_crash(self, event: Event) -> None:
        life = self.lives[event.who]
        if life.is_running:
            self.settlement.check_crash(life)
            self._end_life(life)
            self._after(event, lambda: self._restart(life))

    def _end_life(self, life: Life) -> None:
        life.is_running = False
        life.origin_link.is_dead = life.ledger_link.is_dead = True
        self.loop.kill(life.node_id)
        self.settlement.died(life)

    def _restart(self, life: Life) -> None:
        if self.lives[life.name] is life:
            self.begin_life(life.name, life.region, life.number + 1)

    def _node_stop(self, event: Event) -> None:
        life = self.lives[event.who]
        if life.is_running and not life.is_paused:
            life.is_running = False
            self.loop.create_task(self._stop(life, event), context=life.context)

    async def _stop(self, life: Life, event: Event) -> None:
        # As a server does: requests under way are answered first.
        await asyncio.sleep(self.tuning.read_timeout_ms / 1000 * 2.5)
        started_s = self.loop.time()
        # The last requests are answered in the very step in which the stop begins: only the flush can save them.
        for spec, limits in zip(self.plan.subjects, self.limits, strict=True):
            at_ms = life.clock.now_ms()
            decision = life.limiter.limit_nowait(limits[0], spec.identifier)
            if decision is not None:
                self.auditor.decided(life, [(limits[0], spec.identifier, 1)], [decision], at_ms, False)
        await life.limiter.stop()
        self.settlement.check_stop(life, started_s)
        self.settlement.died(life)
        self._after(event, lambda: self._restart(life))

    def _node_pause(self, event: Event) -> None:
        life = self.lives[event.who]
        if life.is_running and not life.is_paused:
            life.is_paused = True
            self.loop.pause(life.node_id)
            self._after(event, lambda: self._resume(life))

    def _resume(self, life: Life) -> None:
        if life.is_paused:
            life.is_paused = False
            life.resumed_s = life.origin_link.troubled_s = self.loop.time()
            self.loop.resume(life.node_id)

    def _clock_step(self, event: Event) -> None:
        life = self.lives[event.who]
        life.clock.offset_ms += event.what["by_ms"]
        life.has_stepped = True

    # -- the run

    async def _live(self) -> None:
        for name, region in self.plan.nodes:
            self.begin_life(name, region, 1)
        for event in self.plan.events:
            await self._until_ms(event.at_ms)
            if self.auditor.violations:
                return
            if event.kind in {"limit", "batch"}:
                self._request(event)
            else:
                self.auditor.note(event.kind, event.who)
                self.weather.fired[event.kind.replace("_", " ")] += 1
                getattr(self, f"_{event.kind}")(event)
        await self._until_ms(self.plan.trouble_ms)
        await self._heal()
        if not self.auditor.violations:
            await self.settlement.settle()

    async def _until_ms(self, at_ms: int) -> None:
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
        for life in self.lives.values():
            if life.is_running:
                self.auditor.sweep(life)

    async def _heal(self) -> None:
        """Everything works again, for good: links, stores, clocks, and a life for every node."""
        for timer in self._in_trouble:
            timer.cancel()
        self.weather.clear()
        for origin in self.origins.values():
            origin.is_down = False
            origin.thaw()
        self.ledger.is_down = False
        self.ledger.thaw()
        self.ledger.failing_chunks = 0
        self.ledger.reject(None)
        for life in list(self.lives.values()):
            self._resume(life)
            self._cut([life.origin_link, life.ledger_link], False)
        # A stop that is under way may take its whole deadline.
        await asyncio.sleep(self.tuning.flush_timeout_ms / 1000 + 1)
        for life in list(self.lives.values()):
            if not life.is_running:
                self._restart(life)
            ahead_ms = self.lives[life.name].clock.now_ms() - self.clock.now_ms()
            self.settlement.ahead_ms = max(self.settlement.ahead_ms, ahead_ms)
            self.lives[life.name].clock.offset_ms = 0
            self.lives[life.name].clock.drift_ppm = 0

    def run(self) -> Report:
        asyncio.set_event_loop(None)
        with recorded_errors() as errors:
            try:
                self.loop.run_until_complete(self._live())
            except StandStill as stopped:
                self.auditor.fail(8, str(stopped))
            finally:
                self._close()
        for error in errors:
            self.auditor.fail(8, f"logged: {error}")
        return Report(
            seed=self.plan.seed,
            violations=tuple(self.auditor.violations),
            trace=self.auditor.trace_hash(),
            fired=dict(sorted(self.weather.fired.items())),
            decisions=self.auditor.decisions,
            virtual_s=self.loop.time(),
            description=self.settlement.describe(),
        )

    def _close(self) -> None:
        """End what still runs, so that nothing of this world outlives it."""
        for life in self.all_lives:
            life.is_running = False
            life.origin_link.is_dead = life.ledger_link.is_dead = True
            self.loop.kill(life.node_id)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0.001))
        self.loop.close()


def run_world(plan: Plan) -> Report:
    """Run a plan from its beginning to its end, or to its first violation."""
    return World(plan).run()
