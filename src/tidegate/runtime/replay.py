"""The replay loop: own counts to the origin, as a group commit.

As soon as there are dirty cells they are sent; what becomes dirty meanwhile is sent next. There is no timer (except
for an origin in a local file, see `Tuning.replay_interval_ms`) and no queue that could overflow: a count that is not
acknowledged stays in its cell. Merging is idempotent, so what failed or timed out is sent again. After a wipe of the
origin the cells are swept, in slices, and merged again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidegate.adapters.backoff import Backoff
from tidegate.core.gate import Gate
from tidegate.core.model import Tuning
from tidegate.core.origin_sync import OriginSync, Replay
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls
from tidegate.runtime.loops import wait_for_event

__all__ = ["ReplayLoop"]

# Slots looked at in one slice of a sweep: well below a millisecond.
SWEEP_SLOTS: Final = 1_000
# Cells planned or acknowledged in one slice, and dirty subjects looked at for them: about a third of a millisecond on a
# busy core.
SLICE_CELLS: Final = 100
SLICE_SUBJECTS: Final = 400
# Turns of the event loop between two full commands. A command of 250 cells costs about 0.8 ms of it, a busy turn of
# decisions some 0.06 ms: replay then takes about a quarter at most, however fast the origin answers.
YIELDS: Final = 40


class ReplayLoop:
    """Sends one node's components. `wake` starts a turn; `run_once` is one turn."""

    def __init__(
        self,
        origin: Origin,
        gate: Gate,
        sync: OriginSync,
        tuning: Tuning,
        backoff: Backoff,
        *,
        is_usable: Callable[[], bool],
    ) -> None:
        self._origin = origin
        self._gate = gate
        self._sync = sync
        self._cells_max = tuning.replay_cells_max
        self._interval_s = tuning.replay_interval_ms / 1000
        self._timeout_s = tuning.replay_timeout_ms / 1000
        self._backoff = backoff
        self._woken = asyncio.Event()
        self._retry_now = asyncio.Event()
        # False only while the loop sleeps with nothing to do: a decision that makes a cell dirty then must wake it.
        self.awake: bool = True
        self.calls: Final[Calls] = Calls("origin_replay", tuning, is_usable, carries="counts for the origin")
        self.cells_merged: int = 0
        # Since when there have been unacknowledged counts; None when there are none.
        self.behind_since_s: float | None = None

    @property
    def is_failing(self) -> bool:
        """Counts wait, and the last try to send them failed. The origin may still answer reads."""
        return self.calls.is_failing and self.behind_since_s is not None

    def wake(self) -> None:
        self.awake = True
        self._woken.set()

    def retry_now(self) -> None:
        """The origin answers again: do not wait for the end of a backoff."""
        self._retry_now.set()

    async def run_once(self) -> int:
        """Send what is dirty now, command by command; what becomes dirty meanwhile is for the next turn. Returns how
        many cells were merged; raises a `DependencyError`."""
        merged = 0
        healing = True
        while healing:
            await self._sweep()
            began_s = asyncio.get_running_loop().time()
            waiting = len(self._sync.pending.dirty)
            if waiting and self.behind_since_s is None:
                self.behind_since_s = began_s
            while waiting > 0:
                taken, cells = await self._send(waiting)
                waiting -= taken
                merged += cells
                if cells >= self._cells_max:
                    await self._yield_to_loop()
            # All that was dirty then is acknowledged; what is dirty now came later.
            self.behind_since_s = began_s if self._sync.pending.dirty else None
            # An answer showed a wipe: what that makes dirty belongs to this turn.
            healing = self._sync.sweep.is_active
        return merged

    async def _sweep(self) -> None:
        while self._sync.sweep.is_active:
            with self._gate:
                self._sync.sweep.run(SWEEP_SLOTS)
            await asyncio.sleep(0)

    async def _yield_to_loop(self) -> None:
        """There is more to send than one command carries: let other tasks run first. Not a timer: turns of an idle
        loop are over at once."""
        for _ in range(YIELDS):
            await asyncio.sleep(0)

    async def _send(self, waiting: int) -> tuple[int, int]:
        """One command with as many of the waiting subjects as it can carry: how many of them, and how many cells.

        Planned and acknowledged in slices, with turns of the event loop between them.
        """
        sync, gate = self._sync, self._gate
        slices: list[Replay] = []
        taken = cells = acknowledged = 0
        try:
            while taken < waiting and cells < self._cells_max:
                if slices:
                    await asyncio.sleep(0)
                with gate:
                    dirty = len(sync.pending.dirty)
                    replay = sync.plan_replay(
                        gate.now_ms(), min(SLICE_CELLS, self._cells_max - cells), SLICE_SUBJECTS
                    )
                    looked_at = dirty - len(sync.pending.dirty)
                # 0 when the waiting subjects were evicted meanwhile, and dropped from the queue.
                taken = taken + looked_at if looked_at else waiting
                if replay is not None:
                    slices.append(replay)
                    cells += len(replay.components)
            if not slices:
                return taken, 0
            components = [component for each in slices for component in each.components]
            answers = await self.calls.call(
                ["replay"],
                lambda timeout_s: self._origin.merge(components, timeout_s=timeout_s),
                self._timeout_s,
            )
            start = 0
            for replay in slices:
                if start:
                    await asyncio.sleep(0)
                end = start + len(replay.components)
                with gate:
                    sync.apply_replay(replay, answers[start:end], gate.now_ms())
                start = end
                acknowledged += 1
            self.cells_merged += cells
        finally:
            if acknowledged < len(slices):
                with gate:
                    for replay in slices[acknowledged:]:
                        sync.fail_replay(replay)
        return taken, cells

    async def run(self) -> None:
        """The loop, until cancelled."""
        while True:
            try:
                began_s = asyncio.get_running_loop().time()
                merged = await self.run_once()
                self._backoff.succeeded()
            except DependencyError:
                self._retry_now.clear()
                await wait_for_event(self._retry_now, self._backoff.pause_s())
                continue
            if merged and self._interval_s > 0:
                # A count that is accepted now waits for this pause and the next turn, which will take about as long as
                # this one: together they fit into the interval. After an idle time nothing waits at all.
                took_s = asyncio.get_running_loop().time() - began_s
                await asyncio.sleep(max(0.0, self._interval_s - 2 * took_s))
            await self._sleep()

    async def _sleep(self) -> None:
        self._woken.clear()
        self.awake = False
        with self._gate:
            # Counts that became dirty before `awake` was False have not woken the loop.
            idle = not self._sync.pending.dirty and not self._sync.sweep.is_active
        if idle:
            await self._woken.wait()
        self.awake = True
