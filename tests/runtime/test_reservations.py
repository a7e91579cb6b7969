from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import on_virtual_time
from tidegate import InvalidInput, Limit, Limiter, LimitExceeded, Request
from tidegate.adapters import memory
from tidegate.core.grants import CreditReply, CreditRequest, SubjectRecord
from tidegate.core.reservations import ENDED, HELD, Claim, ClaimReply, claim, reserved_bytes
from tidegate.errors import DependencyError, DependencyTimeout
from tidegate.runtime.reserving import WAITING_BYTES_MAX
from tidegate.testing import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

MINUTE = Limit("100/minute", namespace="tokens")
DAY = Limit("150/day", namespace="tokens.day")
START_MS = 4_102_444_800_000


def embedded() -> tuple[Limiter, ManualClock]:
    clock = ManualClock(START_MS)
    return make_limiter(clock=clock), clock


def used(limiter: Limiter, limit: Limit = MINUTE) -> int:
    return limiter.usage(limit, "ann").own


def test_what_is_reserved_counts_until_it_is_settled_and_then_what_was_used() -> None:
    limiter, _ = embedded()
    with limiter.reserve(MINUTE, "ann", 60) as reservation:
        assert limiter.peek(MINUTE, "ann").remaining == 40
        assert not limiter.limit(MINUTE, "ann", 41)
        assert used(limiter) == 0, "a reservation is not a count"
        reservation.settle(25)
    assert used(limiter) == 25
    assert limiter.limit(MINUTE, "ann", 75)


def test_settling_higher_counts_the_excess_beyond_the_limit() -> None:
    limiter, _ = embedded()
    with limiter.reserve(MINUTE, "ann", 10) as reservation:
        reservation.settle(130)
    assert used(limiter) == 130
    denied = limiter.limit(MINUTE, "ann")
    assert not denied and denied.retry_after_ms is not None and denied.retry_after_ms > 60_000


def test_a_block_that_ends_without_settling_uses_its_estimate_and_one_that_fails_uses_nothing() -> None:
    limiter, _ = embedded()
    with limiter.reserve(MINUTE, "ann", 10):
        pass
    assert used(limiter) == 10
    with pytest.raises(ZeroDivisionError), limiter.reserve(MINUTE, "ann", 10):
        _ = 1 / 0
    assert used(limiter) == 10
    settled = limiter.reserve(MINUTE, "ann", 10)
    settled.settle(3)
    with pytest.raises(ZeroDivisionError), settled:
        _ = 1 / 0
    assert used(limiter) == 13
    with limiter.reserve(MINUTE, "ann", 10) as reservation:
        reservation.release()
    assert used(limiter) == 13
    assert limiter.peek(MINUTE, "ann").remaining == 87


def test_several_limits_are_reserved_all_or_nothing() -> None:
    limiter, _ = embedded()
    limiter.limit(DAY, "ann", 100)
    requests = [Request(MINUTE, "ann", 60), Request(DAY, "ann", 60)]
    with pytest.raises(LimitExceeded, match="150 per day") as caught, limiter.reserve_many(requests):
        pass
    assert [decision.allowed for decision in caught.value.decisions] == [True, False]
    assert limiter.peek(MINUTE, "ann").remaining == 100
    with limiter.reserve_many([Request(MINUTE, "ann", 40), Request(DAY, "ann", 40)]) as reservation:
        reservation.settle(30, 20)
    assert (used(limiter), used(limiter, DAY)) == (30, 120)
    with limiter.reserve_many([Request(MINUTE, "ann", 10), Request(DAY, "ann", 10)]) as reservation:
        reservation.settle(5)
    assert (used(limiter), used(limiter, DAY)) == (35, 125)


def test_a_reservation_that_is_never_settled_expires() -> None:
    limiter, clock = embedded()
    forgotten = limiter.reserve(MINUTE, "ann", 100, life=30)
    forgotten.__enter__()
    assert not limiter.limit(MINUTE, "ann")
    clock.advance(29_999)
    assert not limiter.limit(MINUTE, "ann")
    clock.advance(1)
    assert limiter.limit(MINUTE, "ann")
    forgotten.settle(7)
    forgotten.__exit__(None, None, None)
    assert used(limiter) == 8, "it was spent, late or not"


def test_a_reservation_lasts_for_its_shortest_window_by_default() -> None:
    limiter, clock = embedded()
    forgotten = limiter.reserve_many([Request(DAY, "ann", 100), Request(MINUTE, "ann", 100)])
    forgotten.__enter__()
    clock.advance(59_999)
    assert not limiter.limit(DAY, "ann", 51)
    clock.advance(1)
    assert limiter.limit(DAY, "ann", 51)
    forgotten.settle(0)
    forgotten.__exit__(None, None, None)


