from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import Component, Heard
from tidegate.server.pacing import PacedOrigin

TURN_S = 0.05


class Recorder(MemoryOrigin):
    """Notes when each merge reached the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.merged_at: list[float] = []
        self.was_merged = asyncio.Event()

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        self.merged_at.append(asyncio.get_running_loop().time())
        self.was_merged.set()
        return await super().merge(components, timeout_s=timeout_s)


def cells(count: int, own: int = 1) -> list[Component]:
    return [Component(bytes([number] * 16), 1, "node", own, 1 << 60) for number in range(count)]


async def test_what_is_dirty_is_written_at_once_and_the_pause_comes_after_it() -> None:
    recorder = Recorder()
    paced = PacedOrigin(recorder, turn_s=TURN_S, cells_max=10)
    loop = asyncio.get_running_loop()
    called_at = loop.time()
    writing = loop.create_task(paced.merge(cells(3), timeout_s=10))
    await recorder.was_merged.wait()
    assert not writing.done(), "the next turn is held back, not this one"
    assert await writing == [Heard(1, 0)] * 3
    assert loop.time() - called_at >= TURN_S


async def test_merges_of_one_turn_follow_each_other_and_turns_keep_their_distance() -> None:
    recorder = Recorder()
    paced = PacedOrigin(recorder, turn_s=TURN_S, cells_max=10)
    for own in range(1, 4):
        full = asyncio.get_running_loop().create_task(paced.merge(cells(10, own), timeout_s=10))
        await asyncio.wait_for(full, 10)
        await paced.merge(cells(2, own), timeout_s=10)
    first, _, second, _, third, _ = recorder.merged_at
    assert second - first >= TURN_S
    assert third - second >= TURN_S


async def test_a_pause_leaves_a_call_time_to_answer() -> None:
    paced = PacedOrigin(Recorder(), turn_s=3_600, cells_max=10)
    loop = asyncio.get_running_loop()
    called_at = loop.time()
    assert await paced.merge(cells(1), timeout_s=0.1) == [Heard(1, 0)]
    assert loop.time() - called_at < 3_600
