"""The sliding-window arithmetic: the only place in Python that decides with the formula.

Two fixed cells are read as one sliding window: all of the current cell, and of the previous one the share that
the window still covers. Everything is exact integer arithmetic; nothing is rounded except by the one floor
division that the formula itself contains. All durations are milliseconds. The script of the Redis origin
(`adapters/redis/records.lua`) has the formula a second time, and tests compare the two. `sim/answer_check.py` has it
once more, on purpose: a check that used this module would not find its faults.
"""

from __future__ import annotations

__all__ = ["carried", "cover_ms", "earliest_fit", "effective", "publish_threshold", "wait_ms"]


def carried(previous: int, elapsed_ms: int, duration_ms: int) -> int:
    """What the previous cell still weighs, `elapsed_ms` into the current one."""
    return previous * (duration_ms - elapsed_ms) // duration_ms


def effective(current: int, previous: int, elapsed_ms: int, duration_ms: int) -> int:
    """What counts in the sliding window, `elapsed_ms` into the current cell."""
    if previous == 0:
        return current
    return current + carried(previous, elapsed_ms, duration_ms)


def cover_ms(count: int, free: int, duration_ms: int) -> int:
    """How much of a cell holding `count` (at least 1) the window may still cover so that it weighs at most `free`.

    carried <= free  <=>  count * cover < (free + 1) * duration  <=>  cover <= ((free + 1) * duration - 1) // count
    """
    return ((free + 1) * duration_ms - 1) // count


def earliest_fit(current: int, previous: int, room: int, elapsed_ms: int, duration_ms: int) -> int:
    """The earliest elapsed time, at or after `elapsed_ms`, at which `current + carried <= room`.

    `room` is what the limit leaves beside the cost. The answer may equal `duration_ms`, which is the start of
    the next cell, and is -1 when the current cell alone exceeds the room, so that this cell never fits.
    """
    if current > room:
        return -1
    if previous == 0:
        return elapsed_ms
    earliest = duration_ms - cover_ms(previous, room - current, duration_ms)
    return earliest if earliest > elapsed_ms else elapsed_ms


def wait_ms(current: int, previous: int, room: int, elapsed_ms: int, duration_ms: int) -> int:
    """How long until `current + carried <= room`, if no other request comes; `room` must not be negative.

    While the current cell alone leaves room, wait for the previous one to fade; otherwise wait for the next cell,
    in which today's current is the previous.
    """
    if current == room + 1:
        # Exactly used up, which most denials are. The next line without its division.
        return duration_ms - elapsed_ms + 1
    if current > room:
        return 2 * duration_ms - elapsed_ms - cover_ms(current, room, duration_ms)
    return earliest_fit(current, previous, room, elapsed_ms, duration_ms) - elapsed_ms


def publish_threshold(quota: int, regions: int) -> int:
    """How much a region must have accepted in a cell before it publishes the count.

    A fifth of the quota, or less when there are many regions: `regions` silent ones, each just below
    `quota // (2 * regions) + 1`, hold at most half of the quota together.
    """
    fifth = (quota + 4) // 5
    share = quota // (2 * regions) + 1
    lowest = fifth if fifth < share else share
    return lowest if lowest > 1 else 1