def test_a_reservation_outlives_the_windows_and_the_memory_of_its_subject() -> None:
    limiter, clock = embedded()
    with limiter.reserve(MINUTE, "ann", 70, life=3_600) as reservation:
        for _ in range(8):
            clock.advance(60_000)
            limiter.limit(MINUTE, "bob")
        assert limiter.peek(MINUTE, "ann").remaining == 30
        reservation.settle(1)
    assert limiter.peek(MINUTE, "ann").remaining == 99


@pytest.mark.parametrize("life", [0, -1, 86_401, "1", True, float("nan")])
def test_a_wrong_life_is_refused_and_nothing_is_reserved(life: float) -> None:
    limiter, _ = embedded()
    with pytest.raises(InvalidInput, match="life"):
        limiter.reserve(MINUTE, "ann", 1, life=life)


@pytest.mark.parametrize("actual", [(-1,), (1, 2), (True,), ("5",), ()])
def test_a_wrong_amount_is_refused(actual: tuple[int, ...]) -> None:
    limiter, _ = embedded()
    with limiter.reserve(MINUTE, "ann", 5) as reservation, pytest.raises(InvalidInput, match="actual"):
        reservation.settle(*actual)
    assert used(limiter) == 5


def test_tasks_reserve_in_the_same_way() -> None:
    async def run() -> None:
        limiter = make_async_limiter(clock=ManualClock(START_MS))
        async with limiter.reserve(MINUTE, "ann", 60) as reservation:
            assert (await limiter.peek(MINUTE, "ann")).remaining == 40
            with pytest.raises(LimitExceeded):
                async with limiter.reserve(MINUTE, "ann", 41):
                    pass
            reservation.settle(20)
        assert (await limiter.usage(MINUTE, "ann")).own == 20

    asyncio.run(run())


# -- nodes of a region


@on_virtual_time
async def test_a_counter_that_comes_twice_is_reserved_for_both() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    twice = [Request(rule, "x", 3), Request(rule, "x", 4)]
    async with fleet.limiters[0].reserve_many(twice) as reservation:
        answers = [await fleet.limiters[1].limit(rule, "x") for _ in range(5)]
        assert sum(map(bool, answers)) == 3
        reservation.settle(1, 2)
    answers = [await fleet.limiters[1].limit(rule, "x") for _ in range(6)]
    assert sum(map(bool, answers)) == 4, "3 were used of what was reserved"
    await fleet.stop()


@on_virtual_time
async def test_what_one_node_reserves_no_other_can_use() -> None:
    fleet = CreditFleet(3)
    await fleet.start()
    rule = fleet.limit_of(10)
    async with fleet.limiters[0].reserve(rule, "x", 7) as reservation:
        answers = [await fleet.limiters[n].limit(rule, "x") for n in (1, 2, 0, 1, 2)]
        assert sum(map(bool, answers)) == 3
        with pytest.raises(LimitExceeded):
            async with fleet.limiters[1].reserve(rule, "x", 1):
                pass
        reservation.settle(2)
    await asyncio.sleep(0.1)
    answers = [await fleet.limiters[n % 3].limit(rule, "x") for n in range(8)]
    assert sum(map(bool, answers)) == 5, "settling lower has freed the rest at once"
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_that_the_origin_refused_is_refused_even_if_letting_it_go_fails() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)

    async def fails(claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        raise DependencyTimeout("no answer")

    async with fleet.limiters[0].reserve(rule, "x", 8) as reservation:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet.origins[1], "claim", fails)
            assert not (await fleet.limiters[1].take([Request(rule, "x", 5)], 600_000)).name
        reservation.settle(0)
    await asyncio.sleep(10)
    assert await fleet.limiters[0].limit(rule, "x", 10), "the origin holds nothing of it"
    await fleet.stop()


@on_virtual_time
async def test_credit_that_other_nodes_do_not_need_is_given_back_for_a_reservation() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(100)
    for _ in range(5):
        await fleet.limiters[0].limit(rule, "x")
        await asyncio.sleep(0.01)
    async with fleet.limiters[1].reserve(rule, "x", 95) as reservation:
        assert not await fleet.limiters[0].limit(rule, "x")
        reservation.settle(95)
    assert not await fleet.limiters[0].limit(rule, "x")
    await fleet.stop()


