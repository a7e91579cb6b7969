"""An origin that is written to in turns: for the embedded file, where each write competes with requests for one core.

A limiter replays as soon as something is dirty. Over a network that is right; into a file on the same core it would
spend more on telling than on deciding: nearly every request would be merged alone. In turns an identifier is merged
once a turn, whatever its rate, and what a crash can lose is one turn. After a quiet moment nothing waits at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tidegate.core.model import Component, Heard
from tidegate.ports import Origin, Pulse

__all__ = ["PacedOrigin"]


class PacedOrigin:
    """`origin` with at least `turn_s` between the ends of two turns of merging."""

    def __init__(self, origin: Origin, *, turn_s: float, cells_max: int) -> None:
        self._origin = origin
        self._turn_s = turn_s
        # What the limiter sends at most in one merge: fewer mean that it has come to the end of what was dirty.
        self._cells_max = cells_max
        self._turn_ended_at = float("-inf")

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        loop = asyncio.get_running_loop()
        if len(components) < self._cells_max:
            pause_s = min(self._turn_ended_at + self._turn_s - loop.time(), timeout_s / 2)
            if pause_s > 0:
                await asyncio.sleep(pause_s)
                timeout_s -= pause_s
            self._turn_ended_at = loop.time()
        return await self._origin.merge(components, timeout_s=timeout_s)

    # All else as it is.

    async def open(self, region: str, *, timeout_s: float) -> None:
        await self._origin.open(region, timeout_s=timeout_s)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        return await self._origin.read(wanted, timeout_s=timeout_s)

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        return await self._origin.pulse(region, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._origin.close()

    def statistics(self) -> Mapping[str, int]:
        return self._origin.statistics()
