"""Runs simulations for many seeds, in several processes, sums up their reports, and shrinks a failing plan.

Simulations share nothing. Reports are combined in the order of their seeds, not in the order in which they finish.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tidegate.sim.plan import Event, NetworkConditions, Options, Plan, draw_plan, plan_to
from tidegate.sim.simulation import Report, run_plan

__all__ = ["Summary", "run_seed", "run_seeds", "shrink", "write_scenario"]

# Limits the time of a shrink; usually the plan is small long before this.
SHRINK_RUNS_MAX: Final = 600


def run_seed(seed: int, options: Options) -> Report:
    """Run the simulation of one seed."""
    return run_plan(draw_plan(seed, options))


def run_seeds(seeds: Sequence[int], options: Options, jobs: int) -> Iterator[Report]:
    """Run the simulations of all seeds on `jobs` processes; reports come in the order of the seeds."""
    if jobs <= 1 or len(seeds) <= 1:
        for seed in seeds:
            yield run_seed(seed, options)
        return
    # Spawned, not forked: a fork would inherit the threads of the caller.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, repeat(options), chunksize=max(1, min(25, len(seeds) // jobs)))


@dataclass
class Summary:
    """The sum of many reports."""

    passed: int = 0
    decisions: int = 0
    virtual_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    simulations_with: Counter[str] = field(default_factory=Counter)
    """In how many simulations each fault occurred."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was compared with the truth, and what was excused."""
    failures: list[Report] = field(default_factory=list)
    _traces: list[str] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.decisions += report.decisions
        self.virtual_s += report.virtual_s
        self.fired.update(report.fired)
        self.simulations_with.update(report.fired.keys())
        self.counts.update(report.counts)
        self._traces.append(report.trace)
        if report.ok:
            self.passed += 1
        else:
            self.failures.append(report)

    def trace_hash(self) -> str:
        """One hash for all traces, in the order of the seeds."""
        return blake2b("".join(self._traces).encode(), digest_size=16).hexdigest()

    def document(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "failed": len(self.failures),
            "decisions": self.decisions,
            "virtual_s": round(self.virtual_s, 3),
            "trace": self.trace_hash(),
            "faults_fired": dict(sorted(self.fired.items())),
            "worlds_with_fault": dict(sorted(self.simulations_with.items())),
            "counts": dict(sorted(self.counts.items())),
            "failures": [
                {
                    "seed": report.seed,
                    "trace": report.trace,
                    "violations": [str(v) for v in report.violations],
                }
                for report in self.failures
            ],
        }

    def lines(self) -> Iterator[str]:
        simulations = self.passed + len(self.failures)
        yield f"{simulations} simulations, {self.virtual_s / 60:.1f} virtual minutes, {self.decisions} decisions"
        yield "faults (times, simulations):"
        for name in sorted(self.fired):
            yield f"  {name:<28} {self.fired[name]:>9} {self.simulations_with[name]:>7}"
        yield "compared with the truth:"
        for name in sorted(self.counts):
            yield f"  {name:<70} {self.counts[name]:>9}"
        yield f"trace {self.trace_hash()}"
        yield f"{self.passed} passed, {len(self.failures)} failed"


# -- shrinking


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """The smallest plan found that still fails: fewer events, fewer network faults, correct clocks, default tuning."""
    runs = 0

    def still_fails(candidate: Plan) -> bool:
        nonlocal runs
        if runs >= SHRINK_RUNS_MAX:
            return False
        runs += 1
        return fails(candidate)

    plan = _fewer_events(plan, still_fails)
    for simplify in (
        _without_network_faults,
        _without_replica_lag,
        _with_correct_clocks,
        _with_default_tuning,
    ):
        simpler = simplify(plan)
        if simpler != plan and still_fails(simpler):
            plan = simpler
    for name in list(plan.tuning):
        fewer = replace(plan, tuning={key: value for key, value in plan.tuning.items() if key != name})
        if still_fails(fewer):
            plan = fewer
    if plan.events:
        shorter = replace(plan, trouble_ms=min(plan.trouble_ms, plan.events[-1].at_ms + 1))
        if still_fails(shorter):
            plan = shorter
    return _fewer_events(plan, still_fails)


def _without_network_faults(plan: Plan) -> Plan:
    return replace(plan, network=NetworkConditions(delay_ms=plan.network.delay_ms))


def _without_replica_lag(plan: Plan) -> Plan:
    return replace(plan, replica_lag_ms=0)


def _with_correct_clocks(plan: Plan) -> Plan:
    return replace(plan, clocks=dict.fromkeys(plan.clocks, (0, 0)))


def _with_default_tuning(plan: Plan) -> Plan:
    return replace(plan, tuning={})


def _fewer_events(plan: Plan, still_fails: Callable[[Plan], bool]) -> Plan:
    """Remove events, many at a time first, then one by one."""
    events: tuple[Event, ...] = plan.events
    size = max(1, len(events) // 2)
    while True:
        start = 0
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            if still_fails(plan.with_events(fewer)):
                events = fewer
            else:
                start += size
        if size == 1:
            return plan.with_events(events)
        size = max(1, size // 2)


def write_scenario(path: Path, plan: Plan, report: Report) -> None:
    """Write a plan as a scenario file."""
    scenario = {
        "name": f"seed {plan.seed}",
        "why": str(report.violations[0]) if report.violations else "",
        "kind": "world",
        "plan": plan_to(plan),
    }
    path.write_text(json.dumps({"schema": 1, "scenarios": [scenario]}, indent=1) + "\n", encoding="utf-8")
