"""When `wait` tries again, and when it gives up: pure, obeyed by both drivers."""

from __future__ import annotations

from tidegate.core.model import Decision

__all__ = ["pause_s"]


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
