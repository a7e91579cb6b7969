"""A histogram of durations: two lists of ints, one addition an observation."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

__all__ = ["BOUNDS_S", "Histogram", "HistogramSnapshot"]

# Upper bounds in seconds, from a loopback round trip to a timeout.
BOUNDS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)


class HistogramSnapshot(NamedTuple):
    """Counts per bucket (the last is everything above the bounds), sum in seconds."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


class Histogram:
    """Durations of one kind of operation."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += times
        self._sum_s += times * seconds

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(BOUNDS_S, tuple(self._counts), self._sum_s)
