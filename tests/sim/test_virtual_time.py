from __future__ import annotations

import asyncio
import logging

import pytest

from tidegate.sim import virtual_time
from tidegate.sim.virtual_time import LoopStalled, VirtualClock, VirtualLoop, owned_context, recorded_errors
from tidegate.testing.clock import ManualClock


def test_a_sleep_of_a_day_advances_virtual_time_by_a_day() -> None:
    loop = VirtualLoop()
    loop.run_until_complete(asyncio.sleep(86_400))
    assert loop.time() == 86_400
    loop.close()


def test_a_loop_in_which_every_task_waits_without_a_timer_is_stalled() -> None:
    loop = VirtualLoop()
    waiting = loop.create_task(asyncio.Event().wait())
    with pytest.raises(LoopStalled):
        loop.run_until_complete(waiting)
    waiting.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_loop_in_which_time_never_advances_is_stalled() -> None:
    loop = VirtualLoop()

    def spin() -> None:
        loop.call_soon(spin)

    spin()
    with pytest.raises(LoopStalled):
        loop.run_until_complete(asyncio.sleep(1))
    loop.close()


def test_a_loop_that_is_run_again_and_again_at_one_instant_is_not_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_time, "TURNS_MAX", 50)
    loop = VirtualLoop()
    for _ in range(100):
        loop.run_until_complete(asyncio.sleep(0))
    assert loop.time() == 0
    loop.close()


def test_a_loop_whose_time_is_moved_by_hand_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "TURNS_MAX", 50)
    loop = VirtualLoop()

    async def work() -> None:
        for step in range(1, 201):
            loop.advance_to(step / 1_000)
            await asyncio.sleep(0)

    loop.run_until_complete(work())
    assert loop.time() == 0.2
    loop.close()


def test_a_clock_has_an_offset_and_a_drift() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop, 1_000_000, offset_ms=-250, drift_ppm=1_000)
    loop.run_until_complete(asyncio.sleep(100))
    assert clock.now_ms() == 1_000_000 - 250 + 100_000 + 100
    loop.close()


def test_milliseconds_are_not_lost_in_sums_of_floats() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop, 0)

    async def steps() -> list[int]:
        seen = []
        for _ in range(1_000):
            await asyncio.sleep(0.001)
            seen.append(clock.now_ms())
        return seen

    assert loop.run_until_complete(steps()) == list(range(1, 1_001))
    loop.close()


def test_a_paused_process_does_nothing_until_it_is_resumed() -> None:
    loop = VirtualLoop()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(loop.time())

    async def main() -> None:
        loop.create_task(tick(), context=owned_context("a"))
        await asyncio.sleep(2.5)
        loop.pause("a")
        await asyncio.sleep(5)
        assert ticks == [1, 2]
        loop.resume("a")
        await asyncio.sleep(0.1)
        assert ticks == [1, 2, 7.5]
        loop.kill("a")
        await asyncio.sleep(5)
        assert ticks == [1, 2, 7.5]

    loop.run_until_complete(main())
    loop.close()


def test_a_timer_that_is_cancelled_right_after_a_pause_does_not_run() -> None:
    loop = VirtualLoop()
    calls: list[str] = []

    async def wait() -> None:
        timer = loop.call_later(2, calls.append, "cancelled")
        loop.call_later(1, timer.cancel)
        loop.call_later(3, calls.append, "kept")

    async def main() -> None:
        loop.create_task(wait(), context=owned_context("a"))
        await asyncio.sleep(0.5)
        loop.pause("a")
        await asyncio.sleep(5)
        loop.resume("a")
        await asyncio.sleep(0.1)
        assert calls == ["kept"]

    loop.run_until_complete(main())
    loop.close()


def test_killing_a_process_cancels_the_tasks_it_started() -> None:
    loop = VirtualLoop()
    ends: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ends.append("child")
            raise

    async def parent() -> None:
        await asyncio.gather(loop.create_task(child()), asyncio.sleep(100))

    async def main() -> None:
        loop.create_task(parent(), context=owned_context("a"))
        await asyncio.sleep(1)
        loop.kill("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert ends == ["child"]
    loop.close()


def test_errors_of_the_library_are_recorded_and_warnings_are_not() -> None:
    with recorded_errors() as errors:
        logging.getLogger("tidegate.runtime").warning("the origin is down")
        logging.getLogger("tidegate.runtime").error("a loop ended")
    assert errors == ["a loop ended"]


def test_a_manual_clock_moves_only_when_set_or_advanced() -> None:
    clock = ManualClock(5)
    assert clock.now_ms() == 5
    assert clock.advance(10) == clock.now_ms() == 15
    clock.set(3)
    assert clock.now_ms() == 3
    assert repr(clock) == "ManualClock(3)"
