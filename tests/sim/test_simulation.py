from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import tidegate
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import Component, OriginReply
from tidegate.runtime.exchange import Exchanges
from tidegate.sim.commands import simulate
from tidegate.sim.plan import TRAFFIC, Options, draw_plan, plan_from, plan_to
from tidegate.sim.scenario_files import load_file
from tidegate.sim.scenario_runner import run_scenario
from tidegate.sim.seeds import Summary, run_seeds, shrink, write_scenario
from tidegate.sim.simulation import run_plan

# Every kind of fault; each must happen in the simulations of this file.
FAULTS = {
    "applied although timed out",
    "call timed out",
    "chunk failed",
    "client left",
    "clock step",
    "cut half",
    "cut node",
    "cut region",
    "importer crash",
    "importer pause",
    "lease lost",
    "ledger down",
    "ledger freeze",
    "ledger rejects",
    "ledger wipe",
    "message delayed",
    "message into a partition",
    "message overtaken",
    "node crash",
    "node pause",
    "node stop",
    "origin crash",
    "origin evicts",
    "origin failover",
    "origin freeze",
    "origin readonly",
    "origin wipe",
    "region deploy",
    "replica lagged",
    "reply lost",
    "request duplicated",
    "request lost",
    "spray",
}


# Of the cells that are compared at the end, and of the answers.
CELLS_EXCUSED_PERCENT_MAX = 12
ANSWERS_EXCUSED_PERCENT_MAX = 2


@pytest.mark.slow
def test_a_hundred_seeds_keep_the_invariants_and_every_fault_happens() -> None:
    summary = Summary()
    for report in run_seeds(range(1, 101), Options(), jobs=1):
        summary.add(report)
    assert [(one.seed, str(one.violations[0])) for one in summary.failures] == []
    assert summary.passed == 100
    assert summary.fired.keys() >= FAULTS
    assert summary.counts["answers"] > 12_500
    assert summary.counts["answers compared with a single counter"] > 1_000
    assert summary.counts["reservations"] > 75
    assert_little_is_excused(summary)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(7000379, id="a crash between two answers"),
        pytest.param(9000199, id="a batch with an item of cost 0, denied by anticipation"),
        pytest.param(9001413, id="a request with a time an hour ago"),
        pytest.param(9001695, id="an aged cell that a later decision of the same step drops"),
        pytest.param(3301, id="a request of cost 0 an hour ahead, in a window that was never read"),
        pytest.param(3470, id="a region that restarts, and the origin's mark of its row alone is left"),
        pytest.param(3848, id="a subject that is evicted during its read, and comes back"),
        pytest.param(20306, id="a clock that steps back into the window before one with counts"),
        pytest.param(42, id="a reservation that another node has ended"),
        pytest.param(337, id="a reservation that was taken without an answer, and ended elsewhere"),
        pytest.param(722, id="the end of a reservation that arrives after a later one"),
        pytest.param(187, id="a batch that waits and holds the last of a counter, beside single requests"),
        pytest.param(9001335, id="an origin that evicts, fails over and evicts again"),
        pytest.param(21947, id="a crash of the only node that knew what a wiped origin had held"),
        pytest.param(22302, id="an answer that waited for the end of a pause"),
        pytest.param(21387, id="a lost row, and an origin that does not say in time who publishes it"),
        pytest.param(21431, id="nodes that have just started, and whose first messages are late"),
        pytest.param(22003, id="a subject that expires with credit, and comes back before that is returned"),
        pytest.param(883, id="a request whose own time is ahead, near the limit"),
        pytest.param(40343, id="bursts on three nodes, whose waiting requests are granted the rest"),
        pytest.param(40393, id="a used-up counter that is peeked at after other regions have stopped"),
        pytest.param(22215, id="a lost row of a counter that was evicted, and comes back"),
        pytest.param(30027, id="a reset whose node ends before the ledger has it"),
        pytest.param(31183, id="a subject that is evicted before its request waits for credit"),
        pytest.param(61662, id="resets that an origin evicted before the next one was made"),
        pytest.param(
            61654, id="messages that a frozen origin gets when their nodes may publish for themselves"
        ),
        pytest.param(70439, id="credit of a crashed node"),
        pytest.param(90927, id="a message from before a failover that arrives late, and after later ones"),
        pytest.param(91067, id="a reservation that is settled after its life"),
        pytest.param(92264, id="answers after a small step back of the clock"),
        pytest.param(92968, id="counts that a full memory lost before the origin had them"),
        pytest.param(93662, id="a refused reservation that the origin holds, and a crash"),
        pytest.param(93783, id="requests with times of their own, in other windows"),
        pytest.param(201189, id="a message that arrives before a wipe and again after it"),
        pytest.param(1000059, id="counts that another node of the region lost, because its memory was full"),
        pytest.param(1000638, id="a node that learns late that other regions grow no more"),
        pytest.param(
            1001944, id="an answer from before a step back of the clock, and a failed read after it"
        ),
        pytest.param(1002555, id="a reset that the importer has read and not passed on when it crashes"),
        pytest.param(1004852, id="messages of a paused node that are on their way"),
        pytest.param(1006716, id="evicted during a read, and back with another window"),
        pytest.param(1011061, id="several later windows that have counts after a step back of the clock"),
        pytest.param(1018609, id="a guess just after an answer, and none for a while"),
        pytest.param(1019628, id="subjects that are evicted and come back again and again"),
        pytest.param(
            1012086, id="a window that began after the origin's last answer, with credit from before"
        ),
        pytest.param(1012641, id="requests that come when a paused node runs again"),
        pytest.param(1019526, id="a row that was due before a pause and has aged out after it"),
        pytest.param(1012664, id="without credit, a window that begins after an eviction"),
        pytest.param(1016992, id="without credit, a window that other clocks have begun before"),
        pytest.param(1020637, id="a reservation that was refused, and a late message that lets it go"),
        pytest.param(1024086, id="a crash of the only node that knew what an origin had lost"),
        pytest.param(2100466, id="a count that the origin does not know when its row is written"),
        pytest.param(31434, id="a node that has published for itself, and an answer without its row"),
    ],
)
def test_a_seed_that_once_failed_keeps_the_invariants(seed: int) -> None:
    (report,) = run_seeds([seed], Options(), jobs=1)
    assert report.violations == ()


