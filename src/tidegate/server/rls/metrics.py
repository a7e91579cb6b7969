"""Converts the statistics of the rate limit service to the metrics that `tidegate.telemetry.metrics` declares."""

from __future__ import annotations

from heapq import nlargest
from operator import itemgetter
from typing import Final

from tidegate.server.http2.grpc import Status
from tidegate.server.rls.serve import RlsStatistics
from tidegate.server.rls.service import RuleStatistics
from tidegate.telemetry.metrics import Key, metric

STATUS_NAMES: Final = {status.value: status.name for status in Status}


def rls_values(statistics: RlsStatistics) -> dict[Key, float]:
    """The metrics for these statistics."""
    service, http2 = statistics.service, statistics.http2
    values: dict[Key, float] = {
        ("rls_requests_total", ("allowed",)): service.allowed,
        ("rls_requests_total", ("denied",)): service.denied,
        ("rls_shadow_verdicts_total", ("allowed",)): service.shadow_allowed,
        ("rls_shadow_verdicts_total", ("denied",)): service.shadow_denied,
        ("rls_descriptors_without_rule_total", ()): service.descriptors_without_rule,
        ("rls_reloads_total", ("ok",)): statistics.rules_reloads,
        ("rls_reloads_total", ("failed",)): statistics.rules_reloads_failed,
        ("rls_rules_faulty", ()): 0 if statistics.rules_error is None else 1,
    }
    series = [each for rule in service.rules for each in _series(rule)]
    shown = metric("rls_rule_decisions").series_max or 0
    # Only the largest leave this process: rules that count values apart have a thousand series each.
    values |= dict(nlargest(shown, series, key=itemgetter(1)))
    if http2 is not None:
        values["rls_connections", ()] = http2.connections
        values["rls_connections_ended_total", ("evicted",)] = http2.connections_evicted
        values["rls_connections_ended_total", ("protocol",)] = http2.connections_failed
        for path, statuses in http2.calls.items():
            method = path.rpartition("/")[2]
            for status, count in statuses.items():
                values["rls_calls_total", (method, STATUS_NAMES.get(status, str(status)))] = count
    return values


def _series(rule: RuleStatistics) -> list[tuple[Key, float]]:
    mode = "shadow" if rule.is_shadow else "enforced"
    # Counted apart or not, every decision is in one series of its rule.
    counts = rule.details or {"": (rule.allowed, rule.denied)}
    return [
        (("rls_rule_decisions", (rule.domain, rule.path, values, mode, outcome)), count)
        for values, pair in counts.items()
        for outcome, count in zip(("allowed", "denied"), pair, strict=True)
        if count
    ]
