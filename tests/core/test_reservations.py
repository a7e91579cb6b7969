"""What a client can cost with reservations is bounded: at the origin, and in the memory of a node."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import suppress

import pytest

from tidegate import Limit, Limiter, Request
from tidegate.core import reservations
from tidegate.core.engine import Engine
from tidegate.core.grants import Hold, SubjectRecord
from tidegate.core.model import ORIGIN, Tuning
from tidegate.core.reservations import GONE, HELD, HOLDS_MAX, RESERVED_BYTES_MAX, Claim, claim
from tidegate.errors import TooManyReservations
from tidegate.testing import ManualClock
from tidegate.testing.limiters import make_limiter

NOW_MS = 4_102_444_800_000
LIMIT = Limit(10**9, duration_ms=60_000, namespace="tests")


def test_a_counter_has_a_bounded_number_of_holds() -> None:
    record = SubjectRecord()
    states = []
    for number in range(HOLDS_MAX + 5):
        name = f"node+{number}"
        record.holds[name] = Hold(1, 1, 1, NOW_MS, 10, NOW_MS + 5_000)
        entry = Claim(b"x" * 16, name, 60_000, NOW_MS // 60_000, 1, 60_000, False)
        states.append(claim(record, entry, False, NOW_MS).state)
    assert states == [HELD] * HOLDS_MAX + [GONE] * 5
    assert len(record.holds) == HOLDS_MAX


def test_an_expired_hold_is_gone_and_its_end_counts_nothing() -> None:
    record = SubjectRecord()
    record.holds["node+1"] = Hold(1, 5, 5, NOW_MS, 10, NOW_MS + 5_000)
    entry = Claim(b"x" * 16, "node+1", 60_000, NOW_MS // 60_000, 5, 60_000, True)
    assert claim(record, entry, False, NOW_MS + 5_000).state == GONE
    assert not record.cells


def test_reservations_that_have_ended_leave_nothing_behind() -> None:
    limiter = make_limiter(clock=ManualClock(NOW_MS))
    for number in range(5_000):
        with limiter.reserve(LIMIT, f"user {number}", 1, life=86_400):
            pass
    engine = limiter._parts.engine
    assert len(engine.reservations._due) <= reservations.ENDED_DUE_MAX + 3
    assert not engine.reservations._live and not engine.subjects.reserved


def test_the_origin_may_grant_a_reservation_of_a_counter_that_this_node_does_not_know() -> None:
    engine = Engine(Tuning(subjects_max=2), node_id="node", has_origin=True, has_credit=True)
    for number in range(5):
        engine.decide(LIMIT, f"evicted {number}", 0, NOW_MS)
    careful = Limit(10, duration_ms=60_000, namespace="tests", on_outage="deny")
    items = [(careful, "new", 3)]
    (decision,) = engine.reserve(items, "node+1", NOW_MS, NOW_MS, NOW_MS + 60_000, ORIGIN)
    assert decision.allowed and decision.source == "origin"


def limit_of(workspace: str) -> Limit:
    return Limit(10**9, duration_ms=60_000, namespace="tests", workspace=workspace)


def fill(limiter: Limiter, workspace: str) -> int:
    """Reserve large batches until the workspace may hold no more. Returns how much it holds then."""
    held = limiter._parts.engine.reservations
    before = held.budget.bytes
    batch = [Request(limit_of(workspace), "\N{WATER WAVE}" * 500 + str(n), 1) for n in range(20)]
    with suppress(TooManyReservations):
        while True:
            limiter.reserve_many(batch).__enter__()
    reservation = limiter.reserve_many(batch)
    with pytest.raises(TooManyReservations, match=f"{workspace}.* settle or release some"):
        reservation.__enter__()
    return held.budget.bytes - before


def test_a_tenant_that_reserves_all_it_can_leaves_room_for_the_others() -> None:
    limiter = make_limiter(clock=ManualClock(NOW_MS))
    shares = [fill(limiter, f"hostile {number}") for number in range(9)]
    assert shares[0] > 0.49 * RESERVED_BYTES_MAX
    assert sum(shares) == limiter._parts.engine.reservations.budget.bytes < RESERVED_BYTES_MAX
    with limiter.reserve(limit_of("honest"), "bob", 1):
        pass
    assert fill(limiter, "honest") > 50_000
    assert limiter._parts.engine.reservations.budget.bytes < RESERVED_BYTES_MAX


def test_reservations_that_have_ended_free_their_memory() -> None:
    clock = ManualClock(NOW_MS)
    limiter = make_limiter(clock=clock)
    share = fill(limiter, "tenant")
    engine = limiter._parts.engine
    engine.reservations.drop(next(iter(engine.reservations._live)))
    assert 0 < fill(limiter, "tenant") < share / 100
    clock.advance(60_000)
    assert fill(limiter, "tenant") == 0, "what it could take anew was due"
    assert engine.reservations.budget.bytes == share
    clock.advance(60_000)
    engine.reservations.expire(clock.now_ms())
    assert engine.reservations.budget.bytes == 0 and not engine.reservations.budget._by_workspace


@pytest.mark.parametrize("limits", [1, 5, 20])
@pytest.mark.parametrize("character", ["x", "\N{WATER WAVE}"])
def test_reservations_take_no_more_memory_than_is_estimated(limits: int, character: str) -> None:
    engine = make_limiter(clock=ManualClock(NOW_MS))._parts.engine
    limit = limit_of("tenant")
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2_000):
            items = [(limit, f"{character * 40} {number} {n}", 1) for n in range(limits)]
            engine.reservations.add(f"node+{number}", items, NOW_MS + 60_000 + number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < engine.reservations.budget.bytes
