"""Starting and stopping, with an origin in every possible state."""

from __future__ import annotations

import asyncio

import pytest

from tests.runtime.world import EPOCH_MS, HUNDRED_A_MINUTE, MILLION_AN_HOUR, Region, on_virtual_time, turns
from tidegate import AsyncLimiter, ConfigurationError, Limiter, Request
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.errors import Closed, DependencyError, RegionMismatch, SchemaMissing
from tidegate.runtime.importer import ImportLoop
from tidegate.testing.clock import ManualClock
from tidegate.testing.faults import FailingOrigin, TrackingOrigin
from tidegate.testing.limiters import make_async_limiter, make_limiter


def claimed_by(region: str) -> MemoryOrigin:
    origin = MemoryOrigin()
    origin.pulse_nowait(region)
    return origin.another()


@on_virtual_time
async def test_nothing_is_connected_before_the_first_request_and_then_it_starts_by_itself() -> None:
    region = Region()
    node = region.node()
    await turns()
    assert node.origin.calls == []
    assert node.limiter.limit_nowait(HUNDRED_A_MINUTE, "x") is None, "it has to start first"
    assert node.limiter.limit_many_nowait([Request(HUNDRED_A_MINUTE, "x")]) is None
    assert node.origin.calls == []
    await asyncio.gather(*(node.limiter.limit(HUNDRED_A_MINUTE, "x") for _ in range(10)))
    assert node.origin.count("open") == 1
    await node.limiter.start()
    await node.limiter.start()
    assert node.origin.count("open") == 1
    await node.limiter.stop()
    await node.limiter.stop()
    assert node.origin.closed == 1
    with pytest.raises(Closed):
        await node.limiter.limit(HUNDRED_A_MINUTE, "x")


@on_virtual_time
async def test_a_stop_during_the_start_ends_it() -> None:
    region = Region()
    node = region.node()
    node.faults.hang("open")
    starting = asyncio.ensure_future(node.limiter.start())
    await node.origin.until("open", 1)
    await node.limiter.stop()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert node.origin.in_flight["open"] == 0
    assert node.origin.closed == 1


async def test_an_origin_of_another_region_is_refused_at_the_start_with_both_names() -> None:
    origin = TrackingOrigin(claimed_by("ams"))
    limiter = AsyncLimiter(region="fra", origin=origin)
    with pytest.raises(RegionMismatch, match=r"'fra'.*'ams'"):
        await limiter.start()
    assert origin.closed == 1, "a limiter that never started leaves nothing open"
    with pytest.raises(RegionMismatch, match=r"'fra'.*'ams'"):
        await limiter.limit(HUNDRED_A_MINUTE, "x")
    with pytest.raises(RegionMismatch):
        async with limiter:
            raise AssertionError("entered")
    assert origin.count("merge") == 0
    await limiter.stop()


def test_an_origin_of_another_region_is_refused_by_a_thread_limiter_too() -> None:
    limiter = Limiter(region="fra", origin=claimed_by("ams"))
    for call in (limiter.start, lambda: limiter.limit(HUNDRED_A_MINUTE, "x"), limiter.__enter__):
        with pytest.raises(RegionMismatch, match=r"'fra'.*'ams'"):
            call()
    limiter.stop()


async def test_a_ledger_without_a_schema_is_refused_at_the_start_and_the_origin_is_released() -> None:
    class Bare(MemoryLedger):
        async def open(self, *, timeout_s: float) -> None:
            raise SchemaMissing("run tidegate migrate")

    origin = TrackingOrigin(MemoryOrigin())
    limiter = AsyncLimiter(region="fra", origin=origin, ledger=Bare())
    with pytest.raises(SchemaMissing, match="migrate"):
        await limiter.start()
    assert origin.closed == 1


@on_virtual_time
async def test_an_origin_that_is_down_at_the_start_is_not_an_error_and_is_used_later() -> None:
    region = Region()
    node, other = region.node(), region.node()
    node.faults.fail()
    await node.limiter.start()
    assert await node.accept("x", 5) == 5
    assert (await node.limiter.peek(MILLION_AN_HOUR, "x")).source == "degraded"
    health = {line.name: line for line in node.limiter.health()}
    assert not health["origin"].ok
    assert "injected failure" in health["origin"].detail
    await asyncio.sleep(20)
    assert node.origin.count("merge") == 0, "an origin that was never reached is not written to"
    node.faults.heal()
    await asyncio.sleep(7)
    assert await other.seen("x") == 5
    health = {line.name: line for line in node.limiter.health()}
    assert health["origin"].ok
    assert "clock offset 0 ms" in health["origin"].detail
    await region.stop()


