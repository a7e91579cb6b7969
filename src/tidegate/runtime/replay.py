"""The replay loop: own counts to the origin, as a group commit.

As soon as there are dirty cells they are sent; what becomes dirty meanwhile is sent next. There is no timer (except
for an origin in a local file, see `Tuning.replay_interval_ms`) and no queue that could overflow: a count that is not
acknowledged stays in its cell. Merging is idempotent, so what failed or timed out is sent again. After a wipe of the
origin the cells are swept, in slices, and merged again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from tidegate.adapters.backoff import Backoff
from tidegate.core.cells import Subject
from tidegate.core.gate import Gate
from tidegate.core.model import OriginReply, Tuning
from tidegate.core.origin_sync import OriginSync, Replay
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls
from tidegate.runtime.loops import GroupCommit

__all__ = ["ReplayLoop"]

# Cells planned or acknowledged in one slice, and dirty subjects looked at for them: about a third of a millisecond on a
# busy core.
SLICE_CELLS: Final = 100
SLICE_SUBJECTS: Final = 400
# Turns of the event loop between two full commands. A command of 250 cells costs about 0.8 ms of it, a busy turn of
# decisions some 0.06 ms: replay then takes about a quarter at most, however fast the origin answers.
YIELDS: Final = 40


class ReplayLoop(GroupCommit):
    """Sends one node's components. `wake` starts a turn; `run_once` is one turn."""

    _yields = YIELDS
    # A count that is accepted now waits for the pause and the next turn, which will take about as long as this one:
    # together they fit into the interval. After an idle time nothing waits at all.
    _turns = 2

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
        calls = Calls("origin_replay", tuning, is_usable, carries="counts for the origin")
        interval_ms, full = tuning.replay_interval_ms, tuning.replay_cells_max
        super().__init__(gate, sync.pending, sync.sweep, calls, backoff, interval_ms, full)
        self._origin = origin
        self._sync = sync
        self._timeout_s = tuning.replay_timeout_ms / 1000
        self.cells_merged: int = 0
        # The command that has no answer yet, in slices.
        self._slices: deque[Replay] = deque()

    def _sent(self) -> Iterable[Subject]:
        for each in list(self._slices):
            for subject, component, acked in zip(each.subjects, each.components, each.acked, strict=True):
                if component.own > acked:
                    yield subject

    async def _merge(self, slices: Iterable[Replay]) -> list[OriginReply]:
        components = [component for each in slices for component in each.components]
        return await self.calls.call(
            ["replay"],
            lambda timeout_s: self._origin.merge(components, timeout_s=timeout_s),
            self._timeout_s,
        )

    async def _report(self, waiting: int) -> tuple[int, int]:
        """One command with as many of the waiting subjects as it can carry: how many of them, and how many cells.

        Planned and acknowledged in slices, with turns of the event loop between them.
        """
        sync, gate = self._sync, self._gate
        slices = self._slices = deque[Replay]()
        taken = cells = 0
        try:
            while taken < waiting and cells < self._full:
                if slices:
                    await asyncio.sleep(0)
                with gate:
                    dirty = len(sync.pending.dirty)
                    replay = sync.plan_replay(
                        gate.now_ms(), min(SLICE_CELLS, self._full - cells), SLICE_SUBJECTS
                    )
                    looked_at = dirty - len(sync.pending.dirty)
                # 0 when the waiting subjects were evicted meanwhile, and dropped from the queue.
                taken = taken + looked_at if looked_at else waiting
                if replay is not None:
                    slices.append(replay)
                    cells += len(replay.components)
            if not slices:
                return taken, 0
            left = (await self._merge(slices))[::-1]
            # Each slice is freed with its answers when it is done: to free thousands at once takes milliseconds.
            while slices:
                replay = slices[0]
                first = len(left) - len(replay.components)
                with gate:
                    sync.apply_replay(replay, left[first:][::-1], gate.now_ms())
                del slices[0], left[first:]
                if slices:
                    await asyncio.sleep(0)
            self.cells_merged += cells
        finally:
            with gate:
                while slices:
                    sync.fail_replay(slices.popleft())
        return taken, cells
