from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tidegate.core.model import Decision, Limit, Tuning
from tidegate.sim.accuracy import GROUPS, WARM_UP_S, Case, cases, measure, table
from tidegate.sim.baselines import admitted_by_log, admitted_by_perfect_counter
from tidegate.sim.capacity import FleetCost, measure_fleet
from tidegate.sim.capacity import table as fleet_table
from tidegate.sim.commands import simulate
from tidegate.sim.fleet import Fleet, Offer
from tidegate.sim.plan import EPOCH_MS
from tidegate.sim.plots import plot_accuracy, plot_fleet

CASES = {case.name: case for case in cases()}
SEEDS = (1, 2, 3)
HOUR_MS = 3_600_000


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 8])
def test_nodes_of_one_region_at_twice_the_limit_admit_within_one_percent_of_a_perfect_counter(
    nodes: int,
) -> None:
    measured = measure(replace(CASES[f"{nodes} nodes"], windows=4))
    assert measured.over_percent <= 1
    assert measured.under_percent <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_an_even_spreader_at_20_per_second_in_ten_regions_gets_at_most_5_percent_more(seed: int) -> None:
    case = CASES["10 regions × 20/s"]
    assert measure(replace(case, windows=0.3, seed=seed)).of_limit <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_an_even_spreader_at_100_per_second_in_ten_regions_gets_at_most_10_percent_more(seed: int) -> None:
    # The limit is used up after a second; ten are enough to see that nothing is admitted later.
    case = CASES["10 regions × 100/s"]
    measured = measure(replace(case, windows=0.15, seed=seed))
    assert measured.of_limit <= 1.10
    assert min(measured.plain_first_window.values()) > 3 * case.limit, (
        "the plain scheme admits several times the limit"
    )


@pytest.mark.slow
@pytest.mark.parametrize("each", [20, 100])
def test_anticipation_costs_less_than_one_percent_when_foreign_traffic_stops(each: int) -> None:
    measured = measure(CASES[f"9 of 10 regions stop, {each}/s each"])
    assert measured.under_percent < 1


@pytest.mark.slow
@pytest.mark.parametrize(("each", "share"), [(20, 0.975), (100, 0.935)])
def test_what_is_left_when_other_regions_stop_is_available_soon(each: int, share: float) -> None:
    """Nine regions stop, and the tenth asks for the last tenth of the quota once, in one second or in five."""
    case = CASES[f"the same, and only the rest is asked for, {each}/s"]
    found = [measure(replace(case, seed=seed)).of_limit for seed in range(1, 7)]
    assert sum(found) / len(found) >= share


def test_each_mechanism_improves_accuracy() -> None:
    full = replace(CASES["10 regions × 20/s"], windows=0.5)
    bare = replace(CASES["and without pressure"], windows=0.5)
    assert measure(bare).of_limit > measure(full).of_limit + 0.3


def test_a_burst_in_one_instant_passes_before_it_is_seen_and_no_more_than_the_limit_in_each_region() -> None:
    measured = measure(replace(CASES["2 regions in one instant"], nodes=2))
    assert (measured.offered, measured.admitted) == (4 * 200, 2 * 200)


def hopped(quota: int, offered: Sequence[int], **tuning: Any) -> int:
    """How much of repeated bursts passes in five regions, one region after the other, a second apart."""
    start_ms = EPOCH_MS // HOUR_MS * HOUR_MS - WARM_UP_S * 1_000
    fleet = Fleet([2] * 5, replace(Tuning(), **tuning), ledger_delay_ms=60, seed=1, start_ms=start_ms)
    limit = Limit(quota, duration_ms=HOUR_MS, namespace="accuracy")
    passed: list[Offer] = []
    offers = [
        Offer((WARM_UP_S + second) * 1_000_000 + number * 500, second % 5 * 2 + number % 2)
        for second, burst in enumerate(offered)
        for number in range(burst)
    ]

    def answered(offer: Offer, decision: Decision) -> None:
        if decision:
            passed.append(offer)

    fleet.run(lambda _identifier: limit, offers, answered)
    return len(passed)