@on_virtual_time
async def test_a_background_loop_that_ends_by_a_fault_of_ours_is_a_line_of_health(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(ImportLoop, "_note_answer", fail)
    region = Region(ledger=MemoryLedger())
    node = region.node(with_origin=False)
    await node.limiter.start()
    await turns()
    assert await node.accept("x", 5) == 5
    (line,) = [line for line in node.limiter.health() if line.name == "background loops"]
    assert not line.ok
    assert "ZeroDivisionError('a fault of ours')" in line.detail
    assert caplog.text.count("a background loop ended") == 1
    await region.stop()


@on_virtual_time
async def test_an_origin_that_turns_out_to_be_another_regions_is_not_used_until_that_is_fixed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = Region("fra")
    node = region.node()
    node.faults.fail()
    await node.limiter.start()
    await node.accept("x", 5)
    region.store.pulse_nowait("ams")
    node.faults.heal()
    await asyncio.sleep(30)
    assert node.origin.count("merge") == 0
    assert await node.accept("y", 1) == 1
    assert node.origin.count("read") == 0
    health = {line.name: line for line in node.limiter.health()}
    assert health["origin"] == type(health["origin"])("origin", False, "belongs to region 'ams'")
    assert caplog.text.count("belongs to region 'ams'") == 1, "logged once, not every second"
    region.store.wipe()
    await asyncio.sleep(10)
    other = region.node()
    assert (await other.seen("x"), await other.seen("y")) == (5, 1)
    await region.stop()


@on_virtual_time
async def test_an_origin_that_is_replaced_by_another_regions_at_run_time_is_not_used() -> None:
    region = Region("fra")
    node = region.node()
    await node.accept("x", 5)
    await turns()
    region.store.wipe()
    region.store.pulse_nowait("ams")
    await asyncio.sleep(1.5)
    merges = node.origin.count("merge")
    await node.accept("x", 5)
    await asyncio.sleep(20)
    assert node.origin.count("merge") == merges
    await region.stop()


@on_virtual_time
async def test_a_pulse_that_fails_later_does_not_stop_the_use_of_the_origin() -> None:
    region = Region()
    node = region.node()
    node.faults.fail("open")
    await node.limiter.start()
    await asyncio.sleep(1.5)
    node.faults.fail("pulse")
    await asyncio.sleep(3)
    assert (await node.limiter.limit(HUNDRED_A_MINUTE, "x")).source == "origin"
    await region.stop()


@on_virtual_time
async def test_a_ledger_that_hangs_keeps_no_request_waiting() -> None:
    loop = asyncio.get_running_loop()
    region = Region(ledger=MemoryLedger())
    node = region.node()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.hang()
    for _ in range(20):
        before_s = loop.time()
        assert await node.accept("x", 1) == 1
        assert loop.time() == before_s, "a request never waits for cross-region state"
        await asyncio.sleep(1)
    await region.stop()


@on_virtual_time
async def test_a_start_waits_for_a_hanging_ledger_only_so_long_and_the_ledger_is_opened_later() -> None:
    loop = asyncio.get_running_loop()
    ledger = MemoryLedger()
    region = Region(ledger=ledger)
    node = region.node()
    assert node.failing_ledger is not None and node.ledger is not None
    node.failing_ledger.faults.hang("open", times=1)
    await node.limiter.start()
    assert loop.time() == pytest.approx(3.0)
    assert not {line.name: line.ok for line in node.limiter.health()}["ledger"]
    await asyncio.sleep(1)
    assert {line.name: line.ok for line in node.limiter.health()}["ledger"]
    await asyncio.sleep(10)
    assert node.ledger.count("changes") >= 1
    await region.stop()


def test_a_limiter_whose_event_loop_ended_without_a_stop_continues_on_the_next_loop() -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    origin = FailingOrigin(store.another())
    limiter = make_async_limiter(region="fra", origin=origin, clock=clock)

    async def first() -> None:
        assert await limiter.limit(MILLION_AN_HOUR, "x", 3)
        origin.faults.fail("merge")
        assert await limiter.limit(MILLION_AN_HOUR, "x", 4)

    async def second() -> None:
        origin.faults.heal()
        assert (await limiter.limit(MILLION_AN_HOUR, "x")).effective == 8
        await limiter.stop()

    asyncio.run(first())
    asyncio.run(second())

    async def audit() -> int:
        async with make_async_limiter(region="fra", origin=store.another(), clock=clock) as other:
            return (await other.peek(MILLION_AN_HOUR, "x")).effective

    assert asyncio.run(audit()) == 8


def test_a_thread_limiter_starts_with_its_first_call_and_flushes_when_it_stops() -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    origin = TrackingOrigin(store.another())
    limiter = make_limiter(region="fra", origin=origin, clock=clock)
    assert origin.calls == []
    assert limiter.limit(MILLION_AN_HOUR, "x", 5).source == "origin"
    assert limiter.limit_many([Request(MILLION_AN_HOUR, "x"), Request(MILLION_AN_HOUR, "y")])
    assert origin.count("open") == 1
    limiter.start()
    limiter.stop()
    limiter.stop()
    assert origin.closed == 1
    with pytest.raises(Closed):
        limiter.limit(MILLION_AN_HOUR, "x")
    with make_limiter(region="fra", origin=store.another(), clock=clock) as other:
        assert other.peek(MILLION_AN_HOUR, "x").effective == 6


def test_a_thread_limiter_with_a_dead_origin_starts_and_decides() -> None:
    origin = FailingOrigin(MemoryOrigin())
    origin.faults.fail()
    with Limiter(region="fra", origin=origin) as limiter:
        assert limiter.limit(MILLION_AN_HOUR, "x").source == "degraded"
        assert "region 'fra'" in repr(limiter)


def test_a_limiter_that_never_started_can_be_stopped() -> None:
    limiter = Limiter(region="fra", origin=MemoryOrigin())
    limiter.stop()
    with pytest.raises(Closed):
        limiter.limit(MILLION_AN_HOUR, "x")
    with pytest.raises(Closed):
        limiter.start()


async def test_an_unexpected_error_of_an_adapters_open_is_raised() -> None:
    class Broken(MemoryOrigin):
        async def open(self, region: str, *, timeout_s: float) -> None:
            raise LookupError("a fault of the adapter")

    limiter = AsyncLimiter(region="fra", origin=Broken())
    with pytest.raises(LookupError):
        await limiter.start()
    assert not issubclass(LookupError, (DependencyError, ConfigurationError))


def levels_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.levelname for record in caplog.records if text in record.getMessage()]


