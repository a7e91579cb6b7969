"""Replays recorded decisions against another limit, through the real engine: which requests would have been denied.

Two engines see every record: one with the limits of the log, one with the new limit for a namespace. The first shows
how far the replay can be trusted: it agrees with the log except where counters were not empty at its beginning, where
nodes or regions had not converged, and where an origin was down. The replay is one counter for all nodes, and assumes
that clients would have sent the same requests. Pure: records come in, a report comes out.

A record may stand for several equal requests of one moment (`Run`), as the console keeps them. They are decided
together, with the same result as one after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from tidegate.core.model import Limit, Request, make_limit
from tidegate.core.quota import format_quota
from tidegate.errors import InvalidInput
from tidegate.runtime.environment import Environment
from tidegate.runtime.limiter import Limiter
from tidegate.telemetry.decisions import DecisionRecord

__all__ = ["Caller", "Moment", "Run", "WhatIf", "replay", "replay_runs"]

# As many points as a plot can show.
MOMENTS_MAX: Final = 240
# Requests between two pauses of `replay_runs`: about a millisecond.
PAUSE_EVERY: Final = 200

Run = tuple[DecisionRecord, int]
"""A record, and for how many equal requests of the same moment it stands. In a batch it stands for one."""


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
    steps = replay_runs(((record, 1) for record in records), quota, duration_ms, namespace)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: WhatIf = done.value
            return result


def replay_runs(
    runs: Iterable[Run],
    quota: int,
    duration_ms: int,
    namespace: str | None = None,
    *,
    against_replay: bool = False,
) -> Generator[None, None, WhatIf]:
    """The same for runs, in steps: a server decides requests between them. Returns the report.

    `against_replay`: compare with a replay of the present limits, not with what was decided. Missing counts of other
    nodes and regions would otherwise look like unused quota.
    """
    ordered = sorted(runs, key=lambda run: run[0].at_ms)
    chosen = _chosen([record for record, _ in ordered], namespace)
    of_chosen = [run for run in ordered if run[0].namespace == chosen]
    first_ms, last_ms = of_chosen[0][0].at_ms, of_chosen[-1][0].at_ms
    step_ms = max(1, -(-(last_ms - first_ms + 1) // MOMENTS_MAX))
    result = WhatIf(
        namespace=chosen,
        limits=_limits(of_chosen),
        new_limit=format_quota(quota, duration_ms),
        seconds=(last_ms - first_ms) / 1000,
        moments=[Moment(first_ms + at * step_ms) for at in range((last_ms - first_ms) // step_ms + 1)],
    )
    callers: dict[tuple[str, str], Caller] = {}
    clock = _LogClock()
    as_it_was, as_it_would_be = _limiter(clock), _limiter(clock)
    for number, batch in enumerate(_batches(ordered), 1):
        if number % PAUSE_EVERY == 0:
            yield
        clock.at_ms = batch[0][0].at_ms
        times = batch[0][1]
        logged = times if all(record.allowed for record, _ in batch) else 0
        again = _decide(as_it_was, batch, None)
        was = again if against_replay else logged
        would = _decide(
            as_it_would_be,
            batch,
            {
                record.workspace: make_limit(quota, duration_ms, chosen, record.workspace)
                for record, _ in batch
            }
            if any(record.namespace == chosen for record, _ in batch)
            else None,
        )
        for record, _ in batch:
            if record.namespace == chosen:
                moment = result.moments[(record.at_ms - first_ms) // step_ms]
                key = (record.workspace, record.identifier)
                caller = callers.setdefault(key, Caller(*key))
                _count(result, caller, moment, times, was=was, would=would)
                result.agreed += times - abs(logged - again)
    result.callers = sorted(
        callers.values(),
        key=lambda each: (-each.newly_denied, -each.requests, each.workspace, each.identifier),
    )
    return result


class _LogClock:
    """The time of the record that is replayed: by today's time its counts have aged out, and memory drops them."""

    def __init__(self) -> None:
        self.at_ms = 0

    def now_ms(self) -> int:
        return self.at_ms


def _limiter(clock: _LogClock) -> Limiter:
    return Limiter._in_environment(  # noqa: SLF001 - no other caller may set the clock
        Environment(clock=clock), region=None, origin=None, ledger=None, tuning=None
    )


def _count(result: WhatIf, caller: Caller, moment: Moment, times: int, *, was: int, would: int) -> None:
    """Add `times` requests, of which so many were allowed and would be allowed."""
    for each in (result, caller):
        each.requests += times
        each.allowed += was
        each.would_be_allowed += would
        each.newly_denied += max(0, was - would)
        each.newly_allowed += max(0, would - was)
    moment.allowed += was
    moment.denied += times - was
    moment.would_be_allowed += would
    moment.would_be_denied += times - would


def _decide(limiter: Limiter, batch: Sequence[Run], changed: dict[str, Limit] | None) -> int:
    """How many of a run fit; of a batch, 1 if all of it fits. `changed`: the new limit, by workspace."""
    requests = []
    for record, _ in batch:
        limit = None if changed is None else changed[record.workspace]
        if limit is None or record.namespace != limit.namespace:
            limit = make_limit(record.quota, record.duration_ms, record.namespace, record.workspace)
        requests.append(Request(limit, record.identifier, record.cost))
    now_ms = batch[0][0].at_ms
    if len(requests) > 1:
        return int(all(limiter.limit_many(requests, now_ms=now_ms)))
    limit, identifier, cost = requests[0]
    times = batch[0][1]
    if limiter.limit(limit, identifier, cost * times, now_ms=now_ms):
        return times
    if times == 1:
        return 0
    fitting = limiter.peek(limit, identifier, now_ms=now_ms).remaining // cost
    if fitting:
        limiter.limit(limit, identifier, cost * fitting, now_ms=now_ms)
    return fitting


def _batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Records that were one request. A single record is a batch of its own."""
    for (_, batch), group in groupby(runs, key=lambda run: (run[0].at_ms, run[0].batch)):
        if batch is None:
            yield from ([run] for run in group)
        else:
            yield list(group)


def _limits(runs: Sequence[Run]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record, times in runs:
        name = format_quota(record.quota, record.duration_ms)
        found[name] = found.get(name, 0) + times
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
