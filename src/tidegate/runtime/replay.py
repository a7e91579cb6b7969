"""The replay loop: own counts to the origin, as a group commit.

As soon as there are dirty cells they are sent; what gets dirty meanwhile goes next. There is no timer and no queue
that could overflow: what is not acknowledged simply stays in its cell. Merging is idempotent, so whatever failed,
timed out or was cut off is sent again. After a wipe of the origin the cells are swept, in slices, and merged again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tidegate.core.convergence import Convergence, Replay
from tidegate.core.gate import Gate
from tidegate.core.model import Tuning
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls
from tidegate.runtime.loops import Backoff, wait_for_event

__all__ = ["ReplayLoop"]

# Slots looked at in one slice of a sweep: well below a millisecond.
SWEEP_SLOTS: Final = 1_000
# Turns of the event loop between two full commands. A command of 250 cells costs about 0.8 ms of it, a busy turn of
# decisions some 0.06 ms: replay then takes about a quarter at most, however fast the origin answers.
BREATHS: Final = 40


class ReplayLoop:
    """Sends one node's components. `wake` starts a turn; `run_once` is one turn."""

    def __init__(
        self, origin: Origin, gate: Gate, convergence: Convergence, tuning: Tuning, backoff: Backoff
    ) -> None:
        self._origin = origin
        self._gate = gate
        self._convergence = convergence
        self._cells_max = tuning.replay_cells_max
        self._timeout_s = tuning.replay_timeout_ms / 1000
        self._backoff = backoff
        self._woken = asyncio.Event()
        self._hopeful = asyncio.Event()
        # False only while the loop sleeps with nothing to do: whoever makes a cell dirty then must wake it.
        self.awake = True
        self.calls = Calls("origin_replay", tuning)
        self.cells_merged = 0
        # Since when there has been something unacknowledged; None when all is told.
        self.behind_since_s: float | None = None

    def wake(self) -> None:
        self.awake = True
        self._woken.set()

    def retry(self) -> None:
        """The origin was heard again: do not wait for the end of a backoff."""
        self._hopeful.set()

    async def run_once(self) -> int:
        """Send everything that is dirty now, chunk by chunk. Returns the cells merged; raises what failed."""
        merged = 0
        loop = asyncio.get_running_loop()
        while True:
            await self._sweep()
            with self._gate:
                replay = self._convergence.plan_replay(self._gate.now_ms(), self._cells_max)
            if replay is None:
                self.behind_since_s = None
                return merged
            planned_s = loop.time()
            if self.behind_since_s is None:
                self.behind_since_s = planned_s
            await self._send(replay)
            if len(replay.components) < self._cells_max:
                # All that was dirty then is told; what is dirty now came later.
                self.behind_since_s = planned_s
            merged += len(replay.components)
            if len(replay.components) >= self._cells_max:
                await self._breathe()

    async def _sweep(self) -> None:
        while self._convergence.sweeping:
            with self._gate:
                self._convergence.sweep(SWEEP_SLOTS)
            await asyncio.sleep(0)

    async def _breathe(self) -> None:
        """There is more to send than one command carries: let the loop do others' work first. Not a timer: turns of
        an idle loop are over at once."""
        for _ in range(BREATHS):
            await asyncio.sleep(0)

    async def _send(self, replay: Replay) -> None:
        acknowledged = False
        try:
            answers = await self.calls.through(
                ["replay"],
                lambda timeout_s: self._origin.merge(replay.components, timeout_s=timeout_s),
                self._timeout_s,
            )
            with self._gate:
                self._convergence.apply_replay(replay, answers, self._gate.now_ms())
            acknowledged = True
            self.cells_merged += len(answers)
        finally:
            if not acknowledged:
                with self._gate:
                    self._convergence.fail_replay(replay)

    async def run(self) -> None:
        """The loop, until cancelled."""
        while True:
            try:
                await self.run_once()
                self._backoff.succeeded()
            except DependencyError:
                self._hopeful.clear()
                await wait_for_event(self._hopeful, self._backoff.pause_s())
                continue
            await self._sleep()

    async def _sleep(self) -> None:
        self._woken.clear()
        self.awake = False
        with self._gate:
            # Whatever became dirty before `awake` fell was not announced.
            idle = not self._convergence.has_dirty and not self._convergence.sweeping
        if idle:
            await self._woken.wait()
        self.awake = True
