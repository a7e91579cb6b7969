"""What all background loops share: backoff with jitter, and targets in absolute time."""

from __future__ import annotations

import asyncio
from random import Random

from tidegate.core.model import Tuning

__all__ = ["Backoff", "Metronome", "wait_for_event"]


class Backoff:
    """Pauses of a failing loop: doubled each time, drawn from the upper half, forgotten after a success."""

    def __init__(self, tuning: Tuning, random: Random) -> None:
        self._first_s = tuning.backoff_first_ms / 1000
        self._last_s = tuning.backoff_last_ms / 1000
        self._random = random
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def pause_s(self) -> float:
        ceiling_s = min(self._last_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return self._random.uniform(ceiling_s / 2, ceiling_s)


class Metronome:
    """Ticks anchored to absolute targets, so that a slow cycle does not drift, with fresh jitter each cycle.

    The first tick comes after a drawn part of an interval: nodes that start together do not tick together.
    """

    def __init__(self, interval_s: float, jitter_percent: int, random: Random, now_s: float) -> None:
        self._interval_s = interval_s
        self._jitter = jitter_percent / 100
        self._random = random
        self._anchor_s = now_s - interval_s * random.random()

    def next_s(self, now_s: float) -> float:
        """When the next tick is due. Ticks that were missed are skipped, not made up for."""
        self._anchor_s += self._interval_s
        if self._anchor_s <= now_s:
            missed = int((now_s - self._anchor_s) / self._interval_s) + 1
            self._anchor_s += missed * self._interval_s
        return self._anchor_s + self._interval_s * self._jitter * (self._random.random() - 0.5)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set, at most so long. True if it was."""
    if event.is_set():
        return True
    if timeout_s <= 0:
        return False
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