@on_virtual_time
async def test_counts_that_are_not_reported_yet_are_not_counted_twice_by_a_reservation() -> None:
    fleet = CreditFleet(2, report_interval_ms=5_000)
    await fleet.start()
    rule = fleet.limit_of(100)
    for _ in range(10):
        await fleet.limiters[0].limit(rule, "x")
    for _ in range(3):
        await fleet.limiters[0].limit(rule, "x", 5)
        async with fleet.limiters[0].reserve(rule, "x", 5) as reservation:
            await fleet.limiters[0].limit(rule, "x", 5)
            reservation.settle(1)
    await asyncio.sleep(15)
    for limiter in fleet.limiters:
        assert (await limiter.usage(rule, "x")).regional == 10 + 3 * 11
    await fleet.stop()


@on_virtual_time
async def test_after_a_crash_a_reservation_ends_when_it_expires() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    await fleet.limiters[0].reserve(rule, "x", 10, life=30).__aenter__()
    fleet.origins[0].is_down = True  # for good
    assert not await fleet.limiters[1].limit(rule, "x")
    await asyncio.sleep(29)
    assert not await fleet.limiters[1].limit(rule, "x")
    await asyncio.sleep(1.1)
    assert await fleet.limiters[1].limit(rule, "x", 10)
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_that_another_node_has_ended_is_free_on_the_node_that_took_it() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    taken = await fleet.limiters[0].take([Request(rule, "x", 8)], 600_000)
    assert taken.name and taken.decisions[0].source == "origin"
    assert not await fleet.limiters[0].limit(rule, "x", 3)
    ending = await fleet.limiters[1].end(taken.name, [(rule, "x", 1)])
    assert ending.is_known
    await asyncio.sleep(0.2)
    assert await fleet.limiters[0].limit(rule, "x", 9), "settling lower frees the rest at once, on every node"
    assert (await fleet.limiters[0].usage(rule, "x")).regional == 10
    await fleet.stop()


@on_virtual_time
async def test_while_the_origin_does_not_answer_a_node_counts_what_it_has_reserved() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    taken = await fleet.limiters[0].take([Request(rule, "x", 8)], 20_000)
    fleet.origins[0].is_down = True
    await asyncio.sleep(6)
    denial = await fleet.limiters[0].limit(rule, "x", 3)
    assert (denial.allowed, denial.source, denial.effective) == (False, "degraded", 11)
    assert (await fleet.limiters[0].limit(rule, "x", 2)).source == "degraded"
    await asyncio.sleep(15)
    assert await fleet.limiters[0].limit(rule, "x", 8), "its life is over"
    assert taken.name
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_that_was_taken_without_an_answer_is_shared_when_the_origin_has_it() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    fleet.origins[0].loses_answers = True
    taken = await fleet.limiters[0].take([Request(rule, "x", 8)], 600_000)
    assert taken.decisions[0].source == "degraded"
    fleet.origins[0].loses_answers = False
    await asyncio.sleep(30)
    assert not await fleet.limiters[1].limit(rule, "x", 3), "longer than a message for credit holds it"
    assert (await fleet.limiters[1].end(taken.name, [(rule, "x", 1)])).is_known
    await asyncio.sleep(0.2)
    assert await fleet.limiters[0].limit(rule, "x", 9)
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_that_was_taken_without_an_answer_and_ended_elsewhere_is_free() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    fleet.origins[0].loses_answers = True
    taken = await fleet.limiters[0].take([Request(rule, "x", 8)], 600_000)
    fleet.origins[0].loses_answers = False
    assert (await fleet.limiters[1].end(taken.name, [(rule, "x", 1)])).is_known
    await asyncio.sleep(10)
    assert await fleet.limiters[0].limit(rule, "x", 9)
    assert (await fleet.limiters[0].usage(rule, "x")).regional == 10
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_that_the_origin_never_got_stays_in_the_memory_of_its_node() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(10)
    fleet.origins[0].is_down = True
    taken = await fleet.limiters[0].take([Request(rule, "x", 8)], 60_000)
    fleet.origins[0].is_down = False
    await asyncio.sleep(20)
    assert fleet.limiters[0]._parts.node.reserving._unsure == {}, (
        "asked for until no message can be on its way"
    )
    assert not (await fleet.limiters[1].end(taken.name, [(rule, "x", 1)])).is_known
    assert not await fleet.limiters[0].limit(rule, "x", 3)
    assert (await fleet.limiters[0].end(taken.name, [(rule, "x", 1)])).is_known
    await asyncio.sleep(10)
    assert (await fleet.limiters[1].usage(rule, "x")).regional == 1
    await fleet.stop()


