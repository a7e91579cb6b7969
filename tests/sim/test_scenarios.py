from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tidegate.sim.commands import simulate
from tidegate.sim.expectations import differences, matches
from tidegate.sim.scenario_files import OPERATIONS, MalformedScenario, Scenario, bundled_files, load_file
from tidegate.sim.scenario_runner import ScenarioRun, run_scenario

T_MS = 1_799_971_200_000
BUNDLED = [scenario for file in bundled_files() for scenario in load_file(file)]
REQUEST = {
    "workspace": "ws",
    "namespace": "n",
    "identifier": "u",
    "limit": 10,
    "duration_ms": 60_000,
    "cost": 1,
}


def written(path: Path, *steps: dict[str, Any], **scenario: object) -> Path:
    described = {
        "name": "a scenario",
        "why": "",
        "nodes": [{"id": "a1", "region": "a"}],
        "steps": list(steps),
    }
    path.write_text(json.dumps({"schema": 1, "scenarios": [described | scenario]}))
    return path


def simulated(*arguments: object) -> Result:
    return CliRunner().invoke(simulate, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "scenario", BUNDLED, ids=lambda scenario: f"{Path(scenario.file).stem}: {scenario.name}"
)
def test_every_bundled_scenario_holds(scenario: Scenario) -> None:
    assert run_scenario(scenario).differences == []


def test_names_of_bundled_scenarios_are_unique() -> None:
    names = [scenario.name for scenario in BUNDLED]
    assert len(names) == len(set(names))


def test_every_operation_is_used_by_a_bundled_scenario() -> None:
    assert {step.op for scenario in BUNDLED for step in scenario.steps} == set(OPERATIONS)


def test_a_failed_expectation_is_reported_with_path_wanted_and_got(tmp_path: Path) -> None:
    step = {"t_ms": T_MS, "node": "a1", "op": "limit", **REQUEST, "expect": {"success": True, "remaining": 3}}
    file = written(tmp_path / "wrong.json", step)
    result = simulated(file)
    assert result.exit_code == 1
    assert f"FAILED  a scenario ({file})" in result.output
    assert "step 1 (limit).remaining: wanted 3, got 9" in result.output
    assert result.output.splitlines()[-1] == "0 passed, 1 failed"


def test_the_last_line_has_the_totals_and_the_exit_code_is_zero_if_all_passed(tmp_path: Path) -> None:
    step = {
        "t_ms": T_MS,
        "node": "a1",
        "op": "limit",
        **REQUEST,
        "expect": {"remaining": {"min": 9, "max": 9}},
    }
    file = written(tmp_path / "right.json", step)
    result = simulated(file, file)
    assert result.exit_code == 0
    assert result.output.splitlines() == ["ok      a scenario", "ok      a scenario", "2 passed, 0 failed"]


def test_json_has_the_same_results(tmp_path: Path) -> None:
    step = {"t_ms": T_MS, "node": "a1", "op": "limit", **REQUEST, "expect": {"current": {"any": [2, 3]}}}
    result = simulated(written(tmp_path / "wrong.json", step), "--json")
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert (document["passed"], document["failed"]) == (0, 1)
    assert document["scenarios"][0]["differences"] == [
        {"path": "step 1 (limit).current", "wanted": {"any": [2, 3]}, "got": 1}
    ]


LIMIT = {"t_ms": T_MS, "node": "a1", "op": "limit", **REQUEST}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({**LIMIT, "op": "limt"}, "op 'limt' is unknown"),
        ({**LIMIT, "node": "b1"}, "there is no node 'b1'"),
        ({**LIMIT, "t_ms": "now"}, "t_ms must be an integer"),
        ({**LIMIT, "t_ms": -5}, "t_ms must be 0 or more, not -5"),
        ({**LIMIT, "count": -1}, "count must be 1 or more, not -1"),
        ({**LIMIT, "expct": {}}, "unknown field 'expct'"),
        ({**LIMIT, "expect_rows": []}, "cannot have expect_rows"),
        ({key: value for key, value in LIMIT.items() if key != "limit"}, "needs limit"),
        ({"op": "batch", "node": "a1", "requests": [{}]}, "requests[0] needs duration_ms"),
        ({"op": "batch_end", "handle": "h"}, "no batch_begin has the handle 'h'"),
        ({"op": "settle", "node": "a1", "handle": "h", "costs": [1]}, "no reserve has the handle 'h'"),
        ({"op": "settle", "node": "a1", "handle": "h", "costs": [-1]}, "costs must be a list of integers"),
        ({"op": "store_put", "rows": [3]}, "rows[0] must be an object"),
        ({"op": "peek_origin", "region": 5, **REQUEST, "sequence": 1}, "region must be a string"),
    ],
)
def test_a_malformed_step_is_an_error_that_names_file_scenario_and_step(
    tmp_path: Path, step: dict[str, Any], expected: str
) -> None:
    file = written(tmp_path / "bad.json", {"op": "tick"}, step)
    with pytest.raises(MalformedScenario) as caught:
        load_file(file)
    message = str(caught.value)
    assert str(file) in message and "'a scenario'" in message and "step 2" in message and expected in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "a scenario file is"),
        ('{"schema": 2, "scenarios": []}', "schema 2 is unknown"),
        ('{"schema": 1, "scenarios": {}}', "scenarios must be a list"),
        ('{"schema": 1, "scenarios": [{}]}', "needs a name"),
        ('{"schema": 1, "scenarios": [{"name": "x", "kind": "y"}]}', "kind 'y' is unknown"),
        ('{"schema": 1, "scenarios": [{"name": "x", "tuning": {"freshness": 1}}]}', "tuning has no field"),
        (
            '{"schema": 1, "scenarios": [{"name": "x", "tuning": {"fresh_ms": true}}]}',
            "must be an integer",
        ),
        ('{"schema": 1, "scenarios": [{"name": "x", "nodes": [{"id": "a"}], "steps": []}]}', "a node is"),
        ('{"schema": 1, "scenarios": [{"name": "x", "kind": "load"}]}', "a load needs nodes_count"),
        (
            '{"schema": 1, "scenarios": [{"name": "x", "kind": "load", "total_request": 5}]}',
            r"bad\.json: scenario 1 \('x'\): unknown field 'total_request'; use .*total_requests",
        ),
        (
            '{"schema": 1, "scenarios": [{"name": "x", "nodes": [], "steps": [], "options": {}}]}',
            r"bad\.json: scenario 1 \('x'\): unknown field 'options'",
        ),
        ('{"schema": 1, "scenarios": [{"name": "x", "kind": "world", "seed": 1}]}', "unknown field 'seed'"),
        (
            '{"schema": 1, "scenarios": [{"name": "x", "nodes": [{"id": "a", "region": ""}], "steps": []}]}',
            r"bad\.json: scenario 1 \('x'\): node 'a': region: got ''",
        ),
        (
            '{"schema": 1, "scenarios": [{"name": "x", "tuning": {"fresh_ms": -1}}]}',
            r"bad\.json: scenario 1 \('x'\): tuning: fresh_ms: got -1",
        ),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(MalformedScenario, match=message):
        load_file(file)


