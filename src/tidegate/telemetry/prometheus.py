"""Metrics for Prometheus: a text renderer, and a collector for applications that use `prometheus_client`.

The renderer caches the text before each number, so that 10,000 series take a few milliseconds and a scrape does not
delay decisions. It renders what `tidegate.telemetry.metrics` declares and does not know the limiter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from tidegate.errors import MissingExtra
from tidegate.telemetry.metrics import METRICS, HistogramValue, Key, Metric, Snapshot, merge, metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric as MetricFamily

__all__ = ["CONTENT_TYPE", "Collector", "Renderer", "render"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# The series of a top-K change over time: this bounds the cache of prepared text.
PREPARED_MAX: Final = 50_000


PRIVATE: Final = frozenset(entry.name for entry in METRICS if entry.is_private)

# What a reader of the page may take for the end of a line or of the page, or cannot decode. A line feed is not among
# them: the text format has an escape for it.
UNPRINTABLE: Final = re.compile(r"[\\\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _visible(value: str) -> str:
    """`value` without unprintable characters; a backslash is doubled, so that no two values become the same."""
    if UNPRINTABLE.search(value) is None:
        return value
    return UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], value)


def _escape(value: str) -> str:
    return _visible(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if len(names) != len(values):
        raise ValueError(f"expected values for the labels {tuple(names)}, got {tuple(values)}")
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class Renderer:
    """Renders snapshots in the text format of Prometheus, with a cache of prepared text."""

    def __init__(self) -> None:
        self._prepared: dict[Key, str] = {}
        """`name{labels} ` of every series rendered so far. A cache: it can be cleared at any time."""
        self._prepared_buckets: dict[Key, tuple[list[str], str, str]] = {}
        self._heads = {
            entry.name: f"# HELP {entry.full_name} {entry.help}\n# TYPE {entry.full_name} {entry.kind}\n"
            for entry in METRICS
        }

    def __call__(self, snapshots: Sequence[Snapshot], *, is_public: bool = False) -> bytes:
        """The merged metrics of all these nodes, as one page. `is_public`: without those that identify a caller."""
        merged = snapshots[0] if len(snapshots) == 1 else merge(snapshots)
        hidden = PRIVATE if is_public else ()
        metrics = [entry for entry in METRICS if entry.name not in hidden]
        if len(self._prepared) > PREPARED_MAX:
            self._prepared.clear()
        prepared = self._prepared
        lines: dict[str, list[str]] = {entry.name: [] for entry in metrics}
        for key, value in merged.values.items():
            if key[0] in hidden:
                continue
            prefix = prepared.get(key)
            if prefix is None:
                prefix = prepared[key] = self._prepare(key)
            lines[key[0]].append(f"{prefix}{value if type(value) is int else _number(value)}\n")
        for key, histogram in merged.histograms.items():
            lines[key[0]].extend(self._bucket_lines(key, histogram))
        for entry in metrics:
            if entry.series_max is not None and len(lines[entry.name]) > entry.series_max:
                lines[entry.name] = self._largest(entry, merged)
        # A metric without series still has its HELP line, so that it can be found.
        return "".join(self._heads[name] + "".join(series) for name, series in lines.items()).encode()

    @staticmethod
    def _prepare(key: Key) -> str:
        entry = metric(key[0])
        labels = _labels(entry.labels, key[1])
        return f"{entry.full_name}{{{labels}}} " if labels else f"{entry.full_name} "

    def _bucket_lines(self, key: Key, histogram: HistogramValue) -> Iterator[str]:
        prepared = self._prepared_buckets.get(key)
        if prepared is None or len(prepared[0]) != len(histogram.counts):
            entry = metric(key[0])
            labels = _labels(entry.labels, key[1])
            comma = "," if labels else ""
            uppers = [*(_number(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets = [f'{entry.full_name}_bucket{{{labels}{comma}le="{upper}"}} ' for upper in uppers]
            braces = f"{{{labels}}} " if labels else " "
            prepared = (buckets, f"{entry.full_name}_sum{braces}", f"{entry.full_name}_count{braces}")
            self._prepared_buckets[key] = prepared
        so_far = 0
        for bucket, count in zip(prepared[0], histogram.counts, strict=True):
            so_far += count
            yield f"{bucket}{so_far}\n"
        yield f"{prepared[1]}{_number(histogram.total)}\n"
        yield f"{prepared[2]}{so_far}\n"

    def _largest(self, entry: Metric, merged: Snapshot) -> list[str]:
        of_metric = [(value, key) for key, value in merged.values.items() if key[0] == entry.name]
        of_metric.sort(key=lambda item: (-item[0], item[1]))
        return [f"{self._prepare(key)}{_number(value)}\n" for value, key in of_metric[: entry.series_max]]


render: Final = Renderer()
"""`render(snapshots) -> bytes`: the page for `/metrics`, over one or several nodes."""


class Collector:
    """For a process that already exposes `prometheus_client` metrics:

        prometheus_client.REGISTRY.register(Collector(lambda: [collect(limiter)]))

    It is slower than `render`, because each sample becomes an object.
    """

    def __init__(self, source: Callable[[], Sequence[Snapshot]]) -> None:
        try:
            import prometheus_client.core  # noqa: F401 - fail now rather than at the first scrape
        except ModuleNotFoundError as error:
            raise MissingExtra("prometheus", "the prometheus_client collector") from error
        self._source = source

    def describe(self) -> Iterator[MetricFamily]:
        """Families without samples: the limiter may not have started when the collector is registered."""
        from prometheus_client.core import Metric as Family

        for entry in METRICS:
            yield Family(self._family_name(entry), entry.help, entry.kind)

    def collect(self) -> Iterator[MetricFamily]:
        """One family per metric."""
        from prometheus_client.core import Metric as Family

        merged = merge(self._source())
        families = {entry.name: Family(self._family_name(entry), entry.help, entry.kind) for entry in METRICS}
        for (name, values), value in merged.values.items():
            entry = metric(name)
            shown = dict(zip(entry.labels, map(_visible, values), strict=True))
            families[name].add_sample(entry.full_name, shown, value)
        for (name, values), histogram in merged.histograms.items():
            entry = metric(name)
            labels = dict(zip(entry.labels, values, strict=True))
            so_far = 0
            uppers = [*(_number(float(bound)) for bound in histogram.bounds), "+Inf"]
            for upper, count in zip(uppers, histogram.counts, strict=True):
                so_far += count
                families[name].add_sample(f"{entry.full_name}_bucket", {**labels, "le": upper}, so_far)
            families[name].add_sample(f"{entry.full_name}_sum", labels, histogram.total)
            families[name].add_sample(f"{entry.full_name}_count", labels, so_far)
        yield from families.values()

    @staticmethod
    def _family_name(entry: Metric) -> str:
        """prometheus_client adds `_total` to a counter's family by itself."""
        return entry.full_name.removesuffix("_total") if entry.kind == "counter" else entry.full_name
