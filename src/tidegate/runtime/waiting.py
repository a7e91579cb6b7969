"""When `wait` tries again, and when it gives up: pure, used by both drivers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from tidegate.core.model import Decision
from tidegate.errors import InvalidInput

__all__ = ["checked_timeout", "pause_s"]

# A denial that has just become obsolete says "in 0 ms"; do not try again in a tight loop.
PAUSE_MIN_S = 0.001


def checked_timeout(timeout: object) -> None:
    """Refuse anything but a number of seconds or None before anything is counted."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InvalidInput("timeout", timeout, "seconds, 0 or more, or None to wait as long as it takes")


def pause_s(decisions: Sequence[Decision], remaining_s: float) -> float | None:
    """How long to sleep before the next try; None to return `decisions`: they allow, or it is too late.

    The retry_after of a denial is the earliest moment at which its cost can fit. If that lies beyond the time that
    remains, or if the cost never fits, waiting longer cannot help. Other requests may be allowed in between.
    """
    waits_s = [inf if each.retry_after is None else each.retry_after for each in decisions if not each]
    if not waits_s:
        return None
    wait_s = max(PAUSE_MIN_S, *waits_s)
    return None if wait_s == inf or wait_s > remaining_s else wait_s