def test_a_value_that_only_the_limiter_refuses_is_an_error_that_names_file_and_scenario(
    tmp_path: Path,
) -> None:
    load = next(one for file in bundled_files() for one in load_file(file) if one.load is not None)
    assert load.load is not None
    wrong = replace(load, file="bad.json", name="x", load=replace(load.load, limit=0))
    with pytest.raises(MalformedScenario, match=r"bad\.json: scenario 'x': quota: got 0"):
        ScenarioRun(wrong).run()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes_count", 0),
        ("nodes_count", 10**9),
        ("replay_every_ms", 0),
        ("interval_ns", -1),
        ("total_requests", -5),
    ],
)
def test_a_load_that_cannot_run_is_an_error_that_names_the_field(
    tmp_path: Path, field: str, value: int
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"schema": 1, "scenarios": [LONG | {field: value}]}))
    with pytest.raises(MalformedScenario, match=rf"scenario 1 \('long'\): {field} must be .*, not {value}"):
        load_file(file)


LONG: dict[str, Any] = {
    "name": "long",
    "why": "300 s windows, a request each second.",
    "kind": "load",
    "nodes_count": 9,
    "limit": 100,
    "duration_ms": 300_000,
    "start_ms": 1_799_971_200_000,
    "interval_ns": 1_000_000_000,
    "total_requests": 900,
    "seed": 1,
    "replay_every_ms": 100,
    # Three windows, less what waits for the first to slide out.
    "expect_successes": {"min": 250, "max": 310},
}


@pytest.mark.parametrize(
    "load",
    [
        LONG,
        LONG
        | {"nodes_count": 3, "duration_ms": 10_000, "interval_ns": 10_000_000, "total_requests": 100_000}
        | {"expect_successes": {"min": 9_900, "max": 11_000}},
    ],
    ids=["nine nodes, 900 requests in 900 s", "three nodes, 100,000 requests"],
)
def test_a_long_load_ends_with_a_result(tmp_path: Path, load: dict[str, Any]) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"schema": 1, "scenarios": [load]}))
    (scenario,) = load_file(file)
    assert ScenarioRun(scenario).run() == []


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MalformedScenario, match="cannot be read"):
        load_file(tmp_path / "absent.json")


def test_an_unexpected_error_and_a_missing_expected_error_are_differences(
    tmp_path: Path,
) -> None:
    file = written(tmp_path / "errors.json", {**LIMIT, "limit": 0}, {**LIMIT, "expect_error": True})
    found = [str(difference) for difference in run_scenario(load_file(file)[0]).differences]
    assert found == [
        "step 1 (limit): wanted 'a decision', got 'error: quota: got 0, expected at least 1'",
        "step 2 (limit) error: wanted True, got False",
    ]


def test_the_same_scenario_gives_the_same_result_twice() -> None:
    load = next(scenario for scenario in BUNDLED if scenario.load is not None)
    assert run_scenario(load).differences == run_scenario(load).differences == []


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (5, 5),
        ({"min": 1}, 1),
        ({"max": 3, "min": 3}, 3),
        ({"any": [0, {"min": 10}]}, 12),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([{"a": 1}, 2], [{"a": 1, "c": 0}, 2]),
        (None, None),
    ],
)
def test_what_is_as_wanted_matches(wanted: object, got: object) -> None:
    assert matches(wanted, got)


@pytest.mark.parametrize(
    ("wanted", "got", "path"),
    [
        (5, 6, "x"),
        (1, True, "x"),
        (True, 1, "x"),
        ({"min": 2}, 1, "x"),
        ({"max": 2}, 3, "x"),
        ({"min": 0}, None, "x"),
        ({"any": [1, 2]}, 3, "x"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "x.a.b"),
        ({"a": 1}, {}, "x.a"),
        ([1, 2], [1], "x.length"),
        ([1, 2], [1, 3], "x[1]"),
        ([], {"a": 1}, "x"),
        ({"a": 1}, 4, "x"),
    ],
)
def test_what_is_not_as_wanted_differs(wanted: object, got: object, path: str) -> None:
    assert [difference.path for difference in differences("x", wanted, got)] == [path]
