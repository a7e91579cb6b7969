"""Runs scenarios: real limiters on a clock that the steps move, with results compared with the expected ones.

The background loops of a node are not started; a replay, publish or import step runs the real loop once. All regions of
a scenario are running from the start, and every node knows how many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from tidegate.core.model import Decision, LedgerRow, Limit, Request, subject_digest
from tidegate.core.windows import publish_threshold
from tidegate.errors import DependencyError, InvalidInput
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.node import Node
from tidegate.runtime.reservation import Taken
from tidegate.sim.expectations import Difference, differences, matches
from tidegate.sim.node_process import parts_of
from tidegate.sim.scenario_files import Load, MalformedScenario, NodeSpec, Scenario, Step
from tidegate.sim.scenario_stores import RegionOrigin, ScenarioLedger, ScenarioOrigin
from tidegate.sim.simulation import run_plan
from tidegate.sim.virtual_time import VirtualLoop, recorded_errors
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter

__all__ = ["Outcome", "run_scenario"]

T = TypeVar("T")

LOAD_REGION: Final = "load"


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario."""

    scenario: Scenario
    differences: list[Difference]

    @property
    def ok(self) -> bool:
        return not self.differences


@dataclass
class ScenarioNode:
    """A node of the scenario, and the limiter of its last start."""

    spec: NodeSpec
    limiter: AsyncLimiter
    starts: int

    @property
    def node(self) -> Node:
        node = parts_of(self.limiter).node
        assert node is not None, "a node of a scenario has an origin and a ledger"
        return node


