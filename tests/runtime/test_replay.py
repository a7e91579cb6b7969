from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.world import HUNDRED_A_MINUTE, MILLION_AN_HOUR, Region, clock, on_virtual_time, turns
from tidegate import Limit, Tuning
from tidegate.adapters.backoff import Backoff
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import Component, OriginReply
from tidegate.errors import DependencyUnavailable
from tidegate.runtime.replay import SLICE_CELLS, YIELDS
from tidegate.testing.faults import TrackingOrigin
from tidegate.testing.limiters import make_async_limiter


def sizes(arguments: list[object]) -> list[int]:
    return [len(one) for one in arguments if isinstance(one, list)]


def owns(argument: object) -> list[int]:
    assert isinstance(argument, list)
    components: list[Component] = argument
    return [component.own for component in components]


@on_virtual_time
async def test_dirty_cells_are_sent_at_once_and_without_any_timer() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    await node.accept("x")
    await node.origin.until("merge", 1)
    await turns()
    assert loop.time() == 0.0
    statistics = node.limiter.statistics()
    assert statistics.origin_cells_merged == 1
    assert statistics.origin_dirty_subjects == 0
    assert statistics.replay_lag_s == 0.0
    await region.stop()


@on_virtual_time
async def test_ten_thousand_requests_between_two_round_trips_cost_one_merge() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    await node.accept("x", 10_000)
    await turns()
    assert [owns(one) for one in node.origin.arguments("merge")] == [[10_000]]
    await region.stop()


@on_virtual_time
async def test_what_becomes_dirty_meanwhile_is_sent_next_and_one_merge_is_in_flight_at_a_time() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.hang("merge", times=1)
    await node.accept("x", 3)
    await node.origin.until("merge", 1)
    await node.accept("x", 4)
    await node.accept("y", 5)
    await turns()
    assert node.origin.count("merge") == 1
    # The first merge hangs until the loop ends it; then everything is sent, in one command.
    await node.origin.until("merge", 2)
    await turns()
    assert sorted(owns(node.origin.arguments("merge")[-1])) == [5, 7]
    assert node.origin.in_flight_max["merge"] == 1
    await region.stop()


@on_virtual_time
async def test_a_command_carries_a_bounded_number_of_cells() -> None:
    region = Region(replay_cells_max=250)
    node = region.node()
    await node.limiter.start()
    await asyncio.gather(*(node.limiter.limit(MILLION_AN_HOUR, f"user {n}") for n in range(1_130)))
    await turns(400)
    found = sizes(node.origin.arguments("merge"))
    assert sum(found) == 1_130
    assert max(found) <= 250
    assert len(found) == 5
    await region.stop()


@on_virtual_time
async def test_failed_cells_are_sent_again_with_backoff_until_they_are_acknowledged() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.fail("merge")
    await node.accept("x", 3)
    await node.origin.until("merge", 5)
    begun_s = [call.began_s for call in node.origin.calls if call.operation == "merge"]
    for failure, (one_s, next_s) in enumerate(pairwise(begun_s)):
        ceiling_s = min(5.0, 0.1 * 2**failure)
        assert ceiling_s / 2 - 1e-6 <= next_s - one_s <= ceiling_s + 1e-6
    assert node.limiter.statistics().replay_lag_s == loop.time() - begun_s[0]
    node.faults.heal()
    await asyncio.sleep(5.001)
    assert all(owns(one) == [3] for one in node.origin.arguments("merge"))
    assert node.limiter.statistics().origin_dirty_subjects == 0
    assert node.limiter.statistics().replay_lag_s == 0.0
    other = region.node()
    assert await other.seen("x") == 3
    await region.stop()


def test_two_nodes_do_not_retry_at_the_same_times() -> None:
    pauses = {Backoff(0.1, 5.0, Random(seed)).pause_s() for seed in range(50)}
    assert len(pauses) > 40


