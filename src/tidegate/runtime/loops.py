"""What background loops share: ticks at absolute times, waiting for an event, and the group commit of counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from typing import ClassVar, Final

from tidegate.adapters.backoff import Backoff
from tidegate.core.cells import Subject
from tidegate.core.gate import Gate
from tidegate.core.model import Tuning
from tidegate.core.pending import Pending
from tidegate.core.sweep import Sweep
from tidegate.errors import DependencyError
from tidegate.runtime.calls import Calls

__all__ = ["GroupCommit", "Metronome", "loop_backoff", "run_sweep", "wait_for_event"]

# Slots looked at in one slice of a sweep: well below a millisecond.
SWEEP_SLOTS: Final = 1_000


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


async def run_sweep(gate: Gate, sweep: Sweep) -> None:
    """Run a sweep that has been started, in slices, so that the event loop is never held long."""
    while sweep.is_active:
        with gate:
            sweep.run(SWEEP_SLOTS)
        await asyncio.sleep(0)


class GroupCommit:
    """Sends counts to the origin: as soon as there are dirty cells, command after command. What becomes dirty meanwhile
    is sent next. `run_once` is one turn."""

    _yields: ClassVar[int]
    """Turns of the event loop after a command that is full."""
    _turns: ClassVar[int]
    """How many turns of this loop have to fit into its interval."""

    def __init__(
        self,
        gate: Gate,
        pending: Pending,
        sweep: Sweep,
        calls: Calls,
        backoff: Backoff,
        interval_ms: int,
        full: int,
    ) -> None:
        """`interval_ms`: the least time between two turns, 0 for none; `full`: what one command carries at most."""
        self._gate = gate
        self._pending = pending
        self._sweep = sweep
        self.calls: Final[Calls] = calls
        self._backoff = backoff
        self._interval_s = interval_ms / 1000
        self._full = full
        self._woken = asyncio.Event()
        self._retry_now = asyncio.Event()
        # False only while the loop sleeps with nothing to do: a decision that makes a cell dirty must wake it.
        self.is_reporting: bool = True
        # Since when there have been unacknowledged counts; None when there are none.
        self.behind_since_s: float | None = None

    @property
    def is_failing(self) -> bool:
        """Counts wait, and the last try to send them failed. The origin may still answer other calls."""
        return self.calls.is_failing and self.behind_since_s is not None

    def retry_now(self) -> None:
        """The origin answers again: do not wait for the end of a backoff."""
        self._retry_now.set()

    def statistics(self, now_s: float, *others: Calls) -> dict[str, object]:
        """The fields of `Statistics` about counts, and about calls to the origin: these and `others`."""
        calls = (self.calls, *others)
        return {
            "origin_operations": {name: n for each in calls for name, n in each.operations.items()},
            "origin_errors": {key: n for each in calls for key, n in each.errors.items()},
            "origin_latency": {name: one.snapshot() for each in calls for name, one in each.latency.items()},
            "origin_dirty_subjects": self._unacknowledged(),
            "replay_lag_s": 0.0 if self.behind_since_s is None else now_s - self.behind_since_s,
        }

    def wake(self) -> None:
        """There may be something to send. On the node's own event loop."""
        self.is_reporting = True
        self._woken.set()

    def _sent(self) -> Iterable[Subject]:
        """The subjects with counts in messages that have no answer yet. From any thread."""
        raise NotImplementedError

    def _unacknowledged(self) -> int:
        """How many subjects have counts that the origin has not acknowledged: to be sent, or on their way."""
        sent = {subject for subject in self._sent() if subject.table >= 0 and not subject.is_dirty}
        return len(self._pending.dirty) + len(sent)

    async def _report(self, waiting: int) -> tuple[int, int]:
        """One command: how many of the waiting subjects were looked at, and how much it carried."""
        raise NotImplementedError

    async def run_once(self) -> int:
        """Send what is dirty now, command by command; what becomes dirty meanwhile is for the next turn. Returns how
        much was acknowledged; raises a `DependencyError`."""
        sent = 0
        healing = True
        while healing:
            await run_sweep(self._gate, self._sweep)
            began_s = asyncio.get_running_loop().time()
            waiting = len(self._pending.dirty)
            if waiting and self.behind_since_s is None:
                self.behind_since_s = began_s
            while waiting > 0:
                taken, carried = await self._report(waiting)
                waiting -= taken
                sent += carried
                if carried >= self._full:
                    # There is more to send than one command carries: let other tasks run first. Not a timer: turns of
                    # an idle loop are over at once.
                    for _ in range(self._yields):
                        await asyncio.sleep(0)
            # All that was dirty then is acknowledged; what is dirty now came later.
            self.behind_since_s = began_s if self._pending.dirty else None
            # An answer showed a wipe: what that makes dirty belongs to this turn.
            healing = self._sweep.is_active
        return sent

    async def run(self) -> None:
        """The loop, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                sent = await self.run_once()
                self._backoff.succeeded()
            except DependencyError:
                self._retry_now.clear()
                await wait_for_event(self._retry_now, self._backoff.pause_s())
                continue
            if sent and self._interval_s > 0:
                await asyncio.sleep(max(0.0, self._interval_s - self._turns * (loop.time() - began_s)))
            await self._sleep()

    async def _sleep(self) -> None:
        self._woken.clear()
        self.is_reporting = False
        with self._gate:
            # Counts that became dirty before that have not woken the loop.
            is_idle = not self._pending.dirty and not self._sweep.is_active
        if is_idle:
            await self._woken.wait()
        self.is_reporting = True
