"""Checks every field of a decision against formulas of its own, from the counts that the node held in the same step.

It shares no arithmetic with the engine. A guess is a denial of a request that fits according to the counts.
Anticipation may cause one, and so may credit that other nodes hold; the auditor decides whether one of them was
possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tidegate.core.cells import Subject
from tidegate.core.model import Decision, Limit

__all__ = ["Finding", "batch_findings", "is_guess", "single_findings", "totals_of", "used_at"]

# By sequence: what a node knows to have been accepted anywhere.
Totals = Mapping[int, int]


class Finding(NamedTuple):
    """A field that is wrong."""

    invariant: int
    text: str


def totals_of(subject: Subject | None) -> dict[int, int]:
    if subject is None:
        return {}
    return {cell.sequence: cell.own + cell.others + cell.foreign for cell in subject.cells()}


def used_at(totals: Totals, at_ms: int, duration_ms: int) -> int:
    """What counts in the sliding window at a time."""
    sequence, elapsed_ms = divmod(at_ms, duration_ms)
    before = totals.get(sequence - 1, 0)
    return totals.get(sequence, 0) + before * (duration_ms - elapsed_ms) // duration_ms


def is_guess(decision: Decision) -> bool:
    """Denied, although it fits according to the counts."""
    return not decision.allowed and decision.effective <= decision.limit.quota


def single_findings(item: Item, decision: Decision, at_ms: int) -> Iterator[Finding]:
    """What is wrong with the answer to one request. Its totals contain its cost if it was allowed."""
    limit, _, cost, totals = item
    used = used_at(totals, at_ms, limit.duration_ms)
    needed = used if decision.allowed else used + cost
    if decision.effective != needed:
        yield Finding(7, f"the decision says {decision.effective} in use, the cells {needed}")
    if decision.allowed and needed > limit.quota:
        yield Finding(7, f"allowed with {needed} of {limit.quota}")
    if decision.remaining != (limit.quota - needed if decision.allowed else 0):
        yield Finding(7, f"{decision.remaining} remaining, {needed} of {limit.quota} used")
    yield from _time_findings(limit, cost, decision, totals, at_ms)


def _time_findings(
    limit: Limit, cost: int, decision: Decision, totals: Totals, at_ms: int
) -> Iterator[Finding]:
    """`reset_at_ms` and `retry_after_ms`."""
    duration_ms = limit.duration_ms
    sequence = at_ms // duration_ms
    if decision.reset_at_ms != (sequence + 1) * duration_ms:
        yield Finding(7, f"reset at {decision.reset_at_ms}, but the cell is {sequence}")
    retry_ms = decision.retry_after_ms
    if decision.allowed:
        if retry_ms != 0:
            yield Finding(7, f"allowed, and retry after {retry_ms}")
        return
    if is_guess(decision):
        return
    room = limit.quota - cost
    if (retry_ms is None) != (room < 0):
        yield Finding(7, f"cost {cost} of {limit.quota}: retry after {retry_ms}")
    if retry_ms is None:
        return
    if used_at(totals, at_ms + retry_ms, duration_ms) > room:
        yield Finding(7, f"retry after {retry_ms} ms, but it does not fit then")
    # Usage only falls within a cell, so it is enough to check the moment before the retry and the end of each cell.
    moments = [at_ms + retry_ms - 1]
    moments += [
        (earlier + 1) * duration_ms - 1 for earlier in range(sequence, (at_ms + retry_ms) // duration_ms)
    ]
    if any(moment >= at_ms and used_at(totals, moment, duration_ms) <= room for moment in moments):
        yield Finding(7, f"retry after {retry_ms} ms, but it fits before")


class Item(NamedTuple):
    """One request of a batch, with what the node knew about its subject afterwards."""

    limit: Limit
    identifier: str
    cost: int
    totals: Totals

    @property
    def subject(self) -> object:
        return self.limit.workspace, self.limit.namespace, self.limit.duration_ms, self.identifier


def batch_findings(items: Sequence[Item], decisions: Sequence[Decision], at_ms: int) -> Iterator[Finding]:
    """What is wrong with the answers to a batch."""
    used = [used_at(item.totals, at_ms, item.limit.duration_ms) for item in items]
    if all(decision.allowed for decision in decisions):
        yield from _allowed_batch(items, decisions, used)
        return
    demands: dict[object, int] = {}
    fits: list[bool] = []
    needed: list[int] = []
    for item, before in zip(items, used, strict=True):
        demand = item.cost + demands.get(item.subject, 0)
        fits.append(before + demand <= item.limit.quota)
        needed.append(demand)
        if fits[-1]:
            demands[item.subject] = demand
    if all(fits):
        # In this order all fit one after the other; on the final state some may not.
        for number, item in enumerate(items):
            if used[number] + demands[item.subject] > item.limit.quota:
                fits[number] = False
                needed[number] = demands[item.subject]
    guessed = all(fits)
    for item, decision, before, does_fit, demand in zip(items, decisions, used, fits, needed, strict=True):
        quota = item.limit.quota
        if decision.allowed != does_fit and not (guessed and is_guess(decision)):
            yield Finding(6, f"batch: {item.identifier}, {before} + {demand} of {quota}: {decision!r}")
        if decision.effective != before + demand:
            yield Finding(
                6, f"batch: {item.identifier} has {before} + {demand}, effective {decision.effective}"
            )
        if decision.remaining != (max(0, quota - before) if decision.allowed else 0):
            yield Finding(
                6, f"failed batch: {item.identifier} has {before} of {quota}, remaining {decision.remaining}"
            )
        yield from _time_findings(item.limit, demand, decision, item.totals, at_ms)


def _allowed_batch(
    items: Sequence[Item], decisions: Sequence[Decision], used: Sequence[int]
) -> Iterator[Finding]:
    """Each item was counted, and reports the costs up to its own."""
    later: dict[object, int] = {}
    for item, decision, after in reversed(list(zip(items, decisions, used, strict=True))):
        quota = item.limit.quota
        effective = after - later.get(item.subject, 0)
        if after > quota:
            yield Finding(6, f"a batch was allowed with {after} of {quota} used")
        if (decision.effective, decision.remaining) != (effective, quota - effective):
            yield Finding(6, f"batch: {item.identifier} has {effective} of {quota}: {decision!r}")
        if decision.retry_after_ms != 0:
            yield Finding(6, f"allowed batch: retry after {decision.retry_after_ms}")
        later[item.subject] = later.get(item.subject, 0) + item.cost
