"""The metrics as data: name, kind, labels, help and when to worry; and the numbers of one node as a value.

Everything that shows metrics reads this table: the Prometheus text, the `prometheus_client` collector and
docs/reference/metrics.md, so that they cannot drift apart. Laws: a label's values are few and known, or the metric is
a bounded top-K (cardinality is an attack surface); counters and histograms of several nodes add up, a gauge says for
itself whether the sum or the worst of them is the truth.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, Literal, NamedTuple

from tidegate.runtime.latency import BOUNDS_S

__all__ = [
    "METRICS",
    "PREFIX",
    "HistogramValue",
    "Key",
    "Metric",
    "Snapshot",
    "merge",
    "metric",
]

PREFIX: Final = "tidegate_"

Key = tuple[str, tuple[str, ...]]
"""A series: the metric's name without the prefix, and the values of its labels in the metric's order."""


class HistogramValue(NamedTuple):
    """A histogram at one moment. `counts` are per bucket, not cumulative; the last one is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric and what people should know of it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    worry: str
    """When to worry, for the reference page."""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    """For each label its possible values, where they are known: such series exist from the start, with 0."""
    across: Literal["sum", "max"] = "sum"
    """What several nodes of one machine make of it together."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: upper bounds of its buckets, in seconds."""
    series_max: int | None = None
    """Of a top-K: only that many of the largest series are shown."""

    @property
    def full_name(self) -> str:
        """The name as Prometheus sees it."""
        return PREFIX + self.name

    def known_series(self) -> Iterable[tuple[str, ...]]:
        """The label values that exist from the start."""
        return product(*self.values) if len(self.values) == len(self.labels) else ()


OPS: Final = ("cold", "stale", "strict", "replay")

METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        "decisions_total",
        "counter",
        "Decisions made, by outcome and by whether an origin read came first.",
        "source=origin is more than a few percent for long: subjects are asked for so rarely that memory is cold. "
        "A jump of outcome=denied is an attack, a client in a loop, or a limit set too low.",
        ("outcome", "source"),
        (("allowed", "denied"), ("local", "origin")),
    ),
    Metric(
        "subjects",
        "gauge",
        "Subjects held in memory.",
        "It stays at the bound (1,000,000 a node): somebody sprays identifiers, or the node is too small.",
    ),
    Metric(
        "cells",
        "gauge",
        "Cells held in memory.",
        "It grows while subjects do not: aged-out cells are not dropped. Report it as a fault.",
    ),
    Metric(
        "cells_created_total",
        "counter",
        "Cells created, by what made them known.",
        "by=import far above by=traffic: this node carries cells that only other regions use; harmless, costs memory.",
        ("by",),
        (("traffic", "import"),),
    ),
    Metric(
        "subjects_evicted_total",
        "counter",
        "Subjects dropped from memory before they aged out, by reason.",
        "It rises: the bound on subjects is reached. reason=lru loses nothing: the origin is read again. "
        "reason=blocked and reason=unreplayed mean that memory is too small for the attack.",
        ("reason",),
        (("lru", "blocked", "unreplayed"),),
    ),
    Metric(
        "strict_activations_total",
        "counter",
        "Denials that put a subject in strict mode for one duration.",
        "Its rate follows denials. Many with few identifiers blocked: several nodes deny the same busy subject.",
    ),
    Metric(
        "origin_operations_total",
        "counter",
        "Round trips to the origin, by cause.",
        "op=cold or op=stale near the rate of decisions: the hot path is not local for this traffic.",
        ("op",),
        (OPS,),
    ),
    Metric(
        "origin_errors_total",
        "counter",
        "Origin operations that failed, by cause and reason. Decisions went on from memory.",
        "Any steady rate. timeout: the origin is slow or far away. circuit_open: it has failed for a while.",
        ("op", "reason"),
        (OPS, ("timeout", "circuit_open", "other")),
    ),
    Metric(
        "origin_latency_seconds",
        "histogram",
        "Duration of origin operations that succeeded, by cause.",
        "p99 above 50 ms: nodes of the region see each other late. Above 300 ms reads are given up.",
        ("op",),
        (OPS,),
        bounds=BOUNDS_S,
    ),
    Metric(
        "origin_dirty_cells",
        "gauge",
        "Subjects with cells whose counts the origin has not acknowledged yet.",
        "It grows without falling back: replay cannot keep up or the origin is gone. Nothing is lost meanwhile.",
    ),
    Metric(
        "replay_lag_seconds",
        "gauge",
        "Age of the oldest count that the origin has not acknowledged.",
        "Above 1 s: nodes of this region over-admit by what they accept in that time.",
        across="max",
    ),
    Metric(
        "origin_heals_total",
        "counter",
        "Cells merged again because the origin held less than it had acknowledged.",
        "It rises: the origin was wiped, restarted without persistence, or failed over to an older copy.",
    ),
    Metric(
        "global_publish_rows_total",
        "counter",
        "Rows published to the ledger.",
        "It stands still while identifiers are near their limits and regions is above 1: other regions are blind.",
    ),
    Metric(
        "global_publish_errors_total",
        "counter",
        "Publish turns that failed.",
        "Any steady rate: the ledger is down, overloaded, or refuses rows. Publishing resumes by itself.",
    ),
    Metric(
        "global_import_rows_total",
        "counter",
        "Rows imported from the ledger.",
        "It stands still while other regions publish: see global_lag_seconds.",
    ),
    Metric(
        "global_import_errors_total",
        "counter",
        "Import turns that failed.",
        "Any steady rate: this region sees the others late. Foreign counts that are known stay in force.",
    ),
    Metric(
        "global_import_rows_last",
        "gauge",
        "Rows in the last import.",
        "It is 50,000 again and again: one answer is not enough, imports run behind.",
        across="max",
    ),
    Metric(
        "global_lag_seconds",
        "gauge",
        "How old the newest row of a region was when it was imported; this region's own rows come back too.",
        "Above 15 s for a region that has traffic: it does not publish, or the ledger's replica is behind.",
        ("region",),
        across="max",
    ),
    Metric(
        "regions",
        "gauge",
        "Regions with a live heartbeat in the ledger, this one included; 0 without a ledger.",
        "Not the number of regions that you run: a region is cut off, or two carry one name.",
        across="max",
    ),
    Metric(
        "breaker_state",
        "gauge",
        "State of a circuit breaker: 0 closed, 1 half open, 2 open.",
        "2 for more than a minute: that dependency is down for this node.",
        ("name",),
        across="max",
    ),
    Metric(
        "loop_stall_seconds",
        "histogram",
        "How late a timer of the event loop fired: how long somebody held the loop.",
        "More than a few observations above 5 ms: decisions wait behind background work, or the machine is too busy.",
        bounds=BOUNDS_S,
    ),
    # What an operator of the server asks next.
    Metric(
        "global_rows_set_aside_total",
        "counter",
        "Rows that the ledger refused and that were set aside, to be tried again later.",
        "It rises: the database refuses what others accept. Its log and ours name the reason; all other rows go out.",
    ),
    Metric(
        "clock_offset_seconds",
        "gauge",
        "This node's clock minus the origin's, as far as half a round trip can tell.",
        "Beyond 0.1 s either way: fix NTP. Counts are misplaced by that much, never doubled.",
        across="max",
    ),
    Metric(
        "http_requests_total",
        "counter",
        "HTTP requests answered, by operation and status.",
        "status=500 at any rate; status=401 at a high rate is somebody trying keys.",
        ("operation", "status"),
    ),
    Metric(
        "http_connections",
        "gauge",
        "Open HTTP connections.",
        "Near http.connections_max times the workers: new clients wait.",
    ),
    Metric(
        "top_workspace_decisions",
        "gauge",
        "Decisions of the busiest workspaces since the start: never too low, too high by at most 1 % of all.",
        "One workspace has nearly all of it: consider an API quota for it.",
        ("workspace",),
        series_max=20,
    ),
    Metric(
        "top_identifier_denials",
        "gauge",
        "Denials of the most denied identifiers since the start: too high by at most 1 % of all; in a flood by sample.",
        "The first place to look when outcome=denied jumps. Identifiers are shown as they are: guard /metrics.",
        ("workspace", "namespace", "identifier"),
        series_max=20,
    ),
    Metric(
        "workers",
        "gauge",
        "Processes whose numbers are in this answer.",
        "Less than the workers that you configured: one is starting again, or hangs.",
    ),
    Metric(
        "build_info",
        "gauge",
        "Always 1; the labels tell the version of Tidegate and of Python, and whether the core is compiled.",
        "Several versions in one fleet for longer than a rollout; compiled=false in production.",
        ("version", "python", "compiled"),
        across="max",
    ),
)

