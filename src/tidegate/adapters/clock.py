"""The clock of this machine: the one place that reads Unix time."""

from __future__ import annotations

from collections.abc import Callable
from time import time_ns
from typing import Final

__all__ = ["WallClock", "now_ms", "now_ns"]

now_ns: Final[Callable[[], int]] = time_ns
"""Unix time in nanoseconds: the function itself, for callers that cannot afford a frame of Python."""


def now_ms() -> int:
    """Unix time in whole milliseconds."""
    return time_ns() // 1_000_000


class WallClock:
    """The `Clock` of everything outside of tests and simulations."""

    def now_ms(self) -> int:
        return now_ms()
