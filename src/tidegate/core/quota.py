"""Quota strings: `"100/minute"`, `"10/s"`, `"5000/30d"`, `"3 per 15 minutes"`."""

from __future__ import annotations

import re
from typing import Final

from tidegate.errors import InvalidInput

__all__ = ["parse_quota"]

UNIT_MS: Final[dict[str, int]] = {
    "ms": 1,
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
}

QUOTA: Final = re.compile(
    r"\s*([0-9]{1,19})\s*(?:/|\bper\b)\s*([0-9]{0,15})\s*([a-z]+)\s*", re.ASCII | re.IGNORECASE
)

EXPECTED: Final = 'a quota such as "100/minute", "10/s" or "5000/30d"'


def parse_quota(quota: str) -> tuple[int, int]:
    """(units, duration_ms) of a quota string. A duration below one second or a quota of 0 is refused."""
    match = QUOTA.fullmatch(quota)
    if match is None:
        raise InvalidInput("quota", quota, EXPECTED)
    units = int(match.group(1))
    times = match.group(2)
    name = match.group(3).lower()
    unit_ms = UNIT_MS.get(name)
    if unit_ms is None and len(name) > 3 and name.endswith("s"):
        # The plural of a word. One of an abbreviation would be a slip: "10/ms" is not ten a minute.
        unit_ms = UNIT_MS.get(name[:-1])
    if unit_ms is None:
        raise InvalidInput("quota", quota, f"{EXPECTED}; units are {', '.join(UNIT_MS)}")
    if units < 1:
        raise InvalidInput("quota", quota, "at least 1 unit")
    duration_ms = unit_ms * int(times or 1)
    if duration_ms < 1000:
        raise InvalidInput("quota", quota, "a duration of at least one second")
    return units, duration_ms
