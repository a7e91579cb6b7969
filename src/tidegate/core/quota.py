"""Quotas as text: parsed (`"100/minute"`, `"10/s"`, `"5000/30d"`, `"3 per 15 minutes"`) and formatted."""

from __future__ import annotations

import re
from typing import Final

from tidegate.errors import InvalidInput

__all__ = ["QUOTA_EXPECTED", "format_count", "format_duration", "format_quota", "parse_quota"]

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

QUOTA_EXPECTED: Final = 'a quota such as "100/minute", "10/s" or "5000/30d", or an int with duration_ms'

# The largest unit first, with the word of a quota and the abbreviation of a wait.
UNITS: Final = (
    (86_400_000, "day", "d"),
    (3_600_000, "hour", "h"),
    (60_000, "minute", "min"),
    (1_000, "second", "s"),
)


def parse_quota(text: str) -> tuple[int, int]:
    """(quota, duration_ms) of a quota string. A duration below one second or a quota of 0 is refused."""
    match = QUOTA.fullmatch(text)
    if match is None:
        raise InvalidInput("quota", text, QUOTA_EXPECTED)
    quota = int(match.group(1))
    times = match.group(2)
    name = match.group(3).lower()
    unit_ms = UNIT_MS.get(name)
    if unit_ms is None and len(name) > 3 and name.endswith("s"):
        # The plural of a word. One of an abbreviation would be a slip: "10/ms" is not ten a minute.
        unit_ms = UNIT_MS.get(name[:-1])
    if unit_ms is None:
        raise InvalidInput("quota", text, f"{QUOTA_EXPECTED}; units are {', '.join(UNIT_MS)}")
    if quota < 1:
        raise InvalidInput("quota", text, "at least 1")
    duration_ms = unit_ms * int(times or 1)
    if duration_ms < 1000:
        raise InvalidInput("quota", text, "a duration of at least one second")
    return quota, duration_ms


def format_quota(quota: int, duration_ms: int) -> str:
    """`100 per minute`, `5 per 15 minutes`."""
    for unit_ms, word, _ in UNITS:
        if duration_ms % unit_ms == 0:
            times = duration_ms // unit_ms
            return f"{quota} per {word}" if times == 1 else f"{quota} per {times} {word}s"
    return f"{quota} per {duration_ms / 1000:g} seconds"


def format_count(number: int, noun: str) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_duration(milliseconds: int) -> str:
    """`300 ms`, `18 s`, `12 min`, `2 h 5 min`: rounded up, to the two largest units."""
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    seconds = -(-milliseconds // 1_000)
    parts: list[str] = []
    for unit_ms, _, short in UNITS:
        times, seconds = divmod(seconds, unit_ms // 1_000)
        if times:
            parts.append(f"{times} {short}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)