@on_virtual_time
async def test_a_merge_that_was_applied_but_timed_out_is_not_counted_twice() -> None:
    region = Region()
    node, other = region.node(), region.node()
    await node.limiter.start()
    node.faults.lose_answers("merge", times=3)
    await node.accept("x", 7)
    await node.origin.until("merge", 4)
    await turns()
    assert node.failing.faults.fired["merge"] == 3
    assert await other.seen("x") == 7
    assert await node.seen("x") == 7
    await region.stop()


@on_virtual_time
async def test_every_round_trip_brings_the_counts_of_others() -> None:
    region = Region()
    first, second = region.node(), region.node()
    await first.accept("x", 1)
    await second.accept("x", 10)
    await turns()
    await first.accept("x", 1)
    await turns()
    assert await first.seen("x") == 12, "learned from the answer to its own merge, without a read"
    assert first.origin.count("read") == 1
    await region.stop()


@on_virtual_time
async def test_stop_flushes_what_is_left() -> None:
    region = Region()
    node, other = region.node(), region.node()
    await node.limiter.start()
    await node.accept("x", 9)
    await node.limiter.stop()
    assert node.origin.closed == 1
    assert await other.seen("x") == 9
    await region.stop()


@on_virtual_time
async def test_stop_tries_again_after_a_failure_while_its_deadline_lasts() -> None:
    region = Region()
    node, other = region.node(), region.node()
    await node.limiter.start()
    node.faults.fail("merge", times=2)
    await node.accept("x", 9)
    await node.limiter.stop()
    assert node.failing.faults.fired["merge"] == 2
    assert await other.seen("x") == 9
    await region.stop()


@on_virtual_time
async def test_stop_gives_up_at_its_deadline() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.hang("merge")
    await node.accept("x", 9)
    await node.limiter.stop(timeout=0.7)
    assert loop.time() <= 0.7 + 1e-6
    assert node.origin.closed == 1
    hanging = region.node()
    await hanging.limiter.start()
    hanging.faults.hang("merge")
    await hanging.accept("x", 9)
    started_s = loop.time()
    await hanging.limiter.stop()
    assert loop.time() - started_s <= 2.0 + 1e-6, "two seconds by default"


@on_virtual_time
async def test_a_stop_in_the_middle_of_a_merge_loses_nothing() -> None:
    region = Region()
    node, other = region.node(), region.node()
    await node.limiter.start()
    node.faults.hang("merge", times=1)
    await node.accept("x", 4)
    await node.origin.until("merge", 1)
    await node.accept("y", 5)
    await node.limiter.stop()
    assert (await other.seen("x"), await other.seen("y")) == (4, 5)
    await region.stop()


@on_virtual_time
async def test_a_peek_is_never_replayed() -> None:
    region = Region()
    node = region.node()
    for _ in range(10):
        await node.seen("x")
    await turns()
    assert node.origin.count("merge") == 0
    await region.stop()


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 1),  # node
            st.sampled_from(["accept", "accept", "fail", "lose", "hang", "heal", "wipe", "time"]),
            st.sampled_from(["x", "y", "z"]),
            st.integers(1, 9),
        ),
        max_size=40,
    )
)
def test_whatever_happens_to_messages_all_nodes_agree_in_the_end_on_what_was_accepted(
    steps: list[tuple[int, str, str, int]],
) -> None:
    @on_virtual_time
    async def world() -> None:
        region = Region()
        nodes = [region.node(), region.node()]
        accepted = dict.fromkeys("xyz", 0)
        for number, verb, identifier, amount in steps:
            node = nodes[number]
            if verb == "accept":
                accepted[identifier] += await node.accept(identifier, amount)
            elif verb == "fail":
                node.faults.fail("read", "merge")
            elif verb == "lose":
                node.faults.lose_answers("merge", "read")
            elif verb == "hang":
                node.faults.hang("read", "merge")
            elif verb == "heal":
                node.faults.heal()
            elif verb == "wipe":
                region.store.wipe()
            else:
                await asyncio.sleep(amount / 3)
            await turns(3)
        for node in nodes:
            node.faults.heal()
        await asyncio.sleep(30)
        for node in nodes:
            for identifier, expected in accepted.items():
                assert await node.seen(identifier) == expected
        late = region.node()
        for identifier, expected in accepted.items():
            assert await late.seen(identifier) == expected
        await region.stop()

    world()


