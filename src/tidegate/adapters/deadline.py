"""A point in time until which something may take, by a monotonic clock."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

__all__ = ["Deadline"]


class Deadline(NamedTuple):
    """Seconds of any monotonic clock; the caller reads it, so that tests and simulations can use their own."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None, now_s: float) -> Deadline:
        """`timeout_s` seconds from now; None for no deadline."""
        return cls(inf if timeout_s is None else now_s + timeout_s)

    def remaining(self, now_s: float) -> float:
        """Seconds that are left, 0 when it has passed."""
        return max(0.0, self.at_s - now_s)
