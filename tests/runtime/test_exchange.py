"""Credit through limiters: real engines and loops, in virtual time, on an origin in memory behind a network."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.credit_fleet import CreditFleet, FarOrigin
from tests.runtime.world import on_virtual_time
from tidegate import Decision, Request
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.runtime.pulse import PulseLoop
from tidegate.sim.node_process import parts_of


@pytest.mark.parametrize(
    ("nodes", "quota", "gap_ms"),
    [(2, 6, 50), (4, 6, 50), (8, 6, 50), (8, 6, 300), (8, 20, 50), (16, 100, 10)],
)
@on_virtual_time
async def test_one_after_the_other_exactly_the_quota_passes(nodes: int, quota: int, gap_ms: int) -> None:
    fleet = CreditFleet(nodes)
    await fleet.start()
    await fleet.round_robin(quota, gap_ms, 3 * quota + 2 * nodes)
    assert (fleet.accepted(), fleet.over) == (quota, 0)
    await fleet.stop()


@pytest.mark.parametrize(("nodes", "quota"), [(8, 5), (8, 100), (8, 1_000), (1, 1), (64, 1), (64, 100)])
@on_virtual_time
async def test_all_at_once_exactly_the_quota_passes(nodes: int, quota: int) -> None:
    fleet = CreditFleet(nodes)
    await fleet.start()
    await fleet.all_at_once(quota, max(2, 2 * quota // nodes))
    assert fleet.over == 0
    assert fleet.accepted() == quota
    await fleet.stop()


@on_virtual_time
async def test_a_batch_without_waiting_is_decided_once_credit_covers_it() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    batch = [Request(fleet.limit_of(1_000), name) for name in ("x", "y")]
    limiter = fleet.limiters[0]
    assert limiter.limit_many_nowait(batch) is None, "nothing is known of them"
    assert [decision.remaining for decision in await limiter.limit_many(batch)] == [999, 999]
    decisions = limiter.limit_many_nowait(batch)
    assert decisions is not None
    assert [decision.remaining for decision in decisions] == [998, 998]
    await fleet.stop()


@on_virtual_time
async def test_where_a_round_trip_is_slow_holders_have_longer_to_answer_a_recall() -> None:
    fleet = CreditFleet(2, latency_ms=(17, 17))
    await fleet.start()
    for _ in range(20):
        await fleet.ask(0, 100)
    await fleet.ask(1, 100)
    await asyncio.sleep(1)
    assert fleet.spare(0) > 0
    fleet.origins[0].latency_s = (0.05, 0.05)
    decision = await fleet.ask(1, 100, 79)
    assert decision, decision.retry_after_ms
    assert (fleet.over, fleet.accepted()) == (0, 100)
    await fleet.stop()


@on_virtual_time
async def test_a_busy_node_far_from_its_limit_does_not_wait() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    sources = []
    for index in range(2_000):
        sources.append((await fleet.ask(index % 2, 1_000_000)).source)
        await asyncio.sleep(0.0005)
    assert sources[1_000:] == ["local"] * 1_000
    assert fleet.limiters[0].statistics().credit_waits < 50
    await fleet.stop()


# -- what can be asked for


@given(
    nodes=st.sampled_from([1, 2, 3, 5, 8]),
    quotas=st.sampled_from([(1,), (3,), (10,), (57,), (10, 4), (100, 60, 30)]),
    costs=st.sampled_from([(1,), (1, 2), (1, 5, 9)]),
    duration_ms=st.sampled_from([1_000, 2_000, 60_000]),
    load=st.sampled_from([0.5, 1.0, 3.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_invariant_11_no_workload_passes_more_than_a_single_counter_would(
    nodes: int, quotas: tuple[int, ...], costs: tuple[int, ...], duration_ms: int, load: float, seed: int
) -> None:
    """Costs above 1, several limits on one counter, windows that roll over in the middle of it."""

    @on_virtual_time
    async def play() -> None:
        fleet = CreditFleet(nodes, duration_ms=duration_ms, seed=seed)
        await fleet.start()
        random = Random(seed)
        rate = load * max(quotas) / duration_ms * 1_000 / (sum(costs) / len(costs))
        asked: list[asyncio.Task[Decision]] = []
        end_s = 3 * duration_ms / 1_000
        loop = asyncio.get_running_loop()
        while loop.time() < end_s and len(asked) < 400:
            await asyncio.sleep(random.expovariate(rate))
            node, quota, cost = random.randrange(nodes), random.choice(quotas), random.choice(costs)
            asked.append(loop.create_task(fleet.ask(node, quota, cost)))
        await asyncio.gather(*asked)
        assert fleet.over == 0
        assert {decision.source for decision in fleet.decisions} <= {"local", "origin"}
        # A second after the traffic, nothing that fits is denied because of credit.
        await asyncio.sleep(1)
        left = max(quotas) - fleet.judge().effective(fleet.clock.now_ms())
        if left > 0:
            assert await fleet.ask(0, max(quotas), left)
        assert not await fleet.ask(nodes - 1, max(quotas), left + 1)
        await fleet.stop()

    play()


@on_virtual_time
async def test_beside_a_request_that_was_ahead_of_time_a_denial_is_prompt_and_says_when_to_come_back() -> (
    None
):
    """What is counted now weighs in full at the start of the next window, and that has counts already."""
    fleet = CreditFleet(2, duration_ms=10_000)
    await fleet.start()
    limit = fleet.limit_of(40)
    await fleet.ask(0, 40, 38)
    start_ms = (fleet.clock.now_ms() // 10_000 + 1) * 10_000
    assert await fleet.limiters[0].limit(limit, "x", 2, now_ms=start_ms + 400)
    await asyncio.sleep(0.1)
    sent = len(fleet.origins[1].messages)
    at_ms = fleet.clock.now_ms()
    decision = await fleet.limiters[1].limit(limit, "x", 1, now_ms=at_ms)
    assert (decision.allowed, decision.effective) == (False, 39)
    assert len(fleet.origins[1].messages) == sent + 1
    # 2 and the share of 38 that is at most 37.
    assert at_ms + decision.retry_after_ms == start_ms + 1
    await asyncio.sleep((decision.retry_after_ms - 2) / 1_000)
    assert not await fleet.limiters[1].limit(limit, "x", 1, now_ms=start_ms)
    assert await fleet.limiters[1].limit(limit, "x", 1, now_ms=start_ms + 1)
    await fleet.stop()


@on_virtual_time
async def test_a_peek_counts_nothing_and_sees_what_other_nodes_accepted() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for _ in range(4):
        await fleet.ask(0, 10)
    await asyncio.sleep(0.1)
    for _ in range(3):
        look = await fleet.ask(1, 10, 0)
        assert (look.effective, look.remaining, look.allowed) == (4, 6, True)
    await fleet.stop()


@pytest.mark.parametrize("cost", [0, 1])
@on_virtual_time
async def test_a_request_with_its_own_time_sees_a_window_that_this_node_has_not_asked_about(
    cost: int,
) -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    limit = fleet.limit_of(10)
    ahead_ms = fleet.clock.now_ms() + 2 * fleet.duration_ms
    await fleet.ask(1, 10)  # has credit from now on
    for _ in range(4):
        assert await fleet.limiters[0].limit(limit, "x", 1, now_ms=ahead_ms)
    await asyncio.sleep(0.1)
    seen = await fleet.limiters[1].limit(limit, "x", cost, now_ms=ahead_ms)
    assert (seen.effective, seen.source) == (4 + cost, "origin")
    await fleet.stop()


@on_virtual_time
async def test_a_window_that_rolls_over_while_a_request_waits_is_judged_at_its_own_instant() -> None:
    fleet = CreditFleet(4, duration_ms=1_000, latency_ms=(5, 20))
    await fleet.start()
    loop = asyncio.get_running_loop()
    asked = []
    for index in range(400):
        await asyncio.sleep(0.01)
        asked.append(loop.create_task(fleet.ask(index % 4, 20)))
    await asyncio.gather(*asked)
    assert fleet.over == 0
    # A sliding window of 20 per second over 4 s of more than enough traffic.
    assert 70 <= fleet.accepted() <= 100
    await fleet.stop()


# -- batches


@on_virtual_time
async def test_batches_of_several_nodes_take_all_or_nothing_and_never_exceed_a_limit() -> None:
    fleet = CreditFleet(6)
    await fleet.start()
    random = Random(3)
    batches = [
        [(30, name, random.choice((1, 2))) for name in random.sample(["a", "b", "c", "d"], 3)]
        for _ in range(300)
    ]
    loop = asyncio.get_running_loop()
    asked = []
    for index, items in enumerate(batches):
        asked.append(loop.create_task(fleet.ask_batch(index % 6, items)))
        if index % 10 == 0:
            await asyncio.sleep(0.002)
    answers = await asyncio.gather(*asked)
    assert fleet.over == 0
    allowed = [items for items, decisions in zip(batches, answers, strict=True) if all(decisions)]
    await asyncio.sleep(6)  # longer than an answer is recent enough for a peek
    for name in "abcd":
        counted = sum(cost for items in allowed for _, item, cost in items if item == name)
        assert counted == fleet.accepted(name) <= 30
        look = await fleet.ask(0, 30, 0, name)
        assert look.effective == counted, "a refused batch counts nothing"
    assert sum(fleet.accepted(name) for name in "abcd") > 80
    await fleet.stop()


@on_virtual_time
async def test_two_batches_that_need_what_the_other_holds_do_not_wait_for_each_other() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    await fleet.ask_batch(0, [(100, "a", 1)])
    await fleet.ask_batch(1, [(100, "b", 1)])
    first, second = await asyncio.gather(
        fleet.ask_batch(0, [(100, "a", 60), (100, "b", 60)]),
        fleet.ask_batch(1, [(100, "b", 60), (100, "a", 60)]),
    )
    assert all(first) != all(second), "one of them fits"
    assert fleet.over == 0
    await fleet.stop()


@on_virtual_time
async def test_what_a_refused_batch_was_granted_denies_no_other_request() -> None:
    fleet = CreditFleet(2, latency_ms=(1, 1))
    await fleet.start()
    assert await fleet.ask(1, 1, identifier="full")
    loop = asyncio.get_running_loop()
    batch = loop.create_task(fleet.ask_batch(0, [(1, "free", 1), (1, "full", 1)]))
    await asyncio.sleep(0.0005)
    single = loop.create_task(fleet.ask(1, 1, identifier="free"))
    assert [bool(decision) for decision in await batch] == [True, False]
    assert await single
    assert fleet.over == 0
    await fleet.stop()


@pytest.mark.parametrize("seed", range(4))
@on_virtual_time
async def test_batches_that_are_refused_leave_all_of_a_limit_to_others(seed: int) -> None:
    """At most 0.5 % of the limit may be refused although it fits, which is none of 100."""
    fleet = CreditFleet(6, seed=seed)
    await fleet.start()
    random = Random(seed)
    loop = asyncio.get_running_loop()
    names = ["a", "b", "c"]
    asked: list[asyncio.Task[Any]] = []
    # For each name: whether a single request passed, when it was asked and when it was answered.
    found: dict[str, list[tuple[bool, float, float]]] = {name: [] for name in names}

    async def single(node: int, name: str) -> None:
        began_s = loop.time()
        passed = bool(await fleet.ask(node, 100, identifier=name))
        found[name].append((passed, began_s, loop.time()))

    for turn in range(450):
        name = names[turn % 3]
        asked.append(loop.create_task(single(turn % 6, name)))
        batch = [(100, name, 1), (20, "scarce", 1)]
        asked.append(loop.create_task(fleet.ask_batch(random.randrange(6), batch)))
        await asyncio.sleep(random.expovariate(2_000))
    await asyncio.gather(*asked)
    assert fleet.over == 0
    assert [fleet.accepted(name) for name in names] == [100, 100, 100]
    for name in names:
        last_s = max(began_s for passed, began_s, _ in found[name] if passed)
        assert not [1 for passed, _, ended_s in found[name] if not passed and ended_s < last_s]
    await fleet.stop()


@on_virtual_time
async def test_a_batch_that_names_a_subject_twice_needs_credit_for_both() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    assert all(await fleet.ask_batch(0, [(10, "a", 6), (10, "a", 4)]))
    assert not any(await fleet.ask_batch(1, [(10, "a", 1), (10, "a", 1)]))
    refused = await fleet.ask_batch(1, [(10, "a", 1), (10, "b", 1)])
    assert [bool(decision) for decision in refused] == [False, True]
    assert (await fleet.ask(1, 10, 0, "b")).effective == 0
    await fleet.stop()


@on_virtual_time
async def test_a_batch_does_not_hold_up_others_on_a_subject_that_it_has_credit_for() -> None:
    fleet = CreditFleet(1, latency_ms=(20, 20))
    await fleet.start()
    for _ in range(50):
        await fleet.ask(0, 10_000, identifier="everyone")
    loop = asyncio.get_running_loop()
    batch = loop.create_task(fleet.ask_batch(0, [(10_000, "everyone", 1), (5, "newcomer", 1)]))
    await asyncio.sleep(0.001)
    began_s = loop.time()
    assert (await fleet.ask(0, 10_000, identifier="everyone")).source == "local"
    assert loop.time() == began_s
    assert all(await batch)
    await fleet.stop()


# -- callers that disconnect, nodes that join, leave and crash


@on_virtual_time
async def test_a_cancelled_caller_consumes_nothing_and_cancels_no_message() -> None:
    fleet = CreditFleet(2, latency_ms=(10, 10))
    await fleet.start()
    loop = asyncio.get_running_loop()
    callers = [loop.create_task(fleet.ask(0, 10)) for _ in range(8)]
    await asyncio.sleep(0.005)
    for caller in callers[:7]:
        caller.cancel()
    assert await callers[7]
    await asyncio.gather(*callers[:7], return_exceptions=True)
    assert (await fleet.ask(1, 10, 0)).effective == 1
    assert sum([bool(await fleet.ask(index % 2, 10)) for index in range(12)]) == 9
    await fleet.stop()


@on_virtual_time
async def test_a_node_that_stops_gives_its_credit_back_and_reports_its_counts() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for _ in range(50):
        await fleet.ask(0, 1_000)
    assert fleet.spare(0) > 0
    await fleet.limiters[0].stop()
    assert fleet.held() == 0
    assert await fleet.ask(1, 1_000, 950), "all that is left, at once"
    assert fleet.over == 0
    await fleet.stop()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (0, "stopped too early: credit was not given back"),
        (1, "stopped too early: 1 counts of 1 subjects did not reach the origin, credit was not given back"),
    ],
)
@on_virtual_time
async def test_a_stop_while_the_origin_is_down_says_what_was_not_sent(
    more: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    for _ in range(10):
        await fleet.ask(0, 1_000)
    await asyncio.sleep(1)
    fleet.origins[0].is_down = True
    for _ in range(more):
        await fleet.ask(0, 1_000)
    await fleet.limiters[0].stop(0.1)
    assert [one for one in caplog.messages if one.startswith(said)]
    await fleet.stop()


@on_virtual_time
async def test_the_credit_of_a_crashed_limiter_is_available_again_when_it_expires() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for _ in range(100):
        await fleet.ask(0, 1_000)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert fleet.spare(0) > 0
    fleet.crash(0)
    refused = await fleet.ask(1, 1_000, 900)
    assert not refused
    assert refused.source == "origin"
    assert refused.retry_after_ms is not None and refused.retry_after_ms <= 6_000
    await asyncio.sleep(6.1)
    assert await fleet.ask(1, 1_000, 900)
    assert fleet.over == 0
    await fleet.stop()


@on_virtual_time
async def test_a_node_that_recalls_do_not_reach_delays_others_no_longer_than_the_life_of_its_credit() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    fleet.origins[0].loses_recalls = True
    for _ in range(100):
        await fleet.ask(0, 1_000)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    refused = await fleet.ask(1, 1_000, 900)
    while not refused:
        assert refused.retry_after_ms is not None and 0 < refused.retry_after_ms <= 6_000
        await asyncio.sleep(refused.retry_after_ms / 1_000)
        refused = await fleet.ask(1, 1_000, 900)
    assert fleet.over == 0
    await fleet.stop()


@on_virtual_time
async def test_a_node_that_joins_gets_its_share_at_once() -> None:
    fleet = CreditFleet(2)
    await fleet.limiters[0].start()
    for _ in range(100):
        await fleet.ask(0, 1_000)
    await fleet.limiters[1].start()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await fleet.ask(1, 1_000, 100)
    assert loop.time() - began_s < 0.02
    assert fleet.over == 0
    await fleet.stop()


# -- an origin that does not answer, or forgets


@on_virtual_time
async def test_while_the_origin_is_down_decisions_come_from_memory_and_say_so() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for origin in fleet.origins:
        origin.is_down = True
    loop = asyncio.get_running_loop()
    for index in range(30):
        began_s = loop.time()
        decision = await fleet.ask(index % 2, 10)
        assert decision.source == "degraded" or not decision
        assert loop.time() - began_s <= 0.301
    assert fleet.accepted() == 20, "each node keeps the limit for itself"
    for origin in fleet.origins:
        origin.is_down = False
    await asyncio.sleep(6)
    assert [(await fleet.ask(node, 10, 0)).effective for node in (0, 1)] == [20, 20], (
        "nothing is lost or doubled"
    )
    await fleet.stop()


@on_virtual_time
async def test_a_limit_that_denies_on_an_outage_denies_what_it_has_no_credit_for() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    for _ in range(5):
        assert await fleet.ask(0, 1_000, on_outage="deny")
    spare = fleet.spare(0)
    fleet.origins[0].is_down = True
    decisions = [await fleet.ask(0, 1_000, on_outage="deny") for _ in range(spare + 20)]
    assert [bool(decision) for decision in decisions[:spare]] == [True] * spare
    for refused in decisions[spare + 5 :]:
        assert not refused
        assert refused.source == "degraded"
        assert refused.retry_after_ms is not None and 0 < refused.retry_after_ms <= 300
    assert (await fleet.ask(0, 1_000)).source == "degraded"
    await fleet.stop()


@on_virtual_time
async def test_a_message_whose_answer_was_lost_is_neither_counted_twice_nor_forgotten() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for _ in range(10):
        await fleet.ask(0, 100)
    fleet.origins[0].loses_answers = True
    for _ in range(10):
        await fleet.ask(0, 100)
    fleet.origins[0].loses_answers = False
    accepted = fleet.accepted()
    await asyncio.sleep(7)
    assert (await fleet.ask(1, 100, 0)).effective == accepted
    assert fleet.over == 0
    await fleet.stop()


@on_virtual_time
async def test_a_wipe_admits_at_most_the_credit_that_was_out_and_what_the_asking_node_did_not_know() -> None:
    worst = 0
    for seed in range(10):
        fleet = CreditFleet(4, seed=seed)
        await fleet.start()
        random = Random(seed)
        for _ in range(150):
            await fleet.ask(random.randrange(4), 200)
            await asyncio.sleep(0.002)
        out = fleet.held()
        fleet.store.wipe()
        for _ in range(400):
            await fleet.ask(random.randrange(4), 200)
            await asyncio.sleep(0.002)
        worst = max(worst, fleet.accepted() - 200 - out)
        await asyncio.sleep(1)
        totals = {(await fleet.ask(node, 200, 0)).effective for node in range(4)}
        assert totals == {fleet.accepted()}, "every node reports again"
        await fleet.stop()
    assert worst <= 20


@on_virtual_time
async def test_an_origin_that_fails_over_to_an_older_copy_gets_back_what_it_lost() -> None:
    fleet = CreditFleet(3)
    await fleet.start()
    for index in range(30):
        await fleet.ask(index % 3, 100)
        await asyncio.sleep(0.01)
    older = fleet.store.snapshot()
    for index in range(30):
        await fleet.ask(index % 3, 100)
        await asyncio.sleep(0.01)
    fleet.store.restore(older)
    for index in range(90):
        await fleet.ask(index % 3, 100)
        await asyncio.sleep(0.01)
    assert 100 <= fleet.accepted() <= 100 + 30
    await asyncio.sleep(1)
    assert {(await fleet.ask(node, 100, 0)).effective for node in range(3)} == {fleet.accepted()}
    await fleet.stop()


# -- memory


@on_virtual_time
async def test_a_subject_that_is_evicted_gives_its_credit_back() -> None:
    fleet = CreditFleet(1, subjects_max=2, touch_ms=1)
    await fleet.start()
    for name in ("a", "b", "c", "d"):
        assert await fleet.ask(0, 100, identifier=name)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    held = [
        hold.spare
        for record in fleet.store.snapshot().records.values()
        for hold in record.holds.values()
        if hold.spare > 0
    ]
    assert len(held) <= 2
    assert fleet.limiters[0].statistics().credit_releases >= 2
    for name in ("a", "b", "c", "d"):
        assert (await fleet.ask(0, 100, 0, name)).effective == 1
    await fleet.stop()


@on_virtual_time
async def test_a_subject_that_expired_with_credit_and_came_back_keeps_what_it_is_granted_then() -> None:
    fleet = CreditFleet(2, duration_ms=1_000)
    await fleet.start()
    subjects = parts_of(fleet.limiters[0]).engine.subjects
    await fleet.ask(0, 50, 5)
    await asyncio.sleep(0.01)
    assert fleet.spare(0) > 0
    while not subjects.released:  # until it expires; its credit is not given back yet
        await asyncio.sleep(0.01)
        subjects.expire(fleet.clock.now_ms(), 10)
    assert await fleet.ask(0, 50, 30)
    assert not await fleet.ask(1, 50, 30)
    assert (fleet.over, fleet.limiters[0].statistics().credit_releases) == (0, 0)
    await fleet.stop()


@on_virtual_time
async def test_a_recall_for_a_subject_that_was_forgotten_releases_its_hold() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    node = parts_of(fleet.limiters[0]).node
    assert node is not None and node.exchanges is not None
    node_id = fleet.limiters[0].statistics().node_id
    node.exchanges.on_recall(b"0123456789abcdef", f"{node_id}~7")
    node.exchanges.on_recall(b"0123456789abcdef", "another node")
    await asyncio.sleep(0.1)
    released = [message for message in fleet.origins[0].messages if message.digest == b"0123456789abcdef"]
    assert [(message.writer, message.held, message.want) for message in released] == [(f"{node_id}~7", 0, 0)]
    await fleet.stop()


@on_virtual_time
async def test_credit_that_cannot_be_given_back_is_not_tried_again_and_again() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    node = parts_of(fleet.limiters[0]).node
    assert node is not None and node.exchanges is not None
    fleet.origins[0].is_down = True
    node.exchanges.on_recall(b"0123456789abcdef", fleet.limiters[0].statistics().node_id)
    await asyncio.sleep(10)
    assert fleet.origins[0].commands == 1
    await fleet.stop()


@on_virtual_time
async def test_a_stop_in_the_middle_of_much_to_report_ends_without_an_error_and_forgets_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    loop = asyncio.get_running_loop()
    problems: list[object] = []
    loop.set_exception_handler(lambda _loop, context: problems.append(context))
    asked = [loop.create_task(fleet.ask(0, 1_000, identifier=f"user {number}")) for number in range(300)]
    await asyncio.sleep(0.01)
    for number in range(300):
        fleet.limiters[0].limit_nowait(fleet.limit_of(1_000), f"user {number}")
    await fleet.limiters[0].stop()
    await asyncio.sleep(1)
    await asyncio.gather(*asked)
    assert problems == []
    assert not caplog.records
    assert fleet.held() == 0
    assert (await fleet.ask(1, 1_000, 0, "user 7")).effective == 2
    await fleet.stop()


@on_virtual_time
async def test_thousands_of_new_subjects_at_once_open_no_breaker() -> None:
    """A server needs time for each command: messages queue at the node, and each request waits 300 ms at most."""
    fleet = CreditFleet(1, latency_ms=(0, 0))
    await fleet.start()
    lock = asyncio.Lock()
    exchange = fleet.origins[0].inner.exchange

    async def one_at_a_time(*args: Any, **options: Any) -> Any:
        async with lock:
            await asyncio.sleep(0.01)
            return await exchange(*args, **options)

    fleet.origins[0].inner.exchange = one_at_a_time  # type: ignore[method-assign] # a server that is busy
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    decisions = await asyncio.gather(*(fleet.ask(0, 10, identifier=f"user {n}") for n in range(10_000)))
    assert loop.time() - began_s <= 0.301
    assert all(decisions)
    served = sum(decision.source == "origin" for decision in decisions)
    assert served >= 2_000
    statistics = fleet.limiters[0].statistics()
    assert statistics.origin_errors == {}
    assert statistics.breaker_states["origin"] == 0
    await asyncio.sleep(5)
    assert statistics.origin_errors == {}
    await fleet.stop()


@pytest.mark.parametrize("rests", [0, 4])
def test_reports_rest_as_the_origin_says_and_not_while_the_node_stops(
    monkeypatch: pytest.MonkeyPatch, rests: int
) -> None:
    monkeypatch.setattr(FarOrigin, "rules", GrantRules(report_rests=rests))
    exchange = FarOrigin.exchange
    reports: list[tuple[float, float]] = []

    async def timed(
        self: FarOrigin, requests: Sequence[CreditRequest], *, timeout_s: float
    ) -> list[CreditReply]:
        began_s = asyncio.get_running_loop().time()
        replies = await exchange(self, requests, timeout_s=timeout_s)
        if not any(request.runs for request in requests):
            reports.append((began_s, asyncio.get_running_loop().time()))
        return replies

    monkeypatch.setattr(FarOrigin, "exchange", timed)

    @on_virtual_time
    async def run() -> None:
        fleet = CreditFleet(1, latency_ms=(1, 1))
        await fleet.start()
        await asyncio.gather(*(fleet.ask(0, 1_000, 1, f"subject {number}") for number in range(350)))
        await asyncio.sleep(1)
        pauses = [after[0] - before[1] for before, after in itertools.pairwise(reports)]
        assert len(pauses) >= 3
        assert all(pause >= rests * 0.0019 for pause in pauses)
        assert rests or max(pauses) < 0.006, "the interval of reports alone"
        reports.clear()
        await asyncio.gather(*(fleet.ask(0, 1_000, 1, f"subject {number}") for number in range(350)))
        await fleet.limiters[0].stop(2)
        pauses = [after[0] - before[1] for before, after in itertools.pairwise(reports)]
        assert len(pauses) >= 3
        assert max(pauses) < 0.001

    run()


@on_virtual_time
async def test_credit_for_a_request_with_its_own_time_in_another_window_is_not_spent_in_this_one() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    limit = fleet.limit_of(10)
    await fleet.round_robin(10, 5, 9)
    past_ms = fleet.clock.now_ms() - 10 * fleet.duration_ms
    for limiter in fleet.limiters:
        assert await limiter.limit(limit, "x", 1, now_ms=past_ms)
    for _ in range(3):
        await asyncio.gather(fleet.ask(0, 10), fleet.ask(1, 10))
    assert (fleet.accepted(), fleet.over) == (10, 0)
    await fleet.stop()


def messages_of(fleet: CreditFleet) -> int:
    return sum(len(origin.messages) for origin in fleet.origins)


@pytest.mark.parametrize("behind_ms", [3_500, -3_500, 60_000])
@on_virtual_time
async def test_clocks_far_from_that_of_the_origin_and_short_windows_cause_no_more_messages(
    behind_ms: int,
) -> None:
    """The origin has expired a cell that its nodes still count in: that is not a loss."""
    fleet = CreditFleet(2, duration_ms=1_000, behind_ms=behind_ms)
    await fleet.start()
    for index in range(500):
        await fleet.ask(index % 2, 10**6)
        await asyncio.sleep(0.02)
    assert messages_of(fleet) <= 1.1 * 500
    assert sum(limiter.statistics().origin_heals for limiter in fleet.limiters) == 0
    await fleet.stop()


async def messages_with_an_evicting_origin(requests: int) -> float:
    """Messages for each request, while every request evicts one key in twenty, the name of the region among them."""
    fleet = CreditFleet(2, duration_ms=60_000)
    await fleet.start()
    random = Random(1)
    for index in range(requests):
        await fleet.ask(index % 2, 10**6, identifier=f"x{random.randrange(300)}")
        fleet.evict(lambda: random.random() < 0.05)
        await asyncio.sleep(0.04)
    sent = messages_of(fleet)
    await fleet.stop()
    return sent / requests


@on_virtual_time
async def test_a_redis_that_evicts_keys_all_the_time_causes_few_messages() -> None:
    assert await messages_with_an_evicting_origin(3_000) < 4


@on_virtual_time
async def test_without_pauses_between_heals_it_would_cause_many(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once = PulseLoop.run_once

    async def heal_at_once(self: PulseLoop) -> None:
        is_empty = (await self._origin.pulse(self._region, timeout_s=1)).was_empty
        await run_once(self)
        if is_empty:
            self._sweep.start_heal()
            self._on_wiped()

    monkeypatch.setattr(PulseLoop, "run_once", heal_at_once)
    assert await messages_with_an_evicting_origin(1_000) > 8
