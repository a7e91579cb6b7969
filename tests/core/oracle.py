"""The sliding window a second time, computed with fractions only. The engine's integers are compared with it.

It shares no code with `tidegate.core`. A history is {sequence: everything counted in that cell}.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor


def carried(previous: int, elapsed_ms: int, duration_ms: int) -> int:
    """The share of the previous cell that the window still covers, rounded down."""
    return floor(previous * (1 - Fraction(elapsed_ms, duration_ms)))


def effective(history: Mapping[int, int], cost: int, now_ms: int, duration_ms: int) -> int:
    """Everything that counts at `now_ms`, plus `cost`."""
    sequence, elapsed_ms = divmod(now_ms, duration_ms)
    before = carried(history.get(sequence - 1, 0), elapsed_ms, duration_ms)
    return history.get(sequence, 0) + before + cost


def fits(history: Mapping[int, int], cost: int, limit: int, now_ms: int, duration_ms: int) -> bool:
    return effective(history, cost, now_ms, duration_ms) <= limit


def retry_after_ms(
    history: Mapping[int, int], cost: int, limit: int, now_ms: int, duration_ms: int
) -> int | None:
    """The wait until `cost` fits if no other request comes; None if it never does.

    Solves for the first instant, cell by cell: the current cell is fixed, and the weighted previous cell must be less
    than what is free plus one.
    """
    if cost > limit:
        return None
    room = limit - cost
    sequence, elapsed_ms = divmod(now_ms, duration_ms)
    while True:
        free = room - history.get(sequence, 0)
        if free >= 0:
            previous = history.get(sequence - 1, 0)
            if previous > free:
                # previous * (1 - e / duration) < free + 1, for the smallest whole e
                bound = duration_ms * (1 - Fraction(free + 1, previous))
                elapsed_ms = max(elapsed_ms, floor(bound) + 1)
            if elapsed_ms < duration_ms:
                return sequence * duration_ms + elapsed_ms - now_ms
        sequence += 1
        elapsed_ms = 0
