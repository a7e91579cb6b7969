"""Pauses between tries: doubled each time, half of each random, so that clients that failed together do not retry
together."""

from __future__ import annotations

from random import Random

__all__ = ["Backoff"]


class Backoff:
    """From `first_s` up to `last_s`; a success starts over."""

    def __init__(self, first_s: float, last_s: float, random: Random) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._random = random
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def pause_s(self) -> float:
        """How long to wait after one more failure."""
        ceiling_s = min(self._last_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return self._random.uniform(ceiling_s / 2, ceiling_s)
