"""What one workspace may cost in one turn of the event loop; what goes beyond it waits for the next turn.

A turn also runs what the turn before has let through, so that it takes at most twice the budget.

A look-up among many patterns takes milliseconds, and a batch has 100 of them. The caller who needs that much waits
for it; the others get their answers between two of its turns. It knows no patterns: costs are numbers.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TurnBudget:
    """Used by the loop's thread only."""

    __slots__ = ("_cost_max", "_is_scheduled", "_left", "_waiting")

    def __init__(self, cost_max: int) -> None:
        self._cost_max = cost_max
        # What is left of this turn, by workspace; only of those that used some of it.
        self._left: dict[str, int] = {}
        # Who waits for a later turn, in order. A workspace that is in here has nothing left.
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._is_scheduled = False

    def take(self, workspace_id: str, cost: int) -> bool:
        """Whether `cost` may be spent in this turn. The last one of a turn may cost more than is left."""
        left = self._left.get(workspace_id, self._cost_max)
        if left <= 0 or workspace_id in self._waiting:
            return False
        self._left[workspace_id] = left - cost
        self._schedule()
        return True

    async def wait(self, workspace_id: str, cost: int) -> None:
        """Until `cost` may be spent, after all others of the workspace that came before."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(workspace_id, deque()).append((turn, cost))
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A new turn."""
        self._is_scheduled = False
        self._left.clear()
        for workspace_id, waiting in list(self._waiting.items()):
            left = self._cost_max
            while waiting and left > 0:
                turn, cost = waiting.popleft()
                if not turn.done():  # else its client is gone
                    turn.set_result(None)
                    left -= cost
            self._left[workspace_id] = left
            if not waiting:
                del self._waiting[workspace_id]
        if self._left:
            self._schedule()
