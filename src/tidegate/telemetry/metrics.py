"""The table of all metrics (name, kind, labels, help, when to worry), and the values of one node.

The Prometheus text, the `prometheus_client` collector and docs/reference/metrics.md all use this table. Rules: the
values of a label are few and known, or the metric is a bounded top-K, because callers could create any number of
series; counters and histograms of several nodes are added, and each gauge declares whether to add or take the worst.
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
"""A series: the name of the metric without the prefix, and its label values in order."""


class HistogramValue(NamedTuple):
    """The values of a histogram. `counts` are per bucket, not cumulative; the last is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric and its documentation."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    worry: str
    """When to worry, for the reference page."""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    """The possible values of each label, if known: these series exist from the start, with 0."""
    across: Literal["sum", "max"] = "sum"
    """How the values of several nodes are merged."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram, in seconds."""
    series_max: int | None = None
    """For a top-K: how many of the largest series are shown."""
    is_private: bool = False
    """Its labels identify callers: shown only to those who send the token of `metrics_token`."""

    @property
    def full_name(self) -> str:
        """The name with the prefix."""
        return PREFIX + self.name

    def known_series(self) -> Iterable[tuple[str, ...]]:
        """The label values that exist from the start."""
        return product(*self.values) if len(self.values) == len(self.labels) else ()


OPS: Final = ("exchange", "cold", "stale", "strict", "replay")

METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        "decisions_total",
        "counter",
        "Decisions made, by outcome and by whether they waited for the origin.",
        "source=origin stays above a few percent: subjects are used so rarely that memory is cold. "
        "A jump of outcome=denied is an attack, a client in a loop, or a quota that is too low.",
        ("outcome", "source"),
        (("allowed", "denied"), ("local", "origin")),
    ),
    Metric(
        "shadow_exceeded_total",
        "counter",
        "Requests that limits and overrides in shadow mode would have denied; they were allowed.",
        "It is higher than expected: the limit would deny good clients if it were enforced.",
    ),
    Metric(
        "resets_total",
        "counter",
        "Counters that this node has reset: by=request asked of this node, by=node received from another node.",
        "by=request is what people and programs have asked for: a jump means that a client resets its own limits. "
        "A node whose sum stays behind that of the others does not receive resets.",
        ("by",),
        (("request", "node"),),
    ),
    Metric(
        "subjects",
        "gauge",
        "Subjects held in memory.",
        "It stays at the bound (1,000,000 per node): an attack with many identifiers, or the node is too small.",
    ),
    Metric(
        "subjects_bytes",
        "gauge",
        "Memory of the subjects, by estimate.",
        "It stays at memory_bytes_max (1 GiB) of each worker: an attack with long identifiers, or too little memory.",
    ),
    Metric(
        "cells",
        "gauge",
        "Cells held in memory.",
        "It grows while subjects do not: aged-out cells are not dropped. This is a bug: report it.",
    ),
    Metric(
        "cells_created_total",
        "counter",
        "Cells created, by cause.",
        "by=import far above by=traffic: this node holds cells that only other regions use; harmless, costs memory.",
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
        "It rises with denials. Many for few identifiers: several nodes deny the same busy subject.",
    ),
    Metric(
        "origin_operations_total",
        "counter",
        "Round trips to the origin, by cause. With credit, which is the default, all are op=exchange.",
        "op=exchange near the rate of decisions: each subject is used rarely, or is near its limit.",
        ("op",),
        (OPS,),
    ),
    Metric(
        "origin_errors_total",
        "counter",
        "Origin operations that failed, by cause and reason. Decisions continued from memory.",
        "Any steady rate. timeout: the origin is slow or far away. circuit_open: it has failed for a while.",
        ("op", "reason"),
        (OPS, ("timeout", "circuit_open", "other")),
    ),
    Metric(
        "origin_latency_seconds",
        "histogram",
        "Duration of origin operations that succeeded, by cause.",
        "p99 above 50 ms: requests near their limit wait as long. Above 300 ms they are decided from memory.",
        ("op",),
        (OPS,),
        bounds=BOUNDS_S,
    ),
    Metric(
        "origin_dirty_subjects",
        "gauge",
        "Subjects with cells whose counts the origin has not acknowledged yet.",
        "It keeps growing: replay cannot keep up, or the origin is down. No count is lost.",
    ),
    Metric(
        "replay_lag_seconds",
        "gauge",
        "Age of the oldest count that the origin has not acknowledged.",
        "Above 1 s: a crash of this node would lose what it accepted in that time.",
        across="max",
    ),
    Metric(
        "origin_heals_total",
        "counter",
        "Cells merged again because the origin held less than it had acknowledged.",
        "It rises: the origin was wiped, restarted without persistence, or failed over to an older copy.",
    ),
    Metric(
        "credit_messages_total",
        "counter",
        "Messages to the origin that ask for credit or report counts, one for each subject.",
        "Near the rate of allowed requests: each subject is used rarely, or is near its limit.",
    ),
    Metric(
        "credit_waits_total",
        "counter",
        "Requests and batches that waited for an answer of the origin: for credit or, with cost 0, for counts.",
        "Most decisions wait: subjects are used rarely, are near their limit, or recalls do not arrive "
        "(credit_listening).",
    ),
    Metric(
        "credit_wait_seconds",
        "histogram",
        "How long requests and batches waited for an answer of the origin.",
        "p99 above a few round trips: other nodes give credit back slowly, or the origin is overloaded.",
        bounds=BOUNDS_S,
    ),
    Metric(
        "credit_denied_held_total",
        "counter",
        "Requests and batches denied because other nodes held credit for what was left of the limit.",
        "A steady rate: a node crashed with credit a few seconds ago, hangs, or does not receive recalls.",
    ),
    Metric(
        "credit_recalls_received_total",
        "counter",
        "Times that the origin asked this node for credit which it does not need at once.",
        "A high rate is usual for subjects at their limit that many nodes share.",
    ),
    Metric(
        "credit_releases_total",
        "counter",
        "Messages that only gave credit back, for subjects that this node had dropped from memory.",
        "It rises with subjects_evicted_total: memory is too small for the subjects in use.",
    ),
    Metric(
        "credit_subjects",
        "gauge",
        "Subjects that may hold credit.",
        "About the subjects used in the last seconds.",
    ),
    Metric(
        "credit_listening",
        "gauge",
        "Processes that recalls reach.",
        "Fewer than there are workers: those without a connection to the channel of recalls ask for no credit in "
        "advance, so that more requests wait.",
    ),
    Metric(
        "global_publish_rows_total",
        "counter",
        "Rows published to the ledger.",
        "It does not rise while identifiers are near their quota: other regions do not see them.",
    ),
    Metric(
        "global_publish_errors_total",
        "counter",
        "Publishes that the ledger did not answer; rejected rows are in global_rows_set_aside_total.",
        "Any steady rate: the ledger is down or overloaded. Publishing resumes by itself.",
    ),
    Metric(
        "global_import_rows_total",
        "counter",
        "Rows imported from the ledger.",
        "It does not rise while other regions publish: see global_lag_seconds.",
    ),
    Metric(
        "global_import_errors_total",
        "counter",
        "Imports that the ledger did not answer; heartbeats are not counted.",
        "Any steady rate: this region sees the others late. Foreign counts that were imported stay in use.",
    ),
    Metric(
        "global_import_rows_last",
        "gauge",
        "Rows in the last import.",
        "It stays at 50,000 or more: imports cannot keep up.",
        across="max",
    ),
    Metric(
        "global_import_rows_unreadable_total",
        "counter",
        "Rows of the ledger that an import skipped: a name is not UTF-8, or a number not one of a window.",
        "It rises: something other than Tidegate writes to its tables. All other rows are imported.",
    ),
    Metric(
        "global_lag_seconds",
        "gauge",
        "Age of the newest row of a region when it was imported, including this region.",
        "Above 15 s for a region with traffic: it does not publish, or the replica of the ledger lags.",
        ("region",),
        across="max",
    ),
    Metric(
        "regions",
        "gauge",
        "Regions with a recent heartbeat in the ledger, including this one; 0 without a ledger.",
        "It differs from the number of your regions: a region is disconnected, or two have the same name.",
        across="max",
    ),
    Metric(
        "importer",
        "gauge",
        "1 on the node that imports for its region; 0 on the others, and while every node imports for itself.",
        "The sum over a region is not 1 for more than a few seconds: its Redis or the database does not answer.",
    ),
    Metric(
        "importer_seconds",
        "gauge",
        "For how long the region's importer has been the same node; 0 while every node imports for itself.",
        "It starts again and again: the importer loses its connection to the database, or its event loop stalls.",
        across="max",
    ),
    Metric(
        "import_age_seconds",
        "gauge",
        "Age of the region's last complete import.",
        "Above 3 s: the region does not see the others, see global_import_errors_total.",
        across="max",
    ),
    Metric(
        "breaker_state",
        "gauge",
        "State of a circuit breaker: 0 closed, 1 half open, 2 open.",
        "2 for more than a minute: this dependency is down for this node.",
        ("name",),
        across="max",
    ),
    Metric(
        "loop_stall_seconds",
        "histogram",
        "Delay of a timer of the event loop: how long the loop was blocked.",
        "More than a few observations above 5 ms: decisions wait behind background work, or the machine is too busy.",
        bounds=BOUNDS_S,
    ),
    # Metrics of the server process.
    Metric(
        "global_rows_set_aside_total",
        "counter",
        "Rows that the ledger rejected, set aside for a later retry.",
        "It rises: the database rejects rows. Its log and ours name the reason; all other rows are published.",
    ),
    Metric(
        "clock_offset_seconds",
        "gauge",
        "The clock of this node minus that of the origin, accurate to half a round trip.",
        "Beyond 0.1 s in either direction: fix NTP. Some counts go to the wrong window, never to two.",
        across="max",
    ),
    Metric(
        "origin_file_bytes",
        "gauge",
        "Size of the SQLite file with counts and of its log; without Redis only.",
        "Near origin_bytes_max: counts that do not fit stay in memory, and are lost if the node crashes.",
        across="max",
    ),
    Metric(
        "http_requests_total",
        "counter",
        "HTTP requests answered, by operation and status.",
        "status=500 at any rate. status=401 at a high rate: a client may be guessing keys.",
        ("operation", "status"),
    ),
    Metric(
        "http_connections",
        "gauge",
        "Open HTTP connections.",
        "Near http.connections_max times the number of workers: idle connections are closed for new ones.",
    ),
    Metric(
        "http_connections_evicted_total",
        "counter",
        "Idle HTTP connections that were closed because a new one needed the place.",
        "It rises: too many clients for http.connections_max, or an attack that holds connections.",
    ),
    Metric(
        "rls_requests_total",
        "counter",
        "Requests decided by the rules for gateways (ShouldRateLimit and /v1/check), by outcome.",
        "outcome=denied jumps: an attack, a client in a loop, or a rule that is too strict.",
        ("outcome",),
        (("allowed", "denied"),),
    ),
    Metric(
        "rls_shadow_verdicts_total",
        "counter",
        "What rules in shadow mode would have decided.",
        "verdict=denied is higher than expected: the rule would deny good clients if it were enforced.",
        ("verdict",),
        (("allowed", "denied"),),
    ),
    Metric(
        "rls_descriptors_without_rule_total",
        "counter",
        "Descriptors to which no rule applied: they are allowed and not counted.",
        "It rises at the rate of requests: domain or keys of the gateway and of the rules differ.",
    ),
    Metric(
        "rls_rule_decisions",
        "gauge",
        "Decisions of the busiest rules since the start; values are those that detailed_metric and value_to_metric "
        "count apart.",
        "One rule denies nearly all of its requests. Shown only with the token of metrics_token.",
        ("domain", "rule", "values", "mode", "outcome"),
        series_max=200,
        is_private=True,
    ),
    Metric(
        "rls_calls_total",
        "counter",
        "gRPC calls answered, by method and status.",
        "status=INVALID_ARGUMENT: a gateway sends malformed requests. status=INTERNAL at any rate: see the log.",
        ("method", "status"),
    ),
    Metric(
        "rls_reloads_total",
        "counter",
        "Changed rules files, by whether they were loaded.",
        "outcome=failed rises: new files have faults, and the rules before them still apply. The log has the reason.",
        ("outcome",),
        (("ok", "failed"),),
    ),
    Metric(
        "rls_rules_faulty",
        "gauge",
        "1 while the rules files have faults and older rules apply.",
        "1 for longer than it takes to correct a file: a restart would fail.",
        across="max",
    ),
    Metric(
        "rls_connections",
        "gauge",
        "Open connections of the rate limit service.",
        "Near 1,024 times the number of workers: idle connections are closed for new ones.",
    ),
    Metric(
        "rls_connections_ended_total",
        "counter",
        "Connections of the rate limit service that were closed for a new one, or because the client violated "
        "HTTP/2.",
        "Any steady rate: too many connections, a client without HTTP/2, or an attack.",
        ("reason",),
        (("evicted", "protocol"),),
    ),
    Metric(
        "decision_log_records_total",
        "counter",
        "Records of the log of decisions, by whether they were written. No log: both stay 0.",
        "outcome=dropped rises: the disk is full or slow, or there are more decisions than the log can take. Decisions "
        "are not delayed; lower decisions.sample.",
        ("outcome",),
        (("written", "dropped"),),
    ),
    Metric(
        "top_workspace_decisions",
        "gauge",
        "Decisions of the busiest workspaces since the start, counted exactly.",
        "One workspace has nearly all of them: consider an API quota for it. Shown only with the token of "
        "metrics_token.",
        ("workspace",),
        series_max=20,
        is_private=True,
    ),
    Metric(
        "top_identifier_denials",
        "gauge",
        "Denials of the most denied identifiers since the start; too high by at most 1 % of all denials, and estimated "
        "from a sample while there are more than 1,000 a second.",
        "Look here first when outcome=denied jumps. Shown only with the token of metrics_token.",
        ("workspace", "namespace", "identifier"),
        series_max=20,
        is_private=True,
    ),
    Metric(
        "workers",
        "gauge",
        "Worker processes included in this page.",
        "Less than the configured number of workers: one is restarting, or hangs.",
    ),
    Metric(
        "build_info",
        "gauge",
        "Always 1; the labels are the versions of Tidegate and Python, and whether the core is compiled.",
        "Several versions in one fleet for longer than a rollout; compiled=false in production.",
        ("version", "python", "compiled"),
        across="max",
    ),
)

_BY_NAME: Final = {entry.name: entry for entry in METRICS}


def metric(name: str) -> Metric:
    """The metric with this name (without prefix). Raises KeyError if METRICS does not declare it."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All values of one node at one time."""

    node: str
    values: Mapping[Key, float]
    histograms: Mapping[Key, HistogramValue] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Encode it for another process of the same version."""
        document = {
            "node": self.node,
            "values": [[name, labels, value] for (name, labels), value in self.values.items()],
            "histograms": [[name, labels, *value] for (name, labels), value in self.histograms.items()],
        }
        # ASCII, so that a label with a lone surrogate can be encoded.
        return json.dumps(document, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Snapshot:
        """Decode what `to_json` wrote. Raises ValueError for anything else."""
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
    """The values of several nodes merged: added, or the worst, as each metric declares."""
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
