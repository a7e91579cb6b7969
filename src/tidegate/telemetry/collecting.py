"""Converts the `statistics()` of a limiter to the metrics that `tidegate.telemetry.metrics` declares.

The runtime only counts and knows no metrics. Every series with known labels exists from the start, with 0, so that a
rate includes the first event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidegate.telemetry.metrics import METRICS, HistogramValue, Key, Snapshot

if TYPE_CHECKING:
    from tidegate.runtime.latency import HistogramSnapshot
    from tidegate.runtime.statistics import Statistics

__all__ = ["HasStatistics", "collect", "snapshot_of"]


class HasStatistics(Protocol):
    """A `Limiter` or an `AsyncLimiter`."""

    def statistics(self) -> Statistics: ...


def collect(limiter: HasStatistics) -> Snapshot:
    """The current metrics of a limiter."""
    return snapshot_of(limiter.statistics())


def snapshot_of(statistics: Statistics) -> Snapshot:
    """The metrics for these statistics."""
    values: dict[Key, float] = {
        (entry.name, labels): 0
        for entry in METRICS
        if entry.kind == "counter"
        for labels in entry.known_series()
    }
    values |= _decisions(statistics)
    values |= {
        ("shadow_exceeded_total", ()): statistics.exceeded_in_shadow,
        ("resets_total", ("request",)): statistics.resets_made,
        ("resets_total", ("node",)): statistics.resets_received,
        ("subjects", ()): statistics.subjects,
        ("subjects_bytes", ()): statistics.subjects_bytes,
        ("cells", ()): statistics.cells,
        ("cells_created_total", ("traffic",)): statistics.cells_created_by_traffic,
        ("cells_created_total", ("import",)): statistics.cells_created_by_import,
        ("strict_activations_total", ()): statistics.strict_activations,
        ("origin_dirty_subjects", ()): statistics.origin_dirty_subjects,
        ("replay_lag_seconds", ()): statistics.replay_lag_s,
        ("origin_heals_total", ()): statistics.origin_heals,
        ("credit_messages_total", ()): statistics.credit_messages,
        ("credit_waits_total", ()): statistics.credit_waits,
        ("credit_denied_held_total", ()): statistics.credit_denied_held,
        ("credit_recalls_received_total", ()): statistics.credit_recalls,
        ("credit_releases_total", ()): statistics.credit_releases,
        ("credit_subjects", ()): statistics.credit_subjects,
        ("credit_listening", ()): int(statistics.credit_is_listening),
        ("global_publish_rows_total", ()): statistics.publish_rows,
        ("global_publish_errors_total", ()): statistics.publish_errors,
        ("global_rows_set_aside_total", ()): statistics.rows_set_aside,
        ("global_import_rows_total", ()): statistics.import_rows,
        ("global_import_errors_total", ()): statistics.import_errors,
        ("global_import_rows_last", ()): statistics.import_rows_last,
        ("global_import_rows_unreadable_total", ()): statistics.import_rows_unreadable,
        ("regions", ()): statistics.regions,
        ("importer", ()): int(statistics.is_importer),
        ("importer_seconds", ()): statistics.importer_for_s,
        ("import_age_seconds", ()): statistics.import_age_s or 0.0,
    }
    for reason, count in statistics.subjects_evicted.items():
        values["subjects_evicted_total", (reason,)] = count
    for operation, count in statistics.origin_operations.items():
        values["origin_operations_total", (operation,)] = count
    for (operation, reason), count in statistics.origin_errors.items():
        values["origin_errors_total", (operation, reason)] = count
    for region, lag_ms in statistics.global_lag_ms.items():
        values["global_lag_seconds", (region,)] = lag_ms / 1000
    for name, state in statistics.breaker_states.items():
        values["breaker_state", (name,)] = state
    if statistics.clock_offset_ms is not None:
        # The statistics say how far the origin is ahead of this node; the metric says how far this node is ahead.
        values["clock_offset_seconds", ()] = -statistics.clock_offset_ms / 1000
    histograms: dict[Key, HistogramValue] = {
        ("origin_latency_seconds", (operation,)): _histogram(histogram)
        for operation, histogram in statistics.origin_latency.items()
    }
    if statistics.credit_wait is not None:
        histograms["credit_wait_seconds", ()] = _histogram(statistics.credit_wait)
    if statistics.loop_stall is not None:
        histograms["loop_stall_seconds", ()] = _histogram(statistics.loop_stall)
    return Snapshot(statistics.node_id, values, histograms)


def _decisions(statistics: Statistics) -> dict[Key, float]:
    denied_from_origin = statistics.denied_from_origin
    allowed_from_origin = statistics.from_origin - denied_from_origin
    return {
        ("decisions_total", ("allowed", "local")): statistics.allowed - allowed_from_origin,
        ("decisions_total", ("allowed", "origin")): allowed_from_origin,
        ("decisions_total", ("denied", "local")): statistics.denied - denied_from_origin,
        ("decisions_total", ("denied", "origin")): denied_from_origin,
    }


def _histogram(histogram: HistogramSnapshot) -> HistogramValue:
    return HistogramValue(histogram.bounds_s, histogram.counts, histogram.sum_s)
