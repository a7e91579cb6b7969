"""A single request and a batch of one get the same decision, although the usual single request has no judge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.model import LOCAL, Decision, Limit, Tuning
from tidegate.core.views import Growth

T = 1_700_000_000_000
WINDOW_MS = 1_000
LIMITS = [
    Limit(4, duration_ms=WINDOW_MS, namespace="default"),
    Limit(9, duration_ms=WINDOW_MS, namespace="default", on_outage="deny"),
    Limit(6, duration_ms=WINDOW_MS, namespace="default", shadow=True),
]


def change(engine: Engine, what: str, wall_ms: int, clock_ms: int) -> None:
    """What answers of the origin, imports and reservations do to the subject."""
    subject = engine.subjects.find(LIMITS[0].key, "a")
    if subject is None:
        return
    cell = subject.current
    assert cell.origin is not None
    if what == "grant":
        credit = engine.credit_of(subject)
        credit.spare = 3
        credit.wanted = 12
        credit.until_ms = clock_ms + 500
        credit.quota = 6
        credit.since_ms = wall_ms - 200
        credit.before_ms = wall_ms + 500
    elif what == "answer":
        cell.origin.answer(wall_ms, 5_000)
        cell.origin.answer_previous(wall_ms, 5_000)
    elif what == "failure":
        cell.origin.fail(wall_ms + 300)
    elif what == "others":
        cell.others += 1
    elif what == "growth" and cell.ledger is not None:
        cell.ledger.growth = Growth(wall_ms)
        cell.ledger.growth.over_ms = 100
        cell.ledger.growth.amount = 2
    elif what == "reserve":
        engine.subjects.reserve(LIMITS[0].key, "a", 1)


def shown(answer: object) -> object:
    if isinstance(answer, Decision):
        return repr(answer), answer.regional_age_ms, answer.global_age_ms
    return answer.reason if isinstance(answer, Need) else type(answer)


def state(engine: Engine) -> object:
    subject = engine.subjects.find(LIMITS[0].key, "a")
    assert subject is not None
    credit = subject.credit
    # Not the older ones: a batch drops some of what has aged out.
    cells = [
        (cell.sequence, cell.own, cell.ledger and cell.ledger.quota_min)
        for cell in (subject.current, subject.previous)
        if cell is not None
    ]
    pending = engine.pending
    return (
        cells,
        credit and (credit.spare, credit.spent, credit.is_dirty, credit.want(0, 0, 1)),
        (subject.queue, subject.touched_ms, subject.strict_until_ms, subject.is_dirty),
        [len(queue) for queue in (pending.dirty, pending.asking, pending.changed, pending.pressed)],
        (engine.allowed, engine.denied, engine.exceeded_in_shadow, engine.from_degraded),
    )


@pytest.mark.parametrize("has_ledger", [False, True])
@pytest.mark.parametrize("has_credit", [False, True])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["", "", "grant", "answer", "failure", "others", "growth", "reserve"]),
            st.sampled_from(LIMITS),
            st.integers(1, 3),
            st.sampled_from([0, 0, 10, 300, 900]),
            st.sampled_from([0, 0, 0, -150, 150]),
        ),
        max_size=30,
    )
)
def test_a_single_request_is_decided_as_a_batch_of_one(
    has_credit: bool, has_ledger: bool, steps: list[tuple[str, Limit, int, int, int]]
) -> None:
    # A usual request is decided without the judge: the two must agree, and leave the same behind.
    tuning = Tuning(ledger_duration_ms_min=1, touch_ms=500)
    single, batch = (
        Engine(tuning, node_id="n1", has_origin=True, has_ledger=has_ledger, has_credit=has_credit)
        for _ in range(2)
    )
    wall_ms = T
    for what, limit, cost, later_ms, ahead_ms in steps:
        wall_ms += later_ms
        now_ms, clock_ms = wall_ms + ahead_ms, wall_ms - T
        for engine in (single, batch):
            change(engine, what, wall_ms, clock_ms)
        answer = single.decide(limit, "a", cost, now_ms, LOCAL, clock_ms, wall_ms)
        expected: object
        if has_credit:
            found = batch.decide_all([(limit, "a", cost)], now_ms, clock_ms, wall_ms)
            expected = found[0] if isinstance(found, list) else found
        else:
            decisions, needs = batch.decide_many([(limit, "a", cost)], now_ms, LOCAL, wall_ms)
            expected = needs[0] if decisions is None else decisions[0]
        assert shown(answer) == shown(expected)
        assert state(single) == state(batch)