@on_virtual_time
async def test_one_subject_that_is_hammered_does_not_starve_the_others() -> None:
    region = Region(replay_cells_max=2)
    node, other = region.node(), region.node()
    await node.limiter.start()
    for n in range(40):
        await node.accept("hot", 1)
        await node.accept(f"quiet {n}", 1)
        await turns(2)
    await turns()
    for n in range(40):
        assert await other.seen(f"quiet {n}") == 1
    assert await other.seen("hot") == 40
    assert await other.accept("hot", 1, HUNDRED_A_MINUTE) == 1
    await region.stop()


@on_virtual_time
async def test_after_an_outage_the_first_pulse_ends_the_backoff() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node, other = region.node(), region.node()
    await node.limiter.start()
    node.faults.fail()
    await node.accept("x", 3)
    await asyncio.sleep(60)
    node.faults.heal()
    healed_s = loop.time()
    merges = node.origin.count("merge")
    await node.origin.until("merge", merges + 1)
    assert loop.time() - healed_s <= 1.001
    await turns()
    assert await other.seen("x") == 3
    await region.stop()


@on_virtual_time
async def test_between_two_full_commands_the_loop_gets_its_turns() -> None:
    region = Region(replay_cells_max=10)
    node = region.node()
    await node.limiter.start()
    node.faults.hang("merge")
    await node.accept("first", 1)
    await node.origin.until("merge", 1)
    await asyncio.gather(*(node.limiter.limit(MILLION_AN_HOUR, f"user {n}") for n in range(40)))
    node.faults.heal()
    gaps, since = [], 0
    while node.limiter.statistics().origin_dirty_subjects:
        merges = node.origin.count("merge")
        await asyncio.sleep(0)
        since += 1
        if node.origin.count("merge") > merges:
            gaps.append(since)
            since = 0
    assert sizes(node.origin.arguments("merge")) == [1, 10, 10, 10, 10]
    assert gaps[0] < 10, "one that is not full is followed at once"
    assert all(gap >= YIELDS for gap in gaps[1:])
    await region.stop()


class SlowOrigin(MemoryOrigin):
    """Needs time for every merge."""

    merge_s = 0.0

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        await asyncio.sleep(self.merge_s)
        return await super().merge(components, timeout_s=timeout_s)


@on_virtual_time
async def test_with_an_interval_counts_are_reported_together_and_each_within_it() -> None:
    loop = asyncio.get_running_loop()
    slow = SlowOrigin(clock=clock())
    slow.merge_s = 0.2
    origin = TrackingOrigin(slow)
    async with make_async_limiter(
        region="fra", origin=origin, clock=clock(), tuning=Tuning(credit=False, replay_interval_ms=900)
    ) as limiter:
        await limiter.limit(MILLION_AN_HOUR, "x")
        await origin.until("merge", 1)
        assert loop.time() == 0.0, "after a quiet moment nothing waits"
        accepted_at = [0.0]
        for _ in range(400):
            await asyncio.sleep(0.01)
            await limiter.limit(MILLION_AN_HOUR, "x")
            accepted_at.append(loop.time())
        sent = [
            (call.began_s + 0.2, owns(call.argument)[0]) for call in origin.calls if call.operation == "merge"
        ]
        for count, at_s in enumerate(accepted_at[:300], 1):
            assert min(sent_s for sent_s, own in sent if own >= count) - at_s <= 0.9 + 0.011
        assert len(sent) <= 2 + 4 / (0.9 - 0.2)


