"""Why an identifier was denied, in sentences: cells, weights, override, source. Pure.

The numbers are those of the moment of the denial; the formula is that of `tidegate.core.windows`.
"""

from __future__ import annotations

from datetime import UTC, datetime

from tidegate.core.quota import format_duration, format_quota
from tidegate.core.windows import carried
from tidegate.server.api.activity import Denial

SOURCES = {
    "local": "from the memory of this node",
    "origin": "after asking the shared counter of the region (the origin)",
    "degraded": "from the memory of this node, because the shared counter (the origin) did not answer",
}


def clock_time(at_ms: int) -> str:
    """`14:03:07 UTC`."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S UTC")


def explain(namespace: str, identifier: str, denial: Denial) -> list[str]:
    """The reasons, the most important one first."""
    rule = format_quota(denial.quota, denial.duration_ms)
    began_ms = denial.at_ms // denial.duration_ms * denial.duration_ms
    elapsed_ms = denial.at_ms - began_ms
    outcome = "was over its limit (in shadow mode, so it was allowed)" if denial.is_shadow else "was denied"
    lines = [f"{identifier} in {namespace} {outcome} at {clock_time(denial.at_ms)}. {_verdict(denial, rule)}"]
    lines.append(f"Current window, since {clock_time(began_ms)}: {_parts(denial.current)}. All of it counts.")
    before = sum(denial.previous)
    if before:
        weight = carried(before, elapsed_ms, denial.duration_ms)
        share = 100 * (denial.duration_ms - elapsed_ms) / denial.duration_ms
        lines.append(
            f"Previous window: {_parts(denial.previous)}. {share:.0f} % of it still counts: {weight}."
        )
    if denial.override_id is None:
        lines.append("No override applies: the limit came with the request.")
    else:
        lines.append(f"The limit is that of override {denial.override_identifier!r} ({denial.override_id}).")
    lines.append(_source(denial))
    if denial.retry_after_ms is None:
        lines.append(f"A cost of {denial.cost} never fits into {rule}.")
    elif denial.retry_after_ms > 0:
        wait = format_duration(denial.retry_after_ms)
        lines.append(f"The same request fits {wait} later, if no other comes before.")
    if denial.count > 1:
        outcome = "over the limit" if denial.is_shadow else "denied"
        lines.append(f"About {denial.count} requests were {outcome} in that second.")
    return lines


def _verdict(denial: Denial, rule: str) -> str:
    if denial.quota == 0:
        return "The limit is 0: everything is blocked."
    if denial.effective > denial.quota:
        return (
            f"With a cost of {denial.cost} the window would hold {denial.effective}, and the limit is {rule}."
        )
    return (
        f"It would fit by the known counts ({denial.effective} of {rule}), but other nodes hold the rest as credit, "
        "other regions have probably used it since their last report, or the limit denies while the origin does not "
        "answer."
    )


def _parts(counts: tuple[int, int, int]) -> str:
    own, others, foreign = counts
    if own + others + foreign == 0:
        return "nothing accepted"
    return (
        f"{own + others + foreign} accepted ({own} by this node, {others} by other nodes of the region, {foreign} by "
        "other regions)"
    )


def _source(denial: Denial) -> str:
    ages = []
    if denial.regional_age_ms is not None:
        ages.append(f"the counts of other nodes were {format_duration(denial.regional_age_ms)} old")
    if denial.global_age_ms is not None:
        ages.append(f"those of other regions {format_duration(denial.global_age_ms)}")
    made = f"Decided {SOURCES[denial.source]}"
    return f"{made}; {', '.join(ages)}." if ages else f"{made}."