@pytest.mark.parametrize("quota", [5, 100])
def test_a_client_that_hops_from_region_to_region_gets_its_quota_once(quota: int) -> None:
    assert hopped(quota, [quota + 5] * 10) == quota
    assert hopped(quota, [quota * 2 // 5] * 10) == quota


def test_a_client_that_hops_below_the_thresholds_gets_at_most_half_of_the_quota_more() -> None:
    assert 100 < hopped(100, [10] * 5 + [105] * 5) <= 150


def test_hopping_would_pay_if_regions_did_not_publish_at_once() -> None:
    assert hopped(100, [105] * 10, pressure_interval_ms=5_000) >= 200


def test_below_the_limit_everything_passes() -> None:
    case = replace(CASES["load 0.9"], windows=3)
    measured = measure(case)
    assert measured.admitted == measured.offered == measured.perfect == measured.log


def test_the_same_case_gives_the_same_numbers() -> None:
    case = Case(
        "nodes", "small", nodes=3, limit=50, duration_ms=10_000, windows=2, per_second=15, kind="random"
    )
    assert measure(case) == measure(case)


def test_every_group_has_cases_and_names_are_unique() -> None:
    assert {case.group for case in cases()} == set(GROUPS)
    assert len(CASES) == len(cases())


def test_the_baselines_on_a_simple_series_of_requests() -> None:
    offers = [Offer(0, 0)] * 5 + [Offer(30_000_000, 0)] * 5 + [Offer(90_000_000, 0)] * 5
    # At 90 s the counter still counts half of the 3 in the first cell; the log has dropped them.
    counter = admitted_by_perfect_counter(offers, 3, 60_000, 0)
    assert [sum(counter[0:5]), sum(counter[5:10]), sum(counter[10:15])] == [3, 0, 2]
    log = admitted_by_log(offers, 3, 60_000)
    assert [sum(log[0:5]), sum(log[5:10]), sum(log[10:15])] == [3, 0, 3]


def test_results_can_be_printed_as_a_table_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    results = [
        measure(Case("regions", f"{regions} regions", regions=regions, limit=20, windows=0.2, per_second=4))
        for regions in (1, 2)
    ]
    lines = list(table(results))
    assert lines[1] == "-- regions"
    assert lines[2].startswith("1 regions")
    paths = plot_accuracy(results, tmp_path)
    assert sorted(path.name for path in paths) == ["accuracy-regions.png", "accuracy-regions.svg"]
    assert all(path.stat().st_size > 1_000 for path in paths)


@pytest.fixture(scope="module")
def reference() -> FleetCost:
    return measure_fleet(1, 1.0)


@pytest.mark.slow
def test_the_reference_fleet_is_run_and_costs_something(reference: FleetCost) -> None:
    assert (reference.nodes, reference.windows, reference.measured) == (33, 24_000, True)
    assert 3_000 < reference.requests_per_s < 5_000
    assert 0 < reference.origin_commands_per_s < 3 * reference.requests_per_s
    assert reference.ledger_rows_written_per_s < reference.requests_per_s / 10, (
        "few windows come near their limit"
    )
    assert reference.memory_mb_per_node > 0


@pytest.mark.slow
def test_more_nodes_with_the_same_windows_read_no_more_rows(reference: FleetCost, tmp_path: Path) -> None:
    wider = measure_fleet(4, 1.0, windows_scale=1)
    assert (wider.nodes, wider.windows) == (132, 24_000)
    # One node of each region imports, however many there are.
    assert wider.ledger_reads_per_s <= 1.5 * reference.ledger_reads_per_s
    assert wider.ledger_rows_read_per_s <= 2 * reference.ledger_rows_read_per_s + 100
    assert list(fleet_table([reference, wider]))[1].split() == ["nodes", "33", "132"]
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    assert [path.name for path in plot_fleet([reference, wider], tmp_path)] == ["fleet.png", "fleet.svg"]


def test_accuracy_is_a_command_with_a_table_and_json() -> None:
    result = CliRunner().invoke(simulate, ["accuracy", "--group", "burst", "--jobs", "1", "--json"])
    assert result.exit_code == 0
    names = [one["case"]["name"] for one in json.loads(result.output)["results"]]
    assert names == ["2 regions in one instant", "10 regions in one instant"]


def test_a_long_command_says_on_stderr_how_far_it_has_come() -> None:
    result = CliRunner().invoke(simulate, ["accuracy", "--group", "burst", "--jobs", "1"])
    assert "1 of 2 cases" in result.stderr
    assert "cases" not in result.stdout
    silent = CliRunner().invoke(simulate, ["accuracy", "--group", "burst", "--jobs", "1", "--json"])
    assert silent.stderr == ""
