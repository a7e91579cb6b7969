"""An origin that is written to in turns: for the embedded file, where each write competes with requests for one core.

A limiter replays as soon as something is dirty. Over a network that is right; into a file on the same core it would
spend more on telling than on deciding: nearly every request would be merged alone. In turns an identifier is merged
once a turn, whatever its rate.

The pause comes after the writing, never before: what is written is then as fresh as it can be, and a crash costs what
was accepted since the last turn began: one turn and the time that it takes to write. After a quiet moment nothing
waits at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.core.model import Component, Heard
from tidegate.ports import Origin, Pulse

__all__ = ["PacedOrigin"]

# Of the time that is left of a call, at most this part is waited away.
PAUSE_SHARE: Final = 0.6


class PacedOrigin:
    """`origin` with at least `turn_s` between the beginnings of two turns of merging."""

    def __init__(self, origin: Origin, *, turn_s: float, cells_max: int) -> None:
        self._origin = origin
        self._turn_s = turn_s
        # What the limiter sends at most in one merge: fewer mean that it has come to the end of what was dirty.
        self._cells_max = cells_max
        # When the first merge of this turn began; None between two turns.
        self._turn_began: float | None = None

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._turn_began is None:
            self._turn_began = began
        answers = await self._origin.merge(components, timeout_s=timeout_s)
        if len(components) < self._cells_max:
            now = loop.time()
            turn_ends, self._turn_began = self._turn_began + self._turn_s, None
            # The answer has come; waiting must not turn it into one that is late.
            pause_s = min(turn_ends - now, (began + timeout_s - now) * PAUSE_SHARE)
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        return answers

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
