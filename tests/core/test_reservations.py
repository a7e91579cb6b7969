"""What a client can cost with reservations is bounded: at the origin, and in the memory of a node."""

from __future__ import annotations

import pytest

from tidegate import Limit, LimitExceeded
from tidegate.core import reservations
from tidegate.core.grants import Hold, SubjectRecord
from tidegate.core.reservations import GONE, HELD, HOLDS_MAX, Claim, claim
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


def test_a_node_has_a_bounded_number_of_reservations() -> None:
    limiter = make_limiter(clock=ManualClock(NOW_MS))
    engine = limiter._parts.engine
    for number in range(reservations.RESERVATIONS_MAX):
        engine.reservations.add(f"node+{number}", [(LIMIT, "ann", 1)], NOW_MS + 60_000)
    with pytest.raises(LimitExceeded, match="retry in 1 s"), limiter.reserve(LIMIT, "bob", 1):
        pass
    engine.reservations.drop("node+7")
    with limiter.reserve(LIMIT, "bob", 1):
        pass
