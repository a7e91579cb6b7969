"""`Usage`: what counts against a limit for one caller, and where each part was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tidegate.core.engine import Engine
from tidegate.core.model import Decision, Limit
from tidegate.core.sharing import OriginUsage
from tidegate.runtime.inspection import Inspection, RegionUsage

__all__ = ["RegionUsage", "Usage", "usage_of"]


class Usage(NamedTuple):
    """What counts against a limit for one caller, at one instant: `used == regional + foreign + carried + reserved`.

    `own`, `regional`, `foreign` and `regions` are counts of the current window; `carried` is what still counts
    of the previous one in the sliding window; what is reserved belongs to no window.
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
    """What still counts of the previous window."""
    reserved: int
    """What is reserved in this region and not settled yet."""
    used: int
    """What counts in the sliding window."""
    remaining: int
    """How much more fits now."""
    reset_at_ms: int
    """The end of the current fixed window, in Unix milliseconds."""
    regions: Mapping[str, RegionUsage]
    """`foreign` by region, as far as known, with the age of each."""
    regional_age_ms: int | None
    """Age of what Redis last answered about other processes; None without Redis, or before its first answer."""
    global_age_ms: int | None
    """Age of what the database last answered about other regions; None without it, or before the first import."""
    source: str
    """How it was found: "local", "origin", or "degraded" when Redis had to be asked and did not answer."""


def usage_of(
    engine: Engine, identifier: str, decision: Decision, known: OriginUsage | None, wall_ms: int
) -> Usage:
    """What is behind a decision with a cost of 0 that has just been made, and what the origin adds to that. Enter the
    gate first."""
    limit = decision.limit
    as_of_ms = decision.decided_at_ms
    key = (limit.workspace, limit.namespace, limit.duration_ms)
    state = Inspection(engine).get(key, identifier, as_of_ms, wall_ms)
    own, foreign, carried, reserved, used = 0, 0, 0, 0, decision.effective
    regions: Mapping[str, RegionUsage] = {}
    regional_age_ms = decision.regional_age_ms
    # Without a state it was evicted meanwhile, and where the counts come from is not known any more.
    if state is not None:
        if known is not None:
            state = state.with_origin(known)
            regional_age_ms = state.regional_age_ms
        own, foreign, regions = state.current.own, state.current.foreign, state.current.regions
        carried, reserved, used = state.carried, state.reserved, state.effective
    return Usage(
        limit,
        identifier,
        as_of_ms,
        own,
        used - foreign - carried - reserved,
        foreign,
        carried,
        reserved,
        used,
        max(0, limit.quota - used),
        decision.reset_at_ms,
        regions,
        regional_age_ms,
        decision.global_age_ms,
        decision.source,
    )