_BY_NAME: Final = {entry.name: entry for entry in METRICS}


def metric(name: str) -> Metric:
    """The metric of that name (without prefix). KeyError: declare it in METRICS first."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All numbers of one node at one moment."""

    node: str
    values: Mapping[Key, float]
    histograms: Mapping[Key, HistogramValue] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """For another process of the same version; `from_json` reads it."""
        document = {
            "node": self.node,
            "values": [[name, labels, value] for (name, labels), value in self.values.items()],
            "histograms": [[name, labels, *value] for (name, labels), value in self.histograms.items()],
        }
        # ASCII, so that a label with a lone surrogate survives the way.
        return json.dumps(document, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Snapshot:
        """What `to_json` wrote. ValueError if it is not that."""
        try:
            document: Any = json.loads(data)
            values = {(str(name), tuple(labels)): value for name, labels, value in document["values"]}
            histograms = {
                (str(name), tuple(labels)): HistogramValue(tuple(bounds), tuple(counts), total)
                for name, labels, bounds, counts, total in document["histograms"]
            }
            return cls(str(document["node"]), values, histograms)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a snapshot: {error!r}") from error


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The numbers of several nodes as one: sums, or the worst, as each metric says."""
    if not snapshots:
        return Snapshot("", {})
    values = dict(snapshots[0].values)
    histograms = dict(snapshots[0].histograms)
    worst = {entry.name for entry in METRICS if entry.across == "max"}
    for snapshot in snapshots[1:]:
        for key, value in snapshot.values.items():
            held = values.get(key)
            if held is None:
                values[key] = value
            elif key[0] not in worst:
                values[key] = held + value
            # An offset may be negative: the worst is the one furthest from zero.
            elif abs(value) > abs(held):
                values[key] = value
        for key, histogram in snapshot.histograms.items():
            other = histograms.get(key)
            histograms[key] = histogram if other is None else _add(other, histogram)
    return Snapshot("+".join(snapshot.node for snapshot in snapshots), values, histograms)


def _add(one: HistogramValue, other: HistogramValue) -> HistogramValue:
    if one.bounds != other.bounds:
        raise ValueError(
            f"histograms with different buckets cannot be added: {one.bounds} and {other.bounds}"
        )
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return HistogramValue(one.bounds, counts, one.total + other.total)