class Answers:
    """The results of a step: decisions or errors, and whether the requests are unchanged."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.errors: list[InvalidInput] = []
        self.unchanged = True


class ScenarioRun:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._loop = VirtualLoop()
        self._clock = ManualClock()
        self._ledger = ScenarioLedger(self._clock)
        self._origins: dict[str, RegionOrigin] = {}
        self._members: dict[str, ScenarioNode] = {}
        self._open_batches: dict[str, Answers] = {}
        self._reservations: dict[str, Taken] = {}
        self.found: list[Difference] = []

    # -- nodes and time

    def run(self) -> list[Difference]:
        scenario = self._scenario
        try:
            if scenario.load is not None:
                self._run_load(scenario.load)
                return self.found
            if scenario.steps and scenario.steps[0].t_ms is not None:
                self._clock.set(scenario.steps[0].t_ms)
            for spec in scenario.nodes:
                self._start(spec, 1)
            for step in scenario.steps:
                self._move_to(step.t_ms)
                getattr(self, f"_do_{step.op}")(step)
            return self.found
        except InvalidInput as error:
            raise MalformedScenario(f"{scenario.file}: scenario {scenario.name!r}: {error}") from error
        finally:
            self._loop.close()

    def _start(self, spec: NodeSpec, starts: int) -> ScenarioNode:
        limiter = make_async_limiter(
            region=spec.region,
            origin=ScenarioOrigin(self._origin(spec.region)),
            ledger=self._ledger,
            clock=self._clock,
            tuning=self._scenario.tuning,
            node_id=spec.id if starts == 1 else f"{spec.id}#{starts}",
            random=Random(starts),
            run_loops=False,
        )
        member = ScenarioNode(spec, limiter, starts)
        self._members[spec.id] = member
        regions = {one.region for one in self._scenario.nodes} | {spec.region}
        member.node.ledger_sync.apply_regions(len(regions))
        return member

    def _origin(self, region: str) -> RegionOrigin:
        if region not in self._origins:
            self._origins[region] = RegionOrigin(self._clock)
        return self._origins[region]

    def _move_to(self, t_ms: int | None) -> None:
        """Set every clock to `t_ms`. Timers follow when time goes forward; a step back moves the clocks only."""
        if t_ms is None:
            return
        passed_ms = t_ms - self._clock.now_ms()
        self._clock.set(t_ms)
        if passed_ms > 0:
            self._loop.advance_to(self._loop.time() + passed_ms / 1000)

    def _await(self, awaitable: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaitable

        return self._loop.run_until_complete(wait())

    def _member(self, step: Step) -> ScenarioNode:
        return self._members[step.text("node")]

    def _differ(self, step: Step, name: str, got: object, key: str = "expect") -> None:
        if key in step.fields:
            path = f"step {step.number} ({step.op})" + (f" {name}" if name else "")
            self.found.extend(differences(path, step.fields[key], got))

    # -- requests

    def _request(self, fields: Mapping[str, Any], index: int = 0) -> Request:
        limit = Limit(
            fields["limit"],
            duration_ms=fields["duration_ms"],
            namespace=fields["namespace"],
            workspace=fields["workspace"],
            shadow=fields.get("shadow", False),
        )
        pattern = fields.get("identifier_pattern")
        identifier = fields["identifier"] if pattern is None else pattern.replace("{i}", str(index))
        return Request(limit, identifier, fields.get("cost", 1))

    def _do_limit(self, step: Step) -> None:
        answers = Answers()
        for index in range(step.get("count", 1)):
            self._ask(self._member(step), step, [index], answers)
        self._compare(step, answers, answers.decisions[-1:] and _answer(answers.decisions[-1]))

    def _do_concurrent(self, step: Step) -> None:
        answers = Answers()
        self._ask(self._member(step), step, range(step.get("count", 1)), answers)
        self._compare(step, answers, answers.decisions[-1:] and _answer(answers.decisions[-1]))

    def _ask(self, member: ScenarioNode, step: Step, indexes: Iterable[int], answers: Answers) -> None:
        """Send requests at the same instant."""
        try:
            requests = [self._request(step.fields, index) for index in indexes]
            before = [_frozen(request) for request in requests]
            answers.decisions += self._await(self._gathered(member.limiter, requests, step.get("time_ms")))
        except InvalidInput as error:
            answers.errors.append(error)
            return
        answers.unchanged = answers.unchanged and before == [_frozen(request) for request in requests]

    async def _gathered(
        self, limiter: AsyncLimiter, requests: list[Request], time_ms: int | None
    ) -> list[Decision]:
        if len(requests) == 1:
            return [await limiter.limit(*requests[0], now_ms=time_ms)]
        return await asyncio.gather(*(limiter.limit(*request, now_ms=time_ms) for request in requests))

    def _batch(self, step: Step) -> Answers:
        answers = Answers()
        try:
            requests = [self._request(one) for one in step.fields["requests"]]
            before = [_frozen(request) for request in requests]
            limiter = self._member(step).limiter
            answers.decisions = self._await(limiter.limit_many(requests, now_ms=step.get("time_ms")))
            answers.unchanged = before == [_frozen(request) for request in requests]
        except InvalidInput as error:
            answers.errors.append(error)
        return answers

    def _do_batch(self, step: Step) -> None:
        answers = self._batch(step)
        self._compare(step, answers, [_answer(decision) for decision in answers.decisions])

    def _do_batch_begin(self, step: Step) -> None:
        # Check and commit are one step: nothing is observable between begin and end.
        answers = self._open_batches[step.text("handle")] = self._batch(step)
        if any(name.startswith("expect") for name in step.fields):
            self._compare(step, answers, [_answer(decision) for decision in answers.decisions])

    def _do_batch_end(self, step: Step) -> None:
        answers = self._open_batches[step.text("handle")]
        self._compare(step, answers, [_answer(decision) for decision in answers.decisions])

    def _do_reserve(self, step: Step) -> None:
        requests = [self._request(one) for one in step.fields["requests"]]
        life_ms = step.get("life_ms", min(request.limit.duration_ms for request in requests))
        taken = self._await(self._member(step).limiter.take(requests, life_ms))
        self._reservations[step.text("handle")] = taken
        self._differ(step, "", [_answer(decision) for decision in taken.decisions])
        successes = sum(decision.allowed for decision in taken.decisions)
        self._differ(step, "successes", successes, "expect_successes")

    def _do_settle(self, step: Step) -> None:
        """Settle on any node of the region, any number of times. `costs` has one cost per counter, in order."""
        taken = self._reservations[step.text("handle")]
        costs = step.fields["costs"]
        if len(costs) != len(taken.items):
            raise MalformedScenario(f"{step.place}: {len(taken.items)} counters were reserved")
        self._end(step, taken, costs)

    def _do_release(self, step: Step) -> None:
        taken = self._reservations[step.text("handle")]
        self._end(step, taken, [0] * len(taken.items))

    def _end(self, step: Step, taken: Taken, costs: Sequence[int]) -> None:
        items = [(limit, who, cost) for (limit, who, _), cost in zip(taken.items, costs, strict=True)]
        ending = self._await(self._member(step).limiter.end(taken.name, items))
        self._differ(step, "", {"known": ending.is_known, "repeated": ending.is_repeated})

    def _do_usage(self, step: Step) -> None:
        request = self._request(step.fields)
        limiter = self._member(step).limiter
        usage = self._await(limiter.usage(request.limit, request.identifier, now_ms=step.get("time_ms")))
        names = ("own", "regional", "foreign", "carried", "reserved", "used", "remaining")
        shown: dict[str, object] = {name: usage._asdict()[name] for name in names}
        shown["regions"] = {region: part.counted for region, part in usage.regions.items()}
        shown["ages_ms"] = {region: part.age_ms for region, part in usage.regions.items()}
        self._differ(step, "", shown)

    def _do_reset(self, step: Step) -> None:
        """Succeeds if the origin and the ledger have confirmed the reset."""
        request = self._request(step.fields)
        confirmed = self._await(self._member(step).limiter.reset(request.limit, request.identifier))
        self._differ(step, "ok", confirmed, "expect_ok")

    def _do_sync_resets(self, step: Step) -> None:
        """Write the resets that are waiting, and read new ones from the origin."""
        self._differ(step, "ok", self._await(self._member(step).node.resets.run_once()), "expect_ok")

    def _compare(self, step: Step, answers: Answers, got: object) -> None:
        if step.get("expect_error", False):
            if not answers.errors or answers.decisions:
                self._differ(step, "error", False, "expect_error")
            return
        for error in answers.errors:
            self.found.append(Difference(f"step {step.number} ({step.op})", "a decision", f"error: {error}"))
        if answers.decisions or not answers.errors:
            self._differ(step, "", got)
        self._differ(step, "unchanged", answers.unchanged, "expect_unchanged")
        successes = sum(decision.allowed for decision in answers.decisions)
        self._differ(step, "successes", successes, "expect_successes")

    # -- loops

    def _do_replay(self, step: Step) -> None:
        replay = self._member(step).node.replay
        assert replay is not None
        self._differ(step, "ok", self._succeeds(replay.run_once), "expect_ok")

    def _succeeds(self, run_once: Callable[[], Awaitable[object]]) -> bool:
        try:
            self._await(run_once())
        except DependencyError:
            return False
        return True

    def _do_publish(self, step: Step) -> None:
        publish = self._member(step).node.publish
        assert publish is not None
        self._ledger.chunks = []
        published = self._await(publish.run_once())
        self._differ(step, "ok", published.ok, "expect_ok")
        # In the order of the unique key, in which a ledger writes them.
        self._compare_rows(step, sorted(published.rows))
        chunks = self._ledger.chunks
        if "expect_chunks" in step.fields and not matches(step.fields["expect_chunks"], published.chunks):
            # A failed chunk may be listed or left out: it was sent, but its rows were not stored.
            self._differ(step, "chunks", chunks, "expect_chunks")

    def _do_import(self, step: Step) -> None:
        importer = self._member(step).node.importer
        assert importer is not None
        self._differ(step, "ok", self._await(importer.run_once()).ok, "expect_ok")

    def _compare_rows(self, step: Step, rows: list[LedgerRow]) -> None:
        got = [self._row(row) for row in rows]
        self._differ(step, "rows", got, "expect_rows")
        self._differ(step, "row_count", len(got), "expect_row_count")
        self._differ(step, "first_row", got[0] if got else None, "expect_first_row")
        self._differ(step, "last_row", got[-1] if got else None, "expect_last_row")

    def _row(self, row: LedgerRow) -> dict[str, object]:
        return {
            "workspace": row.workspace,
            "namespace": row.namespace,
            "identifier": row.identifier,
            "duration_ms": row.duration_ms,
            "sequence": row.sequence,
            "region": row.region,
            "count": row.regional,
            "expires_at": row.expires_at_ms,
            "updated_at": self._ledger.updated_at_ms(row),
        }

    # -- inspection

    def _do_peek_cell(self, step: Step) -> None:
        engine = parts_of(self._member(step).limiter).engine
        key = (step.get("workspace"), step.get("namespace"), step.get("duration_ms"))
        subject = engine.subjects.find(key, step.get("identifier"))
        cell = None if subject is None else subject.cell(step.whole("sequence"))
        got: dict[str, object] = {
            "exists": cell is not None,
            "regional": 0,
            "foreign": 0,
            "speculative": 0,
            "fresh_until_ms": 0,
            "publish_threshold": 0,
            "last_published": 0,
        }
        if cell is not None:
            got |= {"regional": cell.regional(), "foreign": cell.foreign}
            if cell.origin is not None:
                got["fresh_until_ms"] = cell.origin.fresh_until_ms
            if cell.ledger is not None:
                got["last_published"] = cell.ledger.published
                if cell.ledger.quota_min:
                    regions = engine.global_view.regions
                    got["publish_threshold"] = publish_threshold(cell.ledger.quota_min, regions)
        self._differ(step, "", got)

    def _do_peek_strict(self, step: Step) -> None:
        engine = parts_of(self._member(step).limiter).engine
        key = (step.get("workspace"), step.get("namespace"), step.get("duration_ms"))
        subject = engine.subjects.find(key, step.get("identifier"))
        until_ms = 0 if subject is None else subject.strict_until_ms
        self._differ(step, "", {"exists": until_ms > self._clock.now_ms(), "until_ms": until_ms})

    def _digest(self, step: Step) -> bytes:
        return subject_digest(
            step.text("workspace"), step.text("namespace"), step.text("identifier"), step.whole("duration_ms")
        )

    def _do_peek_origin(self, step: Step) -> None:
        origin = self._origin(step.text("region"))
        self._differ(step, "", {"count": origin.count(self._digest(step), step.whole("sequence"))})

    def _do_peek_store(self, step: Step) -> None:
        self._compare_rows(step, self._ledger.memory.rows())

    # -- faults, and changes by nodes outside the scenario

    def _do_origin_add(self, step: Step) -> None:
        self._origin(step.text("region")).add(
            self._digest(step), step.whole("sequence"), step.whole("duration_ms"), step.whole("amount")
        )

    def _do_origin_down(self, step: Step) -> None:
        self._origin(step.text("region")).is_down = True

    def _do_origin_up(self, step: Step) -> None:
        self._origin(step.text("region")).is_down = False

    def _do_origin_wipe(self, step: Step) -> None:
        self._origin(step.text("region")).memory.wipe()

    def _do_store_down(self, _step: Step) -> None:
        self._ledger.is_down = True

    def _do_store_up(self, _step: Step) -> None:
        self._ledger.is_down = False
        self._ledger.fail_chunk = None

    def _do_store_fail_chunk(self, step: Step) -> None:
        self._ledger.fail_chunk = step.whole("index")

    def _do_store_put(self, step: Step) -> None:
        self._ledger.put(step.rows())

    def _do_origin_stats(self, step: Step) -> None:
        self._differ(step, "", self._origin(step.text("region")).take_statistics())

    def _do_store_stats(self, step: Step) -> None:
        self._differ(step, "", self._ledger.take_statistics())

    def _do_cleanup(self, step: Step) -> None:
        deleted = self._ledger.memory.cleanup_nowait(step.whole("cutoff_ms"), rows_max=1 << 62)
        self._differ(step, "deleted", deleted, "expect_deleted")

    def _do_janitor(self, step: Step) -> None:
        """Drop all aged cells. A running node does this in small steps; here everything is checked at once."""
        now_ms = self._clock.now_ms()
        subjects = parts_of(self._member(step).limiter).engine.subjects
        subjects.expire(now_ms, 1 << 62)
        for subject in list(subjects.slots):
            if subject is not None and not subject.drop_aged(now_ms, subjects.key_of(subject)[2]):
                subjects.drop(subject, now_ms)

    def _do_restart(self, step: Step) -> None:
        member = self._member(step)
        self._start(member.spec, member.starts + 1)

    def _do_tick(self, _step: Step) -> None:
        """Only moves the time."""

    # -- load

    def _run_load(self, load: Load) -> None:
        self._clock.set(load.start_ms)
        members = [
            self._start(NodeSpec(f"load{number}", LOAD_REGION), 1) for number in range(load.nodes_count)
        ]
        limit = Limit(load.limit, duration_ms=load.duration_ms, namespace="load")
        state = load.seed
        replay_ms = load.start_ms + load.replay_every_ms
        successes = 0
        for number in range(load.total_requests):
            now_ms = (load.start_ms * 1_000_000 + number * load.interval_ns) // 1_000_000
            while replay_ms <= now_ms:
                self._move_to(replay_ms)
                for member in members:
                    assert member.node.replay is not None
                    self._await(member.node.replay.run_once())
                replay_ms += load.replay_every_ms
            self._move_to(now_ms)
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            limiter = members[(state >> 33) % load.nodes_count].limiter
            decision = limiter.limit_nowait(limit, "load")
            if decision is None:
                decision = self._await(limiter.limit(limit, "load"))
            successes += decision.allowed
        self.found.extend(differences("successes", load.expect_successes, successes))


def _always() -> bool:
    return True


def _answer(decision: Decision) -> dict[str, object]:
    return {
        "success": decision.allowed,
        "remaining": decision.remaining,
        "current": decision.effective,
        "reset_ms": decision.reset_at_ms,
        "limit": decision.limit.quota,
        "retry_after_ms": decision.retry_after_ms,
    }


def _frozen(request: Request) -> tuple[object, ...]:
    limit = request.limit
    return (
        limit.workspace,
        limit.namespace,
        limit.duration_ms,
        limit.quota,
        request.identifier,
        request.cost,
    )


def run_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario from its start."""
    if scenario.plan is not None:
        report = run_plan(scenario.plan)
        return Outcome(
            scenario, [Difference("simulation", "no violation", str(one)) for one in report.violations]
        )
    with recorded_errors() as errors:
        found = ScenarioRun(scenario).run()
    found += [Difference("log", "no error", error) for error in errors]
    return Outcome(scenario, found)
