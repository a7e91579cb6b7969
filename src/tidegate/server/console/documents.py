"""From the reports of all workers to what the page and `tidegate top` show: rates, percentiles, merged lists. Pure.

Counters of a worker are compared with those of the same worker in the report before; one that has just started, or was
replaced, has no rate yet. Nothing is labelled by what is not in the reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from tidegate import __version__
from tidegate.server.api.activity import percentile

Report = Mapping[str, Any]

ROWS_MAX: Final = 25
# A region is shown as silent when its last heartbeat is older than this: three heartbeats, as for the node itself.
SILENT_MS: Final = 15_000
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
BREAKERS: Final = ("closed", "half open", "open")


def document(before: Mapping[str, Report], reports: Sequence[Report], at_ms: int) -> dict[str, Any]:
    """What to show now. `before`: earlier reports by node."""
    known = [(before[report["node"]], report) for report in reports if report["node"] in before]
    return {
        "at_ms": at_ms,
        "version": __version__,
        "region": next((report["region"] for report in reports), None),
        "workers": len(reports),
        "rates": {
            "allowed": sum(_rate(old, new, "allowed") for old, new in known),
            "denied": sum(_rate(old, new, "denied") for old, new in known),
            "sources": {
                name: sum(_rate_in(old, new, "sources", name) for old, new in known)
                for name in ("local", "origin", "degraded")
            },
        },
        "totals": _totals(reports, "allowed", "denied"),
        "latency_s": _percentiles(_latency_growth(known)),
        "origin_latency_s": _bounded_percentiles(known),
        "memory": {
            **_totals(reports, "subjects", "subjects_max", "cells", "evicted"),
            "rss_bytes": sum(report["rss_bytes"] or 0 for report in reports) or None,
        },
        "connections": sum(report["connections"] for report in reports),
        "namespaces": _namespaces(before, reports),
        "hot": _merge_rates(reports, "hot"),
        "denied_most": _merge_rates(reports, "denied_most"),
        "denials": _merge_denials(report["denials"] for report in reports),
        "regions": _regions(reports),
        "dependencies": _dependencies(reports),
        "breakers": _breakers(reports),
        "nodes": [_node(before.get(report["node"]), report) for report in reports],
    }


def point(shown: Mapping[str, Any]) -> list[float | None]:
    """One point of the charts: time, allowed, denied, from the origin, degraded, p50 and p99 in milliseconds."""
    rates, latency = shown["rates"], shown["latency_s"]
    return [
        shown["at_ms"],
        round(rates["allowed"], 2),
        round(rates["denied"], 2),
        round(rates["sources"]["origin"], 2),
        round(rates["sources"]["degraded"], 2),
        None if latency["p50"] is None else round(latency["p50"] * 1000, 4),
        None if latency["p99"] is None else round(latency["p99"] * 1000, 4),
    ]


def _totals(reports: Sequence[Report], *names: str) -> dict[str, int]:
    return {name: sum(report[name] for report in reports) for name in names}


def _over_s(old: Report, new: Report) -> float:
    over_s: float = new["uptime_s"] - old["uptime_s"]
    return max(over_s, 0.001)


def _rate(old: Report, new: Report, name: str) -> float:
    growth: float = new[name] - old[name]
    return max(0.0, growth / _over_s(old, new))


def _rate_in(old: Report, new: Report, group: str, name: str) -> float:
    growth: float = new[group][name] - old[group][name]
    return max(0.0, growth / _over_s(old, new))


def _latency_growth(known: Iterable[tuple[Report, Report]]) -> dict[int, int]:
    growth: dict[int, int] = {}
    for old, new in known:
        for bucket, count in new["latency"].items():
            more = count - old["latency"].get(bucket, 0)
            if more > 0:
                growth[int(bucket)] = growth.get(int(bucket), 0) + more
    return growth


def _percentiles(counts: dict[int, int]) -> dict[str, float | None]:
    return {name: percentile(counts, share) for name, share in SHARES.items()}


def _bounded_percentiles(known: Sequence[tuple[Report, Report]]) -> dict[str, float | None]:
    """Of a histogram with bounds: the upper bound of the bucket, as Prometheus users know it."""
    bounds: list[float] = []
    growth: list[int] = []
    for old, new in known:
        counts = new["origin_latency"]["counts"]
        earlier = old["origin_latency"]["counts"] or [0] * len(counts)
        bounds = new["origin_latency"]["bounds_s"] or bounds
        more = [after - before for after, before in zip(counts, earlier, strict=True)]
        growth = [a + b for a, b in zip(growth or [0] * len(more), more, strict=True)] if more else growth
    total, reached = sum(growth), list(accumulate(growth))
    return {
        name: bounds[min(bisect_left(reached, share * total), len(bounds) - 1)] if total else None
        for name, share in SHARES.items()
    }


def _namespaces(before: Mapping[str, Report], reports: Sequence[Report]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        old = before.get(report["node"])
        for name, counts in report["namespaces"].items():
            shown = found.setdefault(
                name, {"name": name, "allowed": 0.0, "denied": 0.0, "total_allowed": 0, "total_denied": 0}
            )
            earlier = counts if old is None else old["namespaces"].get(name, (0, 0))
            for outcome, count, known in zip(("allowed", "denied"), counts, earlier, strict=True):
                shown[f"total_{outcome}"] += count
                if old is not None:
                    shown[outcome] += max(0.0, (count - known) / _over_s(old, report))
    by_rate = sorted(
        found.values(),
        key=lambda each: (
            -each["allowed"] - each["denied"],
            -each["total_allowed"] - each["total_denied"],
            each["name"],
        ),
    )
    return by_rate[:50]


def _merge_rates(reports: Sequence[Report], name: str) -> list[dict[str, Any]]:
    rates: dict[tuple[str, str], float] = {}
    for report in reports:
        for row in report[name]:
            key = (row["namespace"], row["identifier"])
            rates[key] = rates.get(key, 0.0) + row["per_s"]
    rows = [
        {"namespace": namespace, "identifier": identifier, "per_s": round(rate, 3)}
        for (namespace, identifier), rate in rates.items()
    ]
    rows.sort(key=lambda row: (-float(str(row["per_s"])), str(row["namespace"]), str(row["identifier"])))
    return rows[:ROWS_MAX]


def _merge_denials(lists: Iterable[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    rows = [row for rows in lists for row in rows]
    rows.sort(key=lambda row: -row["at_ms"])
    return rows[:ROWS_MAX]


def _regions(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """All workers read the same ledger; the one that read it last is shown."""
    ages: dict[str, int] = {}
    lags: dict[str, int] = {}
    for report in reports:
        for region, age_ms in report["heartbeat_age_ms"].items():
            ages[region] = min(age_ms, ages.get(region, age_ms))
        for region, lag_ms in report["lag_ms"].items():
            lags[region] = min(lag_ms, lags.get(region, lag_ms))
    own = {report["region"] for report in reports}
    return [
        {
            "region": region,
            "is_own": region in own,
            "heartbeat_age_ms": ages.get(region),
            "lag_ms": lags.get(region),
            "is_live": region in ages and ages[region] < SILENT_MS,
        }
        for region in sorted({*ages, *lags})
    ]


def _dependencies(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """One line for each dependency: bad if it is bad for any worker."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, ok, detail in report["dependencies"]:
            if name.startswith("breaker "):
                continue
            shown = found.setdefault(name, {"name": name, "ok": ok, "detail": detail, "failing": 0})
            if not ok:
                shown.update(ok=False, detail=detail, failing=shown["failing"] + 1)
    return list(found.values())


