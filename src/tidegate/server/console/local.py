"""What one worker knows, as plain documents: its report of every second, an identifier, a search, a preview, and what
it has recorded.

Questions and answers are JSON text, because with several workers they travel through the supervisor: a viewer is
connected to one worker and must see all. Laws: an answer holds nothing of another workspace than the one in the
question (except numbers of the whole node, which name no caller); its size is bounded; long work lets the event loop
decide requests in between.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

import msgspec

from tidegate.core.quota import format_quota
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.inspection import CellParts, SubjectState
from tidegate.runtime.statistics import Health
from tidegate.server.api.activity import Activity, Denial, Name
from tidegate.server.catalog.overrides import matches
from tidegate.server.catalog.view import CatalogView, NamespaceView
from tidegate.server.console.explain import explain

# Rows of a list in one report. With the longest names a report is then below 500 kB; usually it has 10.
ROWS_MAX: Final = 25
NAMESPACES_MAX: Final = 50
SUBJECTS_MAX: Final = 50
# Of these, Redis is asked for regions and reservations: more would cost it too much for a page that asks every second.
ASKED_MAX: Final = 4
DENIALS_MAX: Final = 32
# A preview reads at most so many identifiers, and shows so many.
PREVIEW_LOOKED_MAX: Final = 200_000
PREVIEW_SHOWN_MAX: Final = 50
# Records in one answer: the newest ones, some 600 kB, so that a supervisor can pass on those of several workers.
RECORDS_MAX: Final = 10_000
# Between two turns of the event loop: about half a millisecond.
PREVIEW_SLICE: Final = 500

Question = Mapping[str, Any]
Ask = Callable[[Question], Awaitable[list[Any]]]
"""The answers of all workers to a question, the one that asks included."""


class LocalNode:
    """Answers for this process."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        activity: Activity,
        view: CatalogView,
        now_ms: Callable[[], int],
        dependencies: Callable[[], Sequence[Health]],
        connections: Callable[[], int],
    ) -> None:
        self._limiter = limiter
        self._activity = activity
        self._view = view
        self._now_ms = now_ms
        self._dependencies = dependencies
        self._connections = connections
        self._started_s = monotonic()

    async def answer(self, question: Question) -> Any:
        """The answer to a question of `routes` or `hub`."""
        kind, workspace = question["kind"], question["workspace"]
        if kind == "report":
            return self.report(workspace)
        if kind == "identifier":
            return await self.identifier(workspace, question.get("namespace"), question["identifier"])
        if kind == "search":
            names = self._activity.search(workspace, question["text"], ROWS_MAX)
            return [{"namespace": name, "identifier": identifier} for _, name, identifier in names]
        if kind == "preview":
            return await self.preview(workspace, question["namespace"], question["pattern"])
        if kind == "recording":
            return self.recording(workspace, question["namespace"], question["since_ms"])
        raise ValueError(f"no such question: {kind!r}")

    async def answer_text(self, text: str) -> str:
        """The same as text. ASCII, because a name may hold a lone surrogate."""
        return json.dumps(await self.answer(json.loads(text)))

    async def ask_alone(self, question: Question) -> list[Any]:
        """`Ask` for a server with one worker."""
        return [await self.answer(question)]

    # The report.

    def report(self, workspace: str) -> dict[str, Any]:
        """Counters since the start, gauges as of now; `documents` makes rates of two of them."""
        statistics = self._limiter.statistics()
        activity = self._activity
        degraded, asked = statistics.from_degraded, statistics.from_origin
        latency = statistics.origin_latency.values()
        return {
            "node": statistics.node_id,
            "pid": os.getpid(),
            "region": statistics.region,
            "uptime_s": monotonic() - self._started_s,
            "allowed": statistics.allowed,
            "denied": statistics.denied,
            "sources": {
                "local": statistics.allowed + statistics.denied - asked - degraded,
                "origin": asked,
                "degraded": degraded,
            },
            "latency": {str(bucket): count for bucket, count in activity.latency.items()},
            "origin_latency": {
                "bounds_s": list(next(iter(latency)).bounds_s) if statistics.origin_latency else [],
                "counts": [sum(each) for each in zip(*(h.counts for h in latency), strict=True)],
            },
            "subjects": statistics.subjects,
            "subjects_max": self._limiter.subjects_max,
            "cells": statistics.cells,
            "evicted": sum(statistics.subjects_evicted.values()),
            "rss_bytes": _resident_bytes(),
            "connections": self._connections(),
            "dirty": statistics.origin_dirty_subjects,
            "replay_lag_s": statistics.replay_lag_s,
            "clock_offset_ms": None if statistics.clock_offset_ms is None else -statistics.clock_offset_ms,
            "dependencies": [[each.name, each.ok, each.detail] for each in self._dependencies()],
            "breakers": dict(statistics.breaker_states),
            "heartbeat_age_ms": dict(statistics.heartbeat_age_ms),
            "lag_ms": dict(statistics.global_lag_ms),
            "namespaces": activity.namespaces(workspace, NAMESPACES_MAX),
            "hot": _rates(activity.hottest(workspace, ROWS_MAX)),
            "denied_most": _rates(activity.most_denied(workspace, ROWS_MAX)),
            "denials": [_denial(name, denial) for name, denial in activity.last_denials(workspace, ROWS_MAX)],
        }

    # One identifier.

    async def identifier(self, workspace: str, namespace: str | None, identifier: str) -> dict[str, Any]:
        """What is in memory about an identifier, and why it was denied lately. `namespace` is an id, None for all."""
        now_ms = self._now_ms()
        states, is_complete = self._limiter.inspection.find(workspace, identifier, now_ms)
        place = None if namespace is None else self._view.namespace(namespace)
        if place is not None and place.row.workspace_id != workspace:
            place = None
        wanted = [state for state in states if namespace is None or state.namespace == namespace]
        wanted.sort(key=lambda state: (state.namespace, state.duration_ms))
        asked = [self._ask_origin(workspace, state, now_ms) for state in wanted[:ASKED_MAX]]
        wanted = [*await asyncio.gather(*asked), *wanted[ASKED_MAX:SUBJECTS_MAX]]
        name = None if place is None else place.name
        denials = self._activity.denials_of(workspace, name, identifier)
        return {
            "node": self._limiter.statistics().node_id,
            "pid": os.getpid(),
            "now_ms": now_ms,
            "is_complete": is_complete,
            "subjects": [shown for state in wanted if (shown := self._subject(workspace, state, denials))],
            "denials": [
                {**_denial(key, denial), "why": explain(key[1], identifier, denial)}
                for key, denial in denials[:DENIALS_MAX]
            ],
        }

    async def _ask_origin(self, workspace: str, state: SubjectState, now_ms: int) -> SubjectState:
        key = (workspace, state.namespace, state.duration_ms)
        known = await self._limiter.usage_at_origin(key, state.identifier, now_ms)
        return state if known is None else state.with_origin(known)

    def _subject(
        self, workspace: str, state: SubjectState, denials: Sequence[tuple[Name, Denial]]
    ) -> dict[str, Any] | None:
        place = self._view.namespace(state.namespace)
        if place is None or place.row.workspace_id != workspace:
            return None  # counts of the server's own, such as the quota of the workspace
        override = place.matcher.find(state.identifier)
        quota, quota_from = self._quota(state, place, denials)
        if override is not None and override.duration_ms == state.duration_ms:
            quota, quota_from = override.limit, "override"
        return {
            **state._asdict(),
            "namespace": place.name,
            "namespace_id": place.id,
            "quota": quota,
            "quota_from": quota_from,
            "rule": None if quota is None else format_quota(quota, state.duration_ms),
            "override": None if override is None else override._asdict(),
            "current": _parts(state.current),
            "previous": _parts(state.previous),
            "effective": state.effective,
        }

    def _quota(
        self, state: SubjectState, place: NamespaceView, denials: Sequence[tuple[Name, Denial]]
    ) -> tuple[int | None, str]:
        """The quota to compare with, and where it is known from: a subject does not hold one."""
        for (_, name, _), denial in denials:
            if name == place.name and denial.duration_ms == state.duration_ms:
                return denial.quota, "denial"
        return self._activity.quota(state.namespace, state.duration_ms), "request"

    # Whom a pattern matches.

    async def preview(self, workspace: str, namespace: str, pattern: str) -> dict[str, Any]:
        """The identifiers in memory of a namespace (by id) that a pattern matches, up to a bound."""
        place = self._view.namespace(namespace)
        matched: set[str] = set()
        looked = 0
        if place is not None and place.row.workspace_id == workspace:
            for group in self._limiter.inspection.identifiers(workspace, namespace):
                for start in range(0, len(group), PREVIEW_SLICE):
                    part = group[start : start + PREVIEW_SLICE]
                    looked += len(part)
                    matched.update(each for each in part if matches(pattern, each))
                    await asyncio.sleep(0)
                    if looked >= PREVIEW_LOOKED_MAX:
                        break
                if looked >= PREVIEW_LOOKED_MAX:
                    break
        shown = sorted(matched)[:PREVIEW_SHOWN_MAX]
        is_complete = looked < PREVIEW_LOOKED_MAX
        return {"matched": len(matched), "looked": looked, "is_complete": is_complete, "identifiers": shown}

    # What was decided lately.

    def recording(self, workspace: str, namespace: str, since_ms: int) -> dict[str, Any]:
        """The requests of a namespace (by id) since then, of the identifiers that are followed."""
        recording = self._activity.recording
        runs = sorted(recording.runs(workspace, namespace, since_ms), key=lambda row: row[1])
        return {
            "has_left_out": recording.has_left_out or len(runs) > RECORDS_MAX,
            "runs": runs[-RECORDS_MAX:],
        }


def _rates(rates: Sequence[tuple[Name, float]]) -> list[dict[str, Any]]:
    return [
        {"namespace": name, "identifier": identifier, "per_s": rate} for (_, name, identifier), rate in rates
    ]


def _denial(name: Name, denial: Denial) -> dict[str, Any]:
    _, namespace, identifier = name
    return {
        **msgspec.structs.asdict(denial),
        "namespace": namespace,
        "identifier": identifier,
        "rule": format_quota(denial.quota, denial.duration_ms),
        "current": dict(zip(("own", "others", "foreign"), denial.current, strict=True)),
        "previous": dict(zip(("own", "others", "foreign"), denial.previous, strict=True)),
    }


def _parts(cell: CellParts) -> dict[str, Any]:
    regions = {name: part._asdict() for name, part in cell.regions.items()}
    return {**cell._asdict(), "regions": regions, "total": cell.total}


def _resident_bytes() -> int | None:
    """The memory of this process; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
