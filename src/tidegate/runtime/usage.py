"""`Usage`: what counts against a limit for one caller, and where each part was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tidegate.core.engine import Engine
from tidegate.core.model import Decision, Limit
from tidegate.runtime.inspection import Inspection

__all__ = ["Usage", "usage_of"]


class Usage(NamedTuple):
    """What counts against a limit for one caller, at one instant: `used == regional + foreign + carried`.

    `own`, `regional`, `foreign` and `regions` are counts of the current window; `carried` is what the previous one
    still weighs in the sliding window.
    """

    limit: Limit
    identifier: str
    as_of_ms: int
    """The instant, in Unix milliseconds."""
    own: int
    """What this process has accepted."""
    regional: int
    """What all processes of this region have accepted, as far as this one knows; `own` is part of it."""
    foreign: int
    """What other regions have published."""
    carried: int
    """What the previous window still weighs."""
    used: int
    """What counts in the sliding window."""
    remaining: int
    """How much more fits now."""
    reset_at_ms: int
    """The end of the current fixed window, in Unix milliseconds."""
    regions: Mapping[str, int]
    """`foreign` by region, as far as known."""
    regional_age_ms: int | None
    """Age of what Redis last answered about other processes; None without Redis, or before its first answer."""
    global_age_ms: int | None
    """Age of what the database last answered about other regions; None without it, or before the first import."""
    source: str
    """How it was found: "local", "origin", or "degraded" when Redis had to be asked and did not answer."""


def usage_of(engine: Engine, identifier: str, decision: Decision) -> Usage:
    """What is behind a decision with a cost of 0 that has just been made. Enter the gate first."""
    limit = decision.limit
    as_of_ms = decision.decided_at_ms
    state = Inspection(engine).get(limit.workspace, limit.namespace, limit.duration_ms, identifier, as_of_ms)
    own, foreign, carried, used = 0, 0, 0, decision.effective
    regions: Mapping[str, int] = {}
    # Without a state it was evicted meanwhile, and where the counts come from is not known any more.
    if state is not None:
        own, foreign, regions = state.current.own, state.current.foreign, state.current.regions
        carried, used = state.carried, state.effective
    return Usage(
        limit,
        identifier,
        as_of_ms,
        own,
        used - foreign - carried,
        foreign,
        carried,
        used,
        max(0, limit.quota - used),
        decision.reset_at_ms,
        regions,
        decision.regional_age_ms,
        decision.global_age_ms,
        decision.source,
    )
