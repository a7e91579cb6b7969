"""Alerts: the "when to worry" column of `METRICS` as expressions of Prometheus, with severity and runbook.

scripts/monitoring.py writes deploy/prometheus/alerts.yml, deploy/grafana/tidegate.json and the index of the runbooks
from this table and from `METRICS`. An alert names its metric, whose `worry` text describes it. Rules: an expression
uses only metrics and label values that `METRICS` declares; every alert has a page in docs/operations/runbooks. A metric
without an alert still has its panel: only an operator knows which values are normal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from tidegate.telemetry.metrics import metric

__all__ = ["ALERTS", "RUNBOOKS_URL", "Alert"]

RUNBOOKS_URL: Final = "https://tidegate.dev/docs/operations/runbooks/"

# One alert for each server, however many series a metric has.
BY: Final = "by (job, instance)"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `severity`: critical needs a person now, warning today, info when convenient."""

    name: str
    metric: str
    """The name in `METRICS`: its worry is the description."""
    expression: str
    """PromQL. `{m}` is the full name of the metric."""
    lasting: str
    """How long it must be true."""
    severity: Literal["critical", "warning", "info"]
    summary: str
    threshold: float | None = None
    """Drawn as a line in the panel of the metric."""

    @property
    def promql(self) -> str:
        """The expression with the name of its metric. Raises KeyError if there is no such metric."""
        return self.expression.replace("{m}", metric(self.metric).full_name)

    @property
    def page(self) -> str:
        """The name of its runbook, without `.md`: `breaker-open` for `TidegateBreakerOpen`."""
        words = re.findall("[A-Z][a-z0-9]*", self.name.removeprefix("Tidegate"))
        return "-".join(words).lower()

    @property
    def url(self) -> str:
        """The address of its runbook."""
        return RUNBOOKS_URL + self.page


def _rises(within: str, labels: str = "") -> str:
    return f"sum {BY} (increase({{m}}{labels}[{within}])) > 0"


