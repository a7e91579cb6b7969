from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.telemetry.metrics import METRICS, HistogramValue, Key, Snapshot, merge, metric
from tidegate.telemetry.totals import Totals

# The metrics that the design lists.
DESIGN = {
    "decisions_total": ("outcome", "source"),
    "subjects": (),
    "cells": (),
    "cells_created_total": ("by",),
    "resets_total": ("by",),
    "subjects_evicted_total": ("reason",),
    "strict_activations_total": (),
    "origin_operations_total": ("op",),
    "origin_errors_total": ("op", "reason"),
    "origin_latency_seconds": ("op",),
    "origin_dirty_subjects": (),
    "replay_lag_seconds": (),
    "origin_heals_total": (),
    "global_publish_rows_total": (),
    "global_publish_errors_total": (),
    "global_import_rows_total": (),
    "global_import_errors_total": (),
    "global_import_rows_last": (),
    "global_lag_seconds": ("region",),
    "regions": (),
    "breaker_state": ("name",),
    "loop_stall_seconds": (),
}

LABEL_VALUES = {
    "decisions_total": (("allowed", "denied"), ("local", "origin")),
    "cells_created_total": (("traffic", "import"),),
    "resets_total": (("request", "node"),),
    "origin_operations_total": (("exchange", "cold", "stale", "strict", "replay"),),
    "origin_errors_total": (
        ("exchange", "cold", "stale", "strict", "replay"),
        ("timeout", "circuit_open", "other"),
    ),
}


def test_the_metrics_of_the_design_are_there_with_their_labels() -> None:
    assert {name: metric(name).labels for name in DESIGN} == DESIGN
    assert {name: metric(name).values for name in LABEL_VALUES} == LABEL_VALUES


def test_names_follow_the_conventions_of_prometheus() -> None:
    for entry in METRICS:
        assert re.fullmatch(r"tidegate_[a-z][a-z0-9_]*[a-z0-9]", entry.full_name)
        assert entry.full_name.endswith("_total") == (entry.kind == "counter"), entry.name
        assert (entry.kind == "histogram") == bool(entry.bounds), entry.name
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in entry.labels)
        assert "le" not in entry.labels
        assert entry.help.endswith(".")
        assert entry.worry.endswith(".")
        assert "\n" not in entry.help
        assert "\\" not in entry.help
    assert len({entry.name for entry in METRICS}) == len(METRICS)


def test_every_label_has_few_known_values_or_comes_from_the_fleet_or_is_a_top_k() -> None:
    # The number of regions, breakers, evictions, HTTP statuses and versions depends on operators, not on callers.
    from_the_fleet = {
        "global_lag_seconds",
        "breaker_state",
        "http_requests_total",
        "rls_calls_total",
        "build_info",
    }
    for entry in METRICS:
        if entry.labels:
            bounded = bool(entry.values) or entry.series_max is not None or entry.name in from_the_fleet
            assert bounded, entry.name


def test_counters_of_workers_are_added_and_gauges_are_merged_as_declared() -> None:
    one = Snapshot(
        "a", {("decisions_total", ("allowed", "local")): 3, ("regions", ()): 2, ("subjects", ()): 10}
    )
    two = Snapshot(
        "b",
        {
            ("decisions_total", ("allowed", "local")): 4,
            ("decisions_total", ("denied", "local")): 1,
            ("regions", ()): 3,
            ("subjects", ()): 5,
            ("clock_offset_seconds", ()): -0.2,
        },
    )
    three = Snapshot("c", {("clock_offset_seconds", ()): 0.1, ("breaker_state", ("ledger",)): 2})
    four = Snapshot("d", {("breaker_state", ("ledger",)): 0})
    assert merge([one, two, three, four]).values == {
        ("decisions_total", ("allowed", "local")): 7,
        ("decisions_total", ("denied", "local")): 1,
        ("regions", ()): 3,
        ("subjects", ()): 15,
        # The worst offset is the one furthest from zero.
        ("clock_offset_seconds", ()): -0.2,
        ("breaker_state", ("ledger",)): 2,
    }


def test_histograms_are_added_bucket_by_bucket() -> None:
    key: Key = ("loop_stall_seconds", ())
    one = Snapshot("a", {}, {key: HistogramValue((1.0, 2.0), (1, 0, 4), 9.5)})
    two = Snapshot("b", {}, {key: HistogramValue((1.0, 2.0), (0, 2, 1), 6.0)})
    assert merge([one, two]).histograms == {key: HistogramValue((1.0, 2.0), (1, 2, 5), 15.5)}


def test_adding_histograms_with_different_buckets_is_an_error() -> None:
    key: Key = ("loop_stall_seconds", ())
    one = Snapshot("a", {}, {key: HistogramValue((1.0,), (1, 0), 1.0)})
    two = Snapshot("b", {}, {key: HistogramValue((2.0,), (1, 0), 1.0)})
    with pytest.raises(ValueError, match="different buckets"):
        merge([one, two])


snapshots = st.builds(
    Snapshot,
    st.text(max_size=5),
    st.dictionaries(
        st.tuples(
            st.sampled_from(["decisions_total", "top_workspace_decisions"]), st.tuples(st.text(max_size=5))
        ),
        st.integers(0, 2**60) | st.floats(allow_nan=False),
    ),
    st.dictionaries(
        st.tuples(st.just("origin_latency_seconds"), st.tuples(st.text(max_size=5))),
        st.builds(HistogramValue, st.just((0.5, 1.0)), st.tuples(*[st.integers(0, 9)] * 3), st.floats(0, 9)),
    ),
)


@given(snapshots)
def test_a_snapshot_is_the_same_after_encoding_and_decoding(snapshot: Snapshot) -> None:
    assert Snapshot.from_json(snapshot.to_json()) == snapshot


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"nonsense", b'{"node":1,"values":[[1]],"histograms":[]}', b"[" * 99_999]
)
def test_decoding_anything_else_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Snapshot.from_json(data)


ALLOWED: Key = ("decisions_total", ("allowed", "local"))
STALL: Key = ("loop_stall_seconds", ())


def test_counters_never_fall_when_a_worker_is_replaced() -> None:
    totals = Totals()
    totals.update(
        Snapshot("a", {ALLOWED: 100, ("subjects", ()): 7}, {STALL: HistogramValue((1.0,), (3, 1), 4.0)})
    )
    totals.update(Snapshot("b", {ALLOWED: 50, ("subjects", ()): 5}))
    totals.retire("a")
    totals.retire("a")
    totals.retire("never seen")
    totals.update(
        Snapshot("c", {ALLOWED: 1, ("subjects", ()): 1}, {STALL: HistogramValue((1.0,), (1, 0), 0.5)})
    )
    merged = merge(totals.snapshots())
    assert merged.values[ALLOWED] == 151
    assert merged.histograms[STALL] == HistogramValue((1.0,), (4, 1), 4.5)
    assert merged.values["subjects", ()] == 6
    assert merged.values["workers", ()] == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans())))
def test_the_total_is_what_all_workers_ever_counted(story: list[tuple[str, int, bool]]) -> None:
    totals = Totals()
    counts: dict[str, int] = {}
    generation = dict.fromkeys("abc", 0)
    truth = 0
    for worker, more, dies in story:
        node = f"{worker}{generation[worker]}"
        counts[node] = counts.get(node, 0) + more
        truth += more
        totals.update(Snapshot(node, {ALLOWED: counts[node]}))
        if dies:
            totals.retire(node)
            generation[worker] += 1
        assert merge(totals.snapshots()).values[ALLOWED] == truth
