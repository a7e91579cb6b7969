"""Replays recorded decisions against another limit, through the real engine: who would have been denied?

Two engines see every record: one with the limits of the log, one with the new limit for a namespace. The first shows
how far the replay can be trusted: it agrees with the log except where counters were not empty at its beginning, where
nodes or regions had not converged, and where an origin was down. The replay is one counter for all nodes, and assumes
that clients would have sent the same requests. Pure: records come in, a report comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from tidegate.core.model import Limit, Request, make_limit
from tidegate.core.quota import format_quota
from tidegate.errors import InvalidInput
from tidegate.runtime.limiter import Limiter
from tidegate.telemetry.decisions import DecisionRecord

__all__ = ["Caller", "Moment", "WhatIf", "replay"]

# As many points as a plot can show.
MOMENTS_MAX: Final = 240


@dataclass
class Caller:
    """One identifier: its requests, how many were allowed, and how many would have been."""

    workspace: str
    identifier: str
    requests: int = 0
    allowed: int = 0
    would_be_allowed: int = 0
    newly_denied: int = 0
    newly_allowed: int = 0


@dataclass
class Moment:
    """A part of the time that the log covers."""

    at_ms: int
    allowed: int = 0
    denied: int = 0
    would_be_allowed: int = 0
    would_be_denied: int = 0


@dataclass
class WhatIf:
    """The report. All numbers are about the namespace whose limit was replaced."""

    namespace: str
    limits: dict[str, int]
    """The limits in the log, with their requests."""
    new_limit: str
    requests: int = 0
    allowed: int = 0
    would_be_allowed: int = 0
    newly_denied: int = 0
    newly_allowed: int = 0
    agreed: int = 0
    """Requests that the replay with the limits of the log decided as the log has it."""
    seconds: float = 0.0
    callers: list[Caller] = field(default_factory=list)
    """All identifiers, those with the most newly denied requests first."""
    moments: list[Moment] = field(default_factory=list)

    @property
    def callers_newly_denied(self) -> int:
        """How many identifiers would have had at least one request denied that was allowed."""
        return sum(caller.newly_denied > 0 for caller in self.callers)

    def document(self, at_most: int) -> dict[str, Any]:
        """For JSON, with at most so many identifiers."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **fields,
            "callers_newly_denied": self.callers_newly_denied,
            "callers": [vars(caller) for caller in self.callers[:at_most]],
            "moments": [vars(moment) for moment in self.moments],
        }


def replay(
    records: Iterable[DecisionRecord], quota: int, duration_ms: int, namespace: str | None = None
) -> WhatIf:
    """Replay `records` with the limit (quota, duration_ms) for `namespace`, or for the only one in the log."""
    ordered = sorted(records, key=lambda record: record.at_ms)
    chosen = _chosen(ordered, namespace)
    of_chosen = [record for record in ordered if record.namespace == chosen]
    first_ms, last_ms = of_chosen[0].at_ms, of_chosen[-1].at_ms
    step_ms = max(1, -(-(last_ms - first_ms + 1) // MOMENTS_MAX))
    result = WhatIf(
        namespace=chosen,
        limits=_limits(of_chosen),
        new_limit=format_quota(quota, duration_ms),
        seconds=(last_ms - first_ms) / 1000,
        moments=[Moment(first_ms + at * step_ms) for at in range((last_ms - first_ms) // step_ms + 1)],
    )
    callers: dict[tuple[str, str], Caller] = {}
    as_it_was, as_it_would_be = Limiter(), Limiter()
    for batch in _batches(ordered):
        was = all(record.allowed for record in batch)
        again = _decide(as_it_was, batch, None)
        would = _decide(
            as_it_would_be,
            batch,
            {record.workspace: make_limit(quota, duration_ms, chosen, record.workspace) for record in batch}
            if any(record.namespace == chosen for record in batch)
            else None,
        )
        for record in batch:
            if record.namespace == chosen:
                moment = result.moments[(record.at_ms - first_ms) // step_ms]
                key = (record.workspace, record.identifier)
                caller = callers.setdefault(key, Caller(*key))
                _count(result, caller, moment, was=was, again=again, would=would)
    result.callers = sorted(
        callers.values(),
        key=lambda each: (-each.newly_denied, -each.requests, each.workspace, each.identifier),
    )
    return result


def _count(result: WhatIf, caller: Caller, moment: Moment, *, was: bool, again: bool, would: bool) -> None:
    for each in (result, caller):
        each.requests += 1
        each.allowed += was
        each.would_be_allowed += would
        each.newly_denied += was and not would
        each.newly_allowed += would and not was
    result.agreed += was == again
    moment.allowed += was
    moment.denied += not was
    moment.would_be_allowed += would
    moment.would_be_denied += not would


def _decide(limiter: Limiter, batch: Sequence[DecisionRecord], changed: dict[str, Limit] | None) -> bool:
    """Whether all of a batch fits. `changed`: the new limit of the namespace, by workspace."""
    requests = []
    for record in batch:
        limit = None if changed is None else changed[record.workspace]
        if limit is None or record.namespace != limit.namespace:
            limit = make_limit(record.quota, record.duration_ms, record.namespace, record.workspace)
        requests.append(Request(limit, record.identifier, record.cost))
    if len(requests) == 1:
        return bool(limiter.limit(*requests[0], now_ms=batch[0].at_ms))
    return all(limiter.limit_many(requests, now_ms=batch[0].at_ms))


def _batches(records: Sequence[DecisionRecord]) -> Iterator[list[DecisionRecord]]:
    """Records that were one request. A single record is a batch of its own."""
    for (_, batch), group in groupby(records, key=lambda record: (record.at_ms, record.batch)):
        if batch is None:
            yield from ([record] for record in group)
        else:
            yield list(group)


def _limits(records: Sequence[DecisionRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        name = format_quota(record.quota, record.duration_ms)
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _chosen(records: Sequence[DecisionRecord], namespace: str | None) -> str:
    names = sorted({record.namespace for record in records})
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    if not names:
        raise InvalidInput("log", "no decision", "at least one line")
    if namespace is None and len(names) > 1:
        raise InvalidInput("namespace", namespace, f"one of those in the log: {listed}")
    if namespace is not None and namespace not in names:
        raise InvalidInput("namespace", namespace, f"one of those in the log: {listed}")
    return names[0] if namespace is None else namespace
