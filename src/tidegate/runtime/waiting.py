"""When `wait` tries again, and when it gives up: pure, obeyed by both drivers."""

from __future__ import annotations

from tidegate.core.model import Decision
from tidegate.errors import InvalidInput

__all__ = ["checked_timeout", "pause_s"]


def checked_timeout(timeout_s: object) -> None:
    """Refuse what is no number of seconds before anything is counted."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise InvalidInput("timeout", timeout_s, "seconds, 0 or more, or None to wait as long as it takes")


def pause_s(denial: Decision, waited_s: float, timeout_s: float | None) -> float | None:
    """How long to sleep before the next try; None to give up.

    The denial's own wait is the earliest moment at which the cost can fit. If that lies behind the timeout, or
    never comes, waiting longer is of no use to anybody. Whoever comes in between may be served first.
    """
    wait_s = denial.retry_after
    if wait_s is None:
        return None
    wait_s = max(wait_s, 0.001)
    if timeout_s is not None and waited_s + wait_s > timeout_s:
        return None
    return wait_s
