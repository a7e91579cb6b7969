"""A point in time by which something must be done, by a monotonic clock."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

__all__ = ["Deadline", "loop_time"]


def loop_time() -> float:
    """The clock of the event loop that runs: what most deadlines here are measured by."""
    import asyncio  # an embedded limiter needs a Deadline, and no asyncio

    return asyncio.get_running_loop().time()


class Deadline(NamedTuple):
    """Seconds of a monotonic clock, which the caller reads: tests and simulations have their own."""

    at_s: float
    timeout_s: float
    """How long it was at first, for messages."""

    @classmethod
    def after(cls, timeout_s: float | None, now_s: float) -> Deadline:
        """`timeout_s` seconds from now; None for no deadline."""
        timeout_s = inf if timeout_s is None else timeout_s
        return cls(now_s + timeout_s, timeout_s)

    def remaining(self, now_s: float) -> float:
        """Seconds that are left, 0 when it has passed."""
        return max(0.0, self.at_s - now_s)