@on_virtual_time
async def test_a_ledger_that_goes_down_later_is_degraded_at_the_next_import_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    region = Region(ledger=MemoryLedger())
    node = region.node()
    assert node.failing_ledger is not None
    await node.limiter.start()
    await asyncio.sleep(1)
    assert {line.name: line.ok for line in node.limiter.health()}["ledger"]
    node.failing_ledger.faults.fail()
    await asyncio.sleep(30)
    (line,) = [line for line in node.limiter.health() if line.name == "ledger"]
    assert not line.ok and line.detail != "reachable"
    assert caplog.text.count("the ledger does not answer") == 1
    node.failing_ledger.faults.heal()
    await asyncio.sleep(20)
    assert {line.name: line.ok for line in node.limiter.health()}["ledger"]
    assert levels_of(caplog, "the ledger answers again") == ["INFO"]
    await region.stop()


@on_virtual_time
async def test_an_origin_that_goes_down_later_is_logged_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    region = Region()
    node = region.node()
    await node.limiter.start()
    await asyncio.sleep(5)
    assert "the origin" not in caplog.text
    node.faults.fail()
    await asyncio.sleep(30)
    assert caplog.text.count("the origin does not answer") == 1
    node.faults.heal()
    await asyncio.sleep(10)
    assert levels_of(caplog, "the origin answers again") == ["INFO"]
    await region.stop()
