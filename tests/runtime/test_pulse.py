from __future__ import annotations

import asyncio

import pytest

from tests.runtime.world import EPOCH_MS, Region, on_virtual_time, turns
from tidegate.adapters.memory import MemoryOrigin
from tidegate.ports import Pulse
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter


@on_virtual_time
async def test_a_wiped_origin_is_noticed_without_traffic_and_gets_everything_back() -> None:
    region = Region()
    first, second = region.node(), region.node()
    for n in range(30):
        await first.accept(f"user {n}", 2)
        await second.accept(f"user {n}", 3)
    await turns()
    region.store.wipe()
    await asyncio.sleep(1.5)
    late = region.node()
    for n in range(30):
        assert await late.seen(f"user {n}") == 5
    assert first.limiter.statistics().origin_heals >= 30
    assert second.limiter.statistics().origin_heals >= 30, "also the node that did not find it empty"
    await region.stop()


@on_virtual_time
async def test_a_wiped_origin_is_noticed_at_the_first_answer_when_there_is_traffic() -> None:
    region = Region()
    node = region.node()
    node.faults.fail("pulse")
    for n in range(10):
        await node.accept(f"user {n}", 2)
    await turns()
    region.store.wipe()
    await node.accept("user 0", 1)
    await turns()
    late = region.node()
    assert await late.seen("user 0") == 3
    for n in range(1, 10):
        assert await late.seen(f"user {n}") == 2, "one lost component is evidence about every cell"
    await region.stop()


@on_virtual_time
async def test_an_origin_that_failed_over_to_an_older_copy_is_noticed_by_a_read_too() -> None:
    region = Region()
    node = region.node()
    await node.accept("x", 4)
    await turns()
    older = region.store.snapshot()
    await node.accept("x", 3)
    await node.accept("y", 5)
    await turns()
    region.store.restore(older)
    await asyncio.sleep(5.001)
    assert await node.seen("x") == 7, "views never fall"
    await turns()
    late = region.node()
    assert (await late.seen("x"), await late.seen("y")) == (7, 5)
    await region.stop()


@on_virtual_time
async def test_a_wipe_in_the_middle_of_the_healing_is_healed_too() -> None:
    region = Region(replay_cells_max=5)
    node = region.node()
    for n in range(40):
        await node.accept(f"user {n}", 1)
    await turns(60)
    region.store.wipe()
    await node.accept("user 0", 1)
    await node.origin.until("merge", node.origin.count("merge") + 3)
    region.store.wipe()
    await asyncio.sleep(3)
    late = region.node()
    for n in range(40):
        assert await late.seen(f"user {n}") == (2 if n == 0 else 1)
    await region.stop()


@pytest.mark.parametrize("offset_ms", [-250, 250])
async def test_a_clock_that_is_off_is_reported_once_and_not_corrected(
    offset_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = ManualClock(EPOCH_MS), ManualClock(EPOCH_MS - offset_ms)
    limiter = make_async_limiter(region="fra", origin=MemoryOrigin(clock=theirs), clock=mine)
    await limiter.start()
    pulse = limiter._parts.node.pulse if limiter._parts.node else None
    assert pulse is not None
    await pulse.run_once()
    await pulse.run_once()
    assert limiter.statistics().clock_offset_ms == -offset_ms
    assert caplog.text.count(f"the clock of this node is {offset_ms} ms off") == 1
    mine.set(theirs.now_ms() + 99)
    await pulse.run_once()
    mine.set(theirs.now_ms() + 101)
    await pulse.run_once()
    assert caplog.text.count("the clock of this node is") == 2, "logged again when it happens again"
    await limiter.stop()


@on_virtual_time
async def test_the_pulse_survives_whatever_the_adapter_raises(caplog: pytest.LogCaptureFixture) -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.fail("pulse", error=ZeroDivisionError("a fault of the driver"), times=1)
    await asyncio.sleep(3)
    assert "ZeroDivisionError" in caplog.text
    assert node.origin.count("pulse") >= 3
    assert {line.name: line.ok for line in node.limiter.health()}["origin"]
    await region.stop()


async def test_a_round_trip_that_took_long_says_nothing_about_the_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock(EPOCH_MS)

    class Slow(MemoryOrigin):
        late_ms = 0

        async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
            answer = await super().pulse(region, timeout_s=timeout_s)
            clock.advance(self.late_ms)
            return answer

    origin = Slow(clock=clock)
    limiter = make_async_limiter(region="fra", origin=origin, clock=clock)
    await limiter.start()
    pulse = limiter._parts.node.pulse if limiter._parts.node else None
    assert pulse is not None
    await pulse.run_once()
    assert limiter.statistics().clock_offset_ms == 0
    origin.late_ms = 1_200
    await pulse.run_once()
    assert limiter.statistics().clock_offset_ms == 0
    assert "check NTP" not in caplog.text
    await limiter.stop()
