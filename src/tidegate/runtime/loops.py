"""What background loops share: ticks at absolute times, waiting for an event, and the log line of refused counts."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Final

from tidegate.adapters.backoff import Backoff
from tidegate.core.model import Tuning
from tidegate.errors import DependencyError

__all__ = ["Metronome", "Refusals", "loop_backoff", "wait_for_event"]

logger: Final = logging.getLogger(__name__)


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


class Refusals:
    """Logs once when the origin begins to refuse counts, and once when it takes them again.

    An origin that is read-only or out of memory answers the pulse: only its refusals show that nodes drift apart.
    """

    def __init__(self) -> None:
        self._is_refused = False

    def note(self, error: DependencyError | None) -> None:
        """Counts were sent, or could not be."""
        if (error is not None) == self._is_refused:
            return
        self._is_refused = error is not None
        if error is not None:
            logger.warning("the origin takes no counts, nodes of this region drift apart: %s", error)
        else:
            logger.info("the origin takes counts again")
