from __future__ import annotations

import re
import sys
from ast import literal_eval
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.errors import MissingExtra
from tidegate.telemetry.metrics import METRICS, HistogramValue, Key, Snapshot, metric
from tidegate.telemetry.prometheus import Collector, Renderer, render

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(page: bytes) -> Samples:
    """Every sample of a page, as the reference parser of prometheus_client reads it."""
    samples: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def series(page: bytes) -> list[str]:
    """The page without its comments."""
    return [line for line in page.decode().split("\n") if line and line[0] != "#"]


def full_snapshot(node: str = "a") -> Snapshot:
    """A value for every metric."""
    values: dict[Key, float] = {}
    histograms: dict[Key, HistogramValue] = {}
    for number, entry in enumerate(METRICS, 1):
        key = (entry.name, tuple(f"{label}{number}" for label in entry.labels))
        if entry.kind == "histogram":
            histograms[key] = HistogramValue(entry.bounds, (1,) * (len(entry.bounds) + 1), 2.5)
        else:
            values[key] = number
    return Snapshot(node, values, histograms)


def test_a_page_has_help_and_type_before_the_series() -> None:
    page = render(
        [Snapshot("a", {("decisions_total", ("allowed", "local")): 12, ("replay_lag_seconds", ()): 0.25})]
    )
    lines = page.decode().splitlines()
    assert lines[:3] + [line for line in lines if "replay_lag" in line] == [
        "# HELP tidegate_decisions_total " + metric("decisions_total").help,
        "# TYPE tidegate_decisions_total counter",
        'tidegate_decisions_total{outcome="allowed",source="local"} 12',
        "# HELP tidegate_replay_lag_seconds " + metric("replay_lag_seconds").help,
        "# TYPE tidegate_replay_lag_seconds gauge",
        "tidegate_replay_lag_seconds 0.25",
    ]


def test_a_metric_without_a_series_still_has_help_and_type() -> None:
    page = render([Snapshot("a", {})]).decode()
    for entry in METRICS:
        assert f"# HELP {entry.full_name} {entry.help}\n# TYPE {entry.full_name} {entry.kind}\n" in page
    assert [family.samples for family in text_string_to_metric_families(page)] == [[]] * len(METRICS)


def test_a_histogram_is_cumulative_and_ends_with_infinity() -> None:
    key: Key = ("origin_latency_seconds", ("cold",))
    page = render([Snapshot("a", {}, {key: HistogramValue((0.001, 1.0), (3, 2, 1), 4.5)})])
    assert series(page) == [
        'tidegate_origin_latency_seconds_bucket{op="cold",le="0.001"} 3',
        'tidegate_origin_latency_seconds_bucket{op="cold",le="1.0"} 5',
        'tidegate_origin_latency_seconds_bucket{op="cold",le="+Inf"} 6',
        'tidegate_origin_latency_seconds_sum{op="cold"} 4.5',
        'tidegate_origin_latency_seconds_count{op="cold"} 6',
    ]


def test_the_page_of_several_workers_has_each_series_once() -> None:
    samples = parsed(render([full_snapshot("a"), full_snapshot("b")]))
    number = 1 + [entry.name for entry in METRICS].index("decisions_total")
    outcome = labels(outcome=f"outcome{number}", source=f"source{number}")
    assert samples["tidegate_decisions_total", outcome] == 2 * number
    assert samples["tidegate_loop_stall_seconds_sum", labels()] == 5.0
    regions = 1 + [entry.name for entry in METRICS].index("regions")
    assert samples["tidegate_regions", labels()] == regions


def test_a_page_without_snapshots_has_help_and_type_only() -> None:
    assert series(render([])) == []


@given(st.text(max_size=30) | st.text('a\\x00\x00\n\r"\x85\u2028\ud800', max_size=8))
@example("a\x00b")
@example("a\\x00b")
def test_any_identifier_can_be_parsed_from_the_page(identifier: str) -> None:
    key: Key = ("top_identifier_denials", ("w", "n", identifier))
    page = Renderer()([Snapshot("a", {key: 1})])
    # One sample is one line to a scraper, also to one that splits at more than \n.
    (line,) = series(page)
    assert page.count(b"\n") == len(page.decode().splitlines()) == 2 * len(METRICS) + 1
    assert b"\x00" not in page
    label = re.sub(
        r"\\(.)",
        lambda match: "\n" if match[1] == "n" else match[1],
        line.partition('identifier="')[2].removesuffix('"} 1'),
    )
    meant = re.sub(r"\\(?:\\|t|r|x..|u....)", lambda match: str(literal_eval(f'"{match[0]}"')), label)
    assert meant == identifier


def test_a_top_k_stays_bounded_over_any_number_of_workers() -> None:
    most = metric("top_workspace_decisions").series_max
    assert most is not None
    workers = [
        Snapshot(
            f"n{worker}", {("top_workspace_decisions", (f"w{number}",)): number for number in range(100)}
        )
        for worker in range(3)
    ]
    samples = parsed(render(workers))
    assert samples == {
        ("tidegate_top_workspace_decisions", labels(workspace=f"w{number}")): 3 * number
        for number in range(100 - most, 100)
    }


def test_wrong_labels_are_an_error() -> None:
    with pytest.raises(ValueError, match="outcome"):
        render([Snapshot("a", {("decisions_total", ("allowed",)): 1})])


def test_an_undeclared_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="invented_total"):
        render([Snapshot("a", {("invented_total", ()): 1})])


def test_the_cache_of_prepared_text_is_bounded() -> None:
    renderer = Renderer()
    for start in range(0, 200_000, 20_000):
        renderer(
            [
                Snapshot(
                    "a",
                    {("global_lag_seconds", (f"r{number}",)): 1 for number in range(start, start + 20_000)},
                )
            ]
        )
    assert len(renderer._prepared) <= 70_000


def test_infinity_and_nan_are_rendered_as_prometheus_expects() -> None:
    values: dict[Key, float] = {
        ("global_lag_seconds", ("a",)): float("inf"),
        ("global_lag_seconds", ("b",)): float("-inf"),
        ("global_lag_seconds", ("c",)): float("nan"),
    }
    lines = series(render([Snapshot("a", values)]))
    assert [line.rpartition(" ")[2] for line in lines] == ["+Inf", "-Inf", "NaN"]


def test_the_collector_gives_prometheus_client_the_same_samples() -> None:
    snapshots = [full_snapshot("a"), full_snapshot("b")]
    registry = CollectorRegistry()
    registry.register(Collector(lambda: snapshots))
    assert parsed(generate_latest(registry)) == parsed(render(snapshots))


def test_registering_the_collector_reads_no_statistics() -> None:
    asked: list[int] = []

    def source() -> list[Snapshot]:
        asked.append(1)
        return []

    CollectorRegistry(auto_describe=True).register(Collector(source))
    assert asked == []


@pytest.fixture
def no_prometheus_client() -> Iterator[None]:
    hidden = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("prometheus_client")
    }
    sys.modules["prometheus_client"] = None  # type: ignore[assignment] # how Python marks a module as absent
    yield
    del sys.modules["prometheus_client"]
    sys.modules.update(hidden)


def test_without_prometheus_client_the_error_names_the_extra(no_prometheus_client: None) -> None:
    with pytest.raises(MissingExtra, match=r"tidegate\[prometheus\]"):
        Collector(list)
    assert render([full_snapshot()])
