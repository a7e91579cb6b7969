"""What all background loops share: ticks at absolute times, and waiting for an event."""

from __future__ import annotations

import asyncio
from random import Random

from tidegate.adapters.backoff import Backoff
from tidegate.core.model import Tuning

__all__ = ["Metronome", "loop_backoff", "wait_for_event"]


class Metronome:
    """Ticks anchored to absolute targets, so that a slow cycle does not drift, with fresh jitter each cycle.

    The first tick comes after a random part of an interval: nodes that start together do not tick together.
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


def loop_backoff(tuning: Tuning, random: Random) -> Backoff:
    """The pauses of a background loop whose dependency fails."""
    return Backoff(tuning.backoff_first_ms / 1000, tuning.backoff_last_ms / 1000, random)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set, at most `timeout_s`. True if it was."""
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
