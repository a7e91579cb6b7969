"""A limiter, taken apart: the simulator looks inside what it proves."""

from __future__ import annotations

from tidegate.runtime.fleet import Parts
from tidegate.runtime.limiter import AsyncLimiter

__all__ = ["parts_of"]


def parts_of(limiter: AsyncLimiter) -> Parts:
    """The engine, the gate and the node of a limiter, as they are now."""
    return limiter._parts  # noqa: SLF001 - nobody else should want this, so there is no public name for it