def _breakers(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The worst state of each."""
    worst: dict[str, int] = {}
    for report in reports:
        for name, state in report["breakers"].items():
            worst[name] = max(state, worst.get(name, 0))
    return [{"name": name, "state": BREAKERS[state]} for name, state in sorted(worst.items())]


def _node(old: Report | None, report: Report) -> dict[str, Any]:
    names = ("node", "pid", "region", "uptime_s", "clock_offset_ms", "subjects", "cells", "rss_bytes")
    shown = {name: report[name] for name in (*names, "connections", "dirty", "replay_lag_s")}
    shown["allowed"] = 0.0 if old is None else _rate(old, report, "allowed")
    shown["denied"] = 0.0 if old is None else _rate(old, report, "denied")
    return shown


def merge_identifier(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An identifier as all workers know it. Each has counts of its own: the best informed one comes first."""
    subjects: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for answer in answers:
        for subject in answer["subjects"]:
            key = (subject["namespace_id"], subject["duration_ms"])
            subjects.setdefault(key, []).append({**subject, "node": answer["node"], "pid": answer["pid"]})
    merged = []
    for views in subjects.values():
        views.sort(key=lambda view: (-view["current"]["total"], -view["previous"]["total"], view["pid"]))
        merged.append({**views[0], "views": [_view(view) for view in views]})
    merged.sort(key=lambda subject: (subject["namespace"], subject["duration_ms"]))
    return {
        "now_ms": max(answer["now_ms"] for answer in answers),
        "is_complete": all(answer["is_complete"] for answer in answers),
        "subjects": merged,
        "denials": _merge_denials(answer["denials"] for answer in answers),
    }


def _view(subject: Mapping[str, Any]) -> dict[str, Any]:
    names = ("node", "pid", "effective", "unreplayed", "regional_age_ms", "global_age_ms", "credit")
    counts = {name: subject["current"][name] for name in ("own", "others", "foreign")}
    return {**{name: subject[name] for name in names}, **counts}
