"""All metrics of `METRICS` as OpenTelemetry instruments, for applications and servers that export with OpenTelemetry.

The instruments are asynchronous: an exporter asks for values in a thread of its own and gets the snapshot that `update`
was given last, so that it never reads what an event loop is changing. The metrics that name workspaces, identifiers and
rules are left out, because an exporter sends to another machine. A histogram becomes counters of its buckets, its count
and its sum, since OpenTelemetry has no asynchronous histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.errors import MissingExtra
from tidegate.telemetry.metrics import METRICS, HistogramValue, Metric, Snapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

__all__ = ["OtelMetrics", "otel_name"]


def otel_name(entry: Metric) -> str:
    """`tidegate.decisions` for `tidegate_decisions_total`: an export to Prometheus adds the ending again."""
    return entry.full_name.removesuffix("_total").replace("_", ".", 1)


class OtelMetrics:
    """Creates the instruments; call `update` from time to time.

    metrics = OtelMetrics()
    metrics.update(collect(limiter))
    """

    def __init__(self, meter: Meter | None = None) -> None:
        try:
            from opentelemetry import metrics
        except ModuleNotFoundError as error:
            raise MissingExtra("otel", "OpenTelemetry metrics") from error
        self._observation: Callable[[float, dict[str, str]], Any] = metrics.Observation
        self._values: dict[str, list[tuple[dict[str, str], float]]] = {}
        self._histograms: dict[str, list[tuple[dict[str, str], HistogramValue]]] = {}
        meter = meter or metrics.get_meter("tidegate")
        for entry in METRICS:
            if entry.series_max is not None:
                continue
            name, unit = otel_name(entry), "s" if entry.name.endswith("_seconds") else "1"
            if entry.kind == "histogram":
                for part, observe in (
                    ("bucket", self._observe_buckets),
                    ("count", self._observe_count),
                    ("sum", self._observe_sum),
                ):
                    meter.create_observable_counter(
                        f"{name}.{part}",
                        [partial(observe, entry)],
                        unit=unit if part == "sum" else "1",
                        description=entry.help,
                    )
            else:
                create = (
                    meter.create_observable_counter
                    if entry.kind == "counter"
                    else meter.create_observable_gauge
                )
                create(name, [partial(self._observe, entry)], unit=unit, description=entry.help)

    def update(self, snapshot: Snapshot) -> None:
        """The values to export from now on. Replaced as a whole: an exporter sees the old ones or the new ones."""
        labels = {entry.name: entry.labels for entry in METRICS}
        values: dict[str, list[tuple[dict[str, str], float]]] = {}
        for (name, given), value in snapshot.values.items():
            values.setdefault(name, []).append((dict(zip(labels[name], given, strict=True)), value))
        histograms: dict[str, list[tuple[dict[str, str], HistogramValue]]] = {}
        for (name, given), histogram in snapshot.histograms.items():
            histograms.setdefault(name, []).append((dict(zip(labels[name], given, strict=True)), histogram))
        self._values, self._histograms = values, histograms

    def _observe(self, entry: Metric, _options: object) -> Iterable[Any]:
        return [self._observation(value, labels) for labels, value in self._values.get(entry.name, ())]

    def _observe_buckets(self, entry: Metric, _options: object) -> Iterable[Any]:
        found = []
        for labels, histogram in self._histograms.get(entry.name, ()):
            so_far = 0
            bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
            for bound, count in zip(bounds, histogram.counts, strict=True):
                so_far += count
                found.append(self._observation(so_far, {**labels, "le": bound}))
        return found

    def _observe_count(self, entry: Metric, _options: object) -> Iterable[Any]:
        return [
            self._observation(sum(histogram.counts), labels)
            for labels, histogram in self._histograms.get(entry.name, ())
        ]

    def _observe_sum(self, entry: Metric, _options: object) -> Iterable[Any]:
        return [
            self._observation(histogram.total, labels)
            for labels, histogram in self._histograms.get(entry.name, ())
        ]