def assert_little_is_excused(summary: Summary) -> None:
    """Only a small part is not compared with the truth because a fault explains the difference."""
    counts = summary.counts
    assert counts["cells excused"] * 100 <= counts["cells"] * CELLS_EXCUSED_PERCENT_MAX
    excused = sum(count for name, count in counts.items() if name.startswith("answers excused"))
    assert excused * 100 <= counts["answers"] * ANSWERS_EXCUSED_PERCENT_MAX


@pytest.mark.parametrize("method", ["on_recall", "_finish"])
def test_an_exception_that_nothing_handles_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """In a callback, and in a task."""

    def fail(*_args: object) -> None:
        raise RuntimeError("not expected")

    monkeypatch.setattr(Exchanges, method, fail)
    violations = run_plan(draw_plan(42)).violations
    assert any("RuntimeError('not expected')" in str(violation) for violation in violations)


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second = (run_plan(draw_plan(42)) for _ in range(2))
    assert first == second
    assert run_plan(draw_plan(43)).trace != first.trace


def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    code = "from tidegate.sim.seeds import *; from tidegate.sim.plan import Options; "
    code += "print([run_seed(seed, Options()).trace for seed in (3, 8, 21)])"
    source = str(Path(tidegate.__file__).parents[1])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }
    assert len(outputs) == 1 and "[" in outputs.pop()


def test_the_number_of_processes_does_not_change_the_traces() -> None:
    alone = [report.trace for report in run_seeds(range(1, 5), Options(), jobs=1)]
    assert [report.trace for report in run_seeds(range(1, 5), Options(), jobs=2)] == alone


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_options_override_what_the_seed_would_draw(traffic: str) -> None:
    plan = draw_plan(5, Options(regions=4, nodes=2, minutes=0.05, traffic=traffic))
    assert len(plan.regions) == 4
    assert len(plan.nodes) == 8
    assert plan.trouble_ms == 3_000
    assert plan.traffic == traffic
    assert run_plan(plan).violations == ()


def test_a_plan_is_the_same_after_it_was_written_and_read() -> None:
    plan = draw_plan(9)
    assert plan_from(json.loads(json.dumps(plan_to(plan)))) == replace(
        plan, events=tuple(event._replace(what=dict(event.what)) for event in plan.events)
    )


def test_a_seed_is_run_and_reported() -> None:
    result = CliRunner().invoke(simulate, ["--seed", "7", "--regions", "1", "--nodes", "1"])
    assert result.exit_code == 0
    assert "repeat: tidegate simulate --seed 7 --regions 1 --nodes 1" in result.output
    assert result.output.splitlines()[-1] == "1 passed, 0 failed"


def test_json_sums_up_many_seeds() -> None:
    result = CliRunner().invoke(simulate, ["--seeds", "1..3", "--jobs", "1", "--json"])
    assert result.exit_code == 0
    document = json.loads(result.output)
    assert document["seeds"] == [1, 3]
    assert (document["passed"], document["failed"], document["failures"]) == (3, 0, [])
    assert document["faults_fired"]


@pytest.mark.parametrize(
    "arguments", [[], ["--seed", "1", "--seeds", "1..2"], ["--seeds", "2..1"], ["--seeds", "x"]]
)
def test_missing_or_conflicting_arguments_are_errors(arguments: list[str]) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 2


def test_a_failing_seed_is_shrunk_and_written_as_a_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An origin that acknowledges odd counts and keeps none of them. It is an adapter, so it can be replaced under a
    # compiled core too.
    original = MemoryOrigin.merge_nowait

    def dropping(self: MemoryOrigin, components: list[Component]) -> list[OriginReply]:
        return original(self, [one._replace(own=one.own // 2 * 2) for one in components])

    monkeypatch.setattr(MemoryOrigin, "merge_nowait", dropping)
    plan = draw_plan(1, Options(regions=1, nodes=2, minutes=0.05)).with_tuning(credit=False)
    assert not run_plan(plan).ok
    small = shrink(plan, lambda candidate: not run_plan(candidate).ok)
    assert 0 < len(small.events) <= 3 < len(plan.events)
    file = tmp_path / "small.json"
    write_scenario(file, small, run_plan(small))
    (scenario,) = load_file(file)
    assert not run_scenario(scenario).ok
    monkeypatch.setattr(MemoryOrigin, "merge_nowait", original)
    assert run_scenario(scenario).ok