@on_virtual_time
async def test_a_turn_ends_with_what_was_dirty_when_it_began() -> None:
    slow = SlowOrigin(clock=clock())
    origin = TrackingOrigin(slow)
    tuning = Tuning(credit=False, replay_cells_max=10, replay_interval_ms=60_000)
    async with make_async_limiter(region="fra", origin=origin, clock=clock(), tuning=tuning) as limiter:
        slow.merge_s = 0.1
        await asyncio.gather(*(limiter.limit(MILLION_AN_HOUR, f"user {n}") for n in range(25)))
        for n in range(1_000):
            await asyncio.sleep(0.01)
            await limiter.limit(MILLION_AN_HOUR, f"later {n}")
        assert sizes(origin.arguments("merge")) == [10, 10, 10], "only the last command is filled up"
        slow.merge_s = 0.0
    assert sum(sizes(origin.arguments("merge"))) == 1_025


@on_virtual_time
async def test_a_large_command_is_planned_in_slices_and_a_stop_between_two_of_them_forgets_nothing() -> None:
    region = Region(replay_cells_max=10_000)
    node, other = region.node(), region.node()
    await node.limiter.start()
    node.faults.hang("merge")
    await node.accept("first")
    await node.origin.until("merge", 1)
    await asyncio.gather(*(node.limiter.limit(MILLION_AN_HOUR, f"user {n}") for n in range(1_000)))
    node.faults.heal()
    left = [1_000]
    while left[-1] > SLICE_CELLS:
        await asyncio.sleep(0)
        left.append(len(node.limiter._parts.engine.pending.dirty))
    assert max(before - after for before, after in pairwise(left)) <= SLICE_CELLS
    assert node.origin.count("merge") == 1, "the command waits for all its slices"
    await node.limiter.stop()
    assert [await other.seen(f"user {n}") for n in range(0, 1_000, 99)] == [1] * 11
    await region.stop()


@on_virtual_time
async def test_a_turn_ends_when_the_subjects_that_waited_are_forgotten_meanwhile() -> None:
    slow = SlowOrigin(clock=clock())
    origin = TrackingOrigin(slow)
    short = Limit("1000000/second", namespace="tests")
    tuning = Tuning(credit=False, replay_cells_max=2, replay_timeout_ms=60_000)
    async with make_async_limiter(region="fra", origin=origin, clock=clock(), tuning=tuning) as limiter:
        slow.merge_s = 20.0
        await asyncio.gather(*(limiter.limit(short, f"user {n}") for n in range(30)))
        await asyncio.sleep(19)
        # Their windows are over: they expire, and new subjects drop them from the queue.
        for n in range(100):
            await limiter.peek(short, f"later {n}")
        assert limiter.statistics().origin_dirty_subjects == 0
        await asyncio.sleep(60)
        assert sizes(origin.arguments("merge")) == [2]


@on_virtual_time
async def test_an_origin_that_answers_reads_but_takes_no_counts_shows_in_health_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tidegate.runtime.calls")
    region = Region()
    node = region.node()
    await node.limiter.start()
    await asyncio.sleep(1.5)
    node.failing.faults.fail("merge", error=DependencyUnavailable("READONLY"))
    await node.accept("x", 3)
    await asyncio.sleep(3)
    (line,) = [line for line in node.limiter.health() if line.name == "counts"]
    assert not line.ok and "wait in memory" in line.detail and "READONLY" in line.detail
    assert node.limiter.statistics().replay_lag_s > 2
    node.failing.faults.heal("merge")
    await asyncio.sleep(6)
    (line,) = [line for line in node.limiter.health() if line.name == "counts"]
    assert line.ok
    failing, again = caplog.messages
    assert "wait in memory" in failing and "READONLY" in failing
    assert again.endswith("arrive again")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    await region.stop()


@on_virtual_time
async def test_a_stop_says_what_it_could_not_send(caplog: pytest.LogCaptureFixture) -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.failing.faults.fail("merge", error=DependencyUnavailable("READONLY"))
    await node.accept("x", 3)
    await node.accept("y", 4)
    await region.stop()
    assert "stopped too early: 7 counts of 2 subjects did not reach the origin" in caplog.messages