def _rate_above(value: float, labels: str = "") -> str:
    return f"sum {BY} (rate({{m}}{labels}[5m])) > {value:g}"


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        "TidegateAbsent",
        "build_info",
        "absent({m})",
        "5m",
        "critical",
        "No Tidegate server is scraped",
    ),
    Alert(
        "TidegateServerErrors",
        "http_requests_total",
        _rate_above(0, '{status="500"}'),
        "5m",
        "critical",
        "The HTTP API fails",
    ),
    Alert(
        "TidegateRlsErrors",
        "rls_calls_total",
        _rate_above(0, '{status="INTERNAL"}'),
        "5m",
        "critical",
        "The rate limit service for gateways fails",
    ),
    Alert(
        "TidegateBreakerOpen",
        "breaker_state",
        "max by (job, instance, name) ({m}) == 2",
        "1m",
        "critical",
        "A node has lost its Redis or its database",
        threshold=2,
    ),
    Alert(
        "TidegateOriginErrors",
        "origin_errors_total",
        _rate_above(0),
        "10m",
        "warning",
        "Calls of Redis fail",
    ),
    Alert(
        "TidegateOriginSlow",
        "origin_latency_seconds",
        "histogram_quantile(0.99, sum by (job, instance, le) (rate({m}_bucket[5m]))) > 0.05",
        "10m",
        "warning",
        "Redis is slow: p99 above 50 ms",
        threshold=0.05,
    ),
    Alert(
        "TidegateOriginLostData",
        "origin_heals_total",
        _rises("10m"),
        "0m",
        "warning",
        "Redis has lost counts, and the nodes have merged them again",
    ),
    Alert(
        "TidegateReplayLag",
        "replay_lag_seconds",
        "max by (job, instance) ({m}) > 1",
        "1m",
        "warning",
        "Counts reach Redis late",
        threshold=1,
    ),
    Alert(
        "TidegateMemoryFull",
        "subjects_evicted_total",
        _rises("10m", '{reason=~"blocked|unreplayed"}'),
        "0m",
        "warning",
        "Memory is full, and counts that matter were dropped",
    ),
    Alert(
        "TidegateSubjectsAtBound",
        "subjects",
        f"sum {BY} ({{m}}) > 950000 * sum {BY} (tidegate_workers)",
        "10m",
        "warning",
        "A node holds nearly as many identifiers as it can",
        threshold=950_000,
    ),
    Alert(
        "TidegateDenialsJump",
        "decisions_total",
        'sum by (job) (rate({m}{outcome="denied"}[5m])) '
        '> 5 * sum by (job) (rate({m}{outcome="denied"}[1h] offset 1h)) '
        'and sum by (job) (rate({m}{outcome="denied"}[5m])) > 10',
        "5m",
        "warning",
        "Five times as many denials as an hour ago",
    ),
    Alert(
        "TidegateDecisionsWait",
        "decisions_total",
        'sum by (job) (rate({m}{source="origin"}[10m])) > 0.2 * sum by (job) (rate({m}[10m]))',
        "30m",
        "info",
        "More than a fifth of all decisions wait for Redis",
    ),
    Alert(
        "TidegateRecallsMissing",
        "credit_listening",
        "sum by (job, instance) ({m}) < sum by (job, instance) (max_over_time({m}[1h]))",
        "5m",
        "warning",
        "A node no longer receives recalls of credit",
    ),
    Alert(
        "TidegateCreditHeld",
        "credit_denied_held_total",
        _rate_above(0.1),
        "10m",
        "warning",
        "Requests are denied because another node keeps credit",
    ),
    Alert(
        "TidegateOriginFileNearlyFull",
        "origin_file_bytes",
        "max by (job, instance) ({m}) > 0.8 * 1073741824",
        "10m",
        "warning",
        "The SQLite file with counts is nearly full",
        threshold=0.8 * 1_073_741_824,
    ),
    Alert(
        "TidegatePublishErrors",
        "global_publish_errors_total",
        _rate_above(0),
        "10m",
        "warning",
        "A node cannot publish to the database",
    ),
    Alert(
        "TidegateImportErrors",
        "global_import_errors_total",
        _rate_above(0),
        "10m",
        "warning",
        "A node cannot import from the database",
    ),
    Alert(
        "TidegateImportsBehind",
        "global_import_rows_last",
        "min_over_time({m}[1m]) >= 50000",
        "1m",
        "warning",
        "Imports cannot keep up",
        threshold=50_000,
    ),
    Alert(
        "TidegateRowsRejected",
        "global_rows_set_aside_total",
        _rises("10m"),
        "0m",
        "warning",
        "The database rejects rows",
    ),
    Alert(
        "TidegateRowsUnreadable",
        "global_import_rows_unreadable_total",
        _rises("10m"),
        "0m",
        "warning",
        "Rows of the database cannot be read",
    ),
    Alert(
        "TidegateRegionLag",
        "global_lag_seconds",
        "max by (job, instance, region) ({m}) > 15 "
        "and on (job, instance) sum by (job, instance) (rate(tidegate_global_import_rows_total[5m])) > 0",
        "10m",
        "warning",
        "A region is seen late",
        threshold=15,
    ),
    Alert(
        "TidegateRegionMissing",
        "regions",
        "max by (job, instance) ({m}) < max by (job, instance) (max_over_time({m}[1d]))",
        "5m",
        "warning",
        "A region has disappeared",
    ),
    Alert(
        "TidegateClockOff",
        "clock_offset_seconds",
        "abs({m}) > 0.1",
        "5m",
        "warning",
        "The clock of a node is wrong",
        threshold=0.1,
    ),
    Alert(
        "TidegateLoopStalls",
        "loop_stall_seconds",
        f'sum {BY} (increase({{m}}_count[10m])) - sum {BY} (increase({{m}}_bucket{{le="0.005"}}[10m])) > 10',
        "10m",
        "warning",
        "The event loop of a node is blocked again and again",
        threshold=0.005,
    ),
    Alert(
        "TidegateKeyGuessing",
        "http_requests_total",
        _rate_above(10, '{status="401"}'),
        "5m",
        "warning",
        "Many requests with wrong keys",
    ),
    Alert(
        "TidegateConnectionsNearlyFull",
        "http_connections",
        f"sum {BY} ({{m}}) > 8000 * sum {BY} (tidegate_workers)",
        "5m",
        "warning",
        "Nearly all connections are in use",
        threshold=8_000,
    ),
    Alert(
        "TidegateConnectionsEvicted",
        "http_connections_evicted_total",
        _rate_above(0),
        "10m",
        "warning",
        "Idle connections are closed to make room for new ones",
    ),
    Alert(
        "TidegateRulesFaulty",
        "rls_rules_faulty",
        "max by (job, instance) ({m}) == 1",
        "5m",
        "warning",
        "The rules files have faults, and older rules apply",
        threshold=1,
    ),
    Alert(
        "TidegateRlsConnectionsEnded",
        "rls_connections_ended_total",
        _rate_above(0),
        "15m",
        "warning",
        "Connections of gateways are closed",
    ),
    Alert(
        "TidegateWorkersMissing",
        "workers",
        "sum by (job, instance) ({m}) < sum by (job, instance) (max_over_time({m}[1h]))",
        "5m",
        "warning",
        "A server has fewer workers than before",
    ),
    Alert(
        "TidegateDecisionLogDropped",
        "decision_log_records_total",
        _rises("10m", '{outcome="dropped"}'),
        "0m",
        "info",
        "The log of decisions has gaps",
    ),
    Alert(
        "TidegateMixedVersions",
        "build_info",
        "count by (job) (count by (job, version) ({m})) > 1",
        "1h",
        "info",
        "Several versions of Tidegate run",
    ),
    Alert(
        "TidegateInterpreted",
        "build_info",
        '{m}{compiled="false"} == 1',
        "10m",
        "info",
        "The core is not compiled",
    ),
)