@on_virtual_time
async def test_an_end_whose_answer_is_lost_is_counted_once() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(100)
    async with fleet.limiters[0].reserve(rule, "x", 50) as reservation:
        reservation.settle(30)
        fleet.origins[0].loses_answers = True
    assert (await fleet.limiters[1].usage(rule, "x")).regional == 30
    await asyncio.sleep(3)
    fleet.origins[0].loses_answers = False
    await asyncio.sleep(8)
    for limiter in fleet.limiters:
        assert (await limiter.usage(rule, "x")).regional == 30
        assert (await limiter.peek(rule, "x")).remaining == 70
    await fleet.stop()


@on_virtual_time
async def test_messages_that_arrive_after_later_ones_count_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(100)
    origin = fleet.origins[0]
    late: list[Callable[[], Awaitable[object]]] = []

    async def slow_exchange(requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        late.append(lambda: origin.inner.exchange(requests, timeout_s=timeout_s))
        raise DependencyTimeout("it is still on its way")

    async def slow_claim(claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        late.append(lambda: origin.inner.claim(claims, timeout_s=timeout_s))
        raise DependencyTimeout("it is still on its way")

    with monkeypatch.context() as patch:
        patch.setattr(origin, "exchange", slow_exchange)
        patch.setattr(origin, "claim", slow_claim)
        taken = await fleet.limiters[0].take([Request(rule, "x", 50)], 600_000)
        assert (await fleet.limiters[0].end(taken.name, [(rule, "x", 30)])).is_known
    await asyncio.sleep(3)
    for deliver in late:
        await deliver()
    await asyncio.sleep(15)
    for limiter in fleet.limiters:
        assert (await limiter.usage(rule, "x")).regional == 30
    await fleet.stop()


@on_virtual_time
async def test_an_end_that_the_origin_does_not_get_is_counted_when_it_answers_again() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(100)
    async with fleet.limiters[0].reserve(rule, "x", 50) as reservation:
        fleet.origins[0].is_down = True
        reservation.settle(80)
    assert (await fleet.limiters[0].peek(rule, "x")).remaining == 20, "known here at once"
    fleet.origins[0].is_down = False
    await asyncio.sleep(8)
    for limiter in fleet.limiters:
        assert (await limiter.usage(rule, "x")).regional == 80
    await fleet.stop()


@on_virtual_time
async def test_without_an_answer_of_the_origin_a_reservation_is_held_in_memory_and_counted_later() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    rule = fleet.limit_of(100)
    fleet.origins[0].is_down = True
    async with fleet.limiters[0].reserve(rule, "x", 60) as reservation:
        assert reservation.decisions[0].source == "degraded"
        assert (await fleet.limiters[0].peek(rule, "x")).remaining == 40
        reservation.settle(30)
    closed = fleet.limit_of(100, on_outage="deny")
    with pytest.raises(LimitExceeded):
        async with fleet.limiters[0].reserve(closed, "y", 1):
            pass
    fleet.origins[0].is_down = False
    await asyncio.sleep(20)
    assert (await fleet.limiters[1].usage(rule, "x")).regional == 30
    await fleet.stop()


@on_virtual_time
async def test_ends_that_wait_for_the_origin_have_a_bounded_size_and_all_are_counted() -> None:
    """A tenant with long names, windows that end soon, and an origin that does not answer."""
    fleet = CreditFleet(1)
    await fleet.start()
    fleet.origins[0].is_down = True
    (limiter,) = fleet.limiters
    rule = Limit(10**9, duration_ms=86_400_000, namespace="day")
    requests = [Request(rule, "\N{WATER WAVE}" * 500 + f"{n}", 1) for n in range(20)]
    size = reserved_bytes([(each.limit, each.identifier, each.cost) for each in requests])
    ends = WAITING_BYTES_MAX // size + 5
    for _ in range(ends):
        async with limiter.reserve_many(requests):
            pass
    assert limiter._parts.node is not None
    reserving = limiter._parts.node.reserving
    assert reserving is not None
    assert (
        WAITING_BYTES_MAX - size
        < len(reserving._waiting) * size
        == reserving._waiting_bytes
        <= WAITING_BYTES_MAX
    )
    assert rule.quota - (await limiter.peek(rule, requests[0].identifier)).remaining == ends
    fleet.origins[0].is_down = False
    await asyncio.sleep(20)
    assert (len(reserving._waiting), reserving._waiting_bytes) == (0, 0)
    assert (await limiter.usage(rule, requests[0].identifier)).regional == ends
    await fleet.stop()


@on_virtual_time
async def test_an_end_that_waits_for_the_origin_is_not_taken_for_one_of_other_counters() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    (limiter,) = fleet.limiters
    rule = fleet.limit_of(100)
    taken = await limiter.take([Request(rule, "ann", 60)], 3_600_000)
    fleet.origins[0].is_down = True
    assert await limiter.end(taken.name, [(rule, "ann", 25)]) == (True, False)
    assert await limiter.end(taken.name, [(rule, "ann", 25)]) == (True, True)
    with pytest.raises(DependencyError):
        await limiter.end(taken.name, [(rule, "eve", 25)])
    fleet.origins[0].is_down = False
    await asyncio.sleep(10)
    assert await limiter.end(taken.name, [(rule, "eve", 25)]) == (False, False)
    await fleet.stop()


def over_admission(seed: int, hurt: Callable[[CreditFleet], None] = lambda fleet: None) -> tuple[int, int]:
    """Nodes reserve, settle, release, forget and ask at random, with lost answers. Returns how far what was accepted
    and what was reserved at one instant exceeded the limit, and how much is held when all lives are over."""

    @on_virtual_time
    async def run() -> tuple[int, int]:
        random = Random(f"reservations {seed}")
        fleet = CreditFleet(3, seed=seed)
        await fleet.start()
        hurt(fleet)
        quota = random.choice([10, 100])
        # What is decided without an answer of the origin may be too much: here it is denied.
        rule = fleet.limit_of(quota, on_outage="deny")
        live: dict[int, int] = {}
        spent = worst = 0

        async def reserve(number: int, node: int) -> None:
            nonlocal spent, worst
            estimate = random.randint(1, quota // 2)
            actual = random.randint(0, estimate)
            try:
                async with fleet.limiters[node].reserve(rule, "x", estimate, life=20) as reservation:
                    live[number] = estimate
                    worst = max(worst, spent + sum(live.values()) - quota)
                    await asyncio.sleep(random.uniform(0, 0.5))
                    reservation.settle(actual)
                    spent += actual
                    del live[number]
            except LimitExceeded:
                pass

        async def ask(node: int) -> None:
            nonlocal spent, worst
            if await fleet.limiters[node].limit(rule, "x"):
                spent += 1
                worst = max(worst, spent + sum(live.values()) - quota)

        tasks = []
        for number in range(60):
            node = random.randrange(3)
            if random.random() < 0.2:
                origin = fleet.origins[node]
                origin.loses_answers = True
                asyncio.get_running_loop().call_later(0.05, setattr, origin, "loses_answers", False)
            work = reserve(number, node) if random.random() < 0.6 else ask(node)
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(random.uniform(0, 0.05))
        await asyncio.gather(*tasks)
        await asyncio.sleep(40)
        left = (await fleet.limiters[0].peek(rule, "x")).remaining
        counted = (await fleet.limiters[1].usage(rule, "x")).regional
        free = 0
        assert all(not origin.loses_answers for origin in fleet.origins)
        while await fleet.limiters[2].limit(rule, "x"):
            free += 1
        await fleet.stop()
        assert counted == spent, (seed, counted, spent)
        return worst, max(0, quota - spent - free) + abs(left - max(0, quota - spent))

    return run()


@pytest.mark.parametrize("seed", range(12))
def test_reservations_are_never_spent_twice_lost_or_kept_forever(seed: int) -> None:
    worst, stuck = over_admission(seed)
    assert stuck == 0
    assert worst <= 0


def forgets_ends(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
    """The end of a reservation is not remembered, and its hold stays: a repeated end counts again."""
    hold = record.holds.get(entry.holder)
    reply = claim(record, entry, False, now_ms)
    if reply.state == ENDED and hold is not None:
        record.holds[entry.holder] = hold
    return reply


def keeps_nothing(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
    """What is reserved can be granted to others."""
    reply = claim(record, entry, was_ended, now_ms)
    if reply.state == HELD:
        record.holds[entry.holder].spare = 0
    return reply


def counts_nothing(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
    """What was used is freed."""
    return claim(record, entry._replace(amount=0) if entry.is_final else entry, was_ended, now_ms)


@pytest.mark.parametrize("broken", [forgets_ends, keeps_nothing, counts_nothing])
def test_broken_variants_are_caught(
    broken: Callable[..., ClaimReply], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "claim", broken)
    caught = 0
    for seed in range(12):
        try:
            worst, stuck = over_admission(seed)
            caught += worst > 0 or stuck > 0
        except AssertionError:
            caught += 1
    assert caught > 0
