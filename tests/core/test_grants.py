from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.oracle import carried as exact_carried
from tidegate.core.credit import (
    ACCEPT,
    ASK_AGAIN,
    DENY,
    DENY_HELD,
    RUNS_MAX,
    WAIT,
    Credit,
    Waiter,
    retry_held_ms,
)
from tidegate.core.grants import (
    OUTDATED,
    CellPart,
    CreditReply,
    CreditRequest,
    GrantRules,
    Run,
    SubjectRecord,
    grant,
)

RULES = GrantRules()
DURATION_MS = 1_000
NOW_MS = 50_000
NOTHING = CreditReply(0, 0, 0, 0, -1, 0, ())


def message(
    writer: str = "a",
    number: int = 1,
    *,
    own: int = 0,
    previous: int = 0,
    quota: int = 100,
    as_of_ms: int = 10_500,
    runs: tuple[Run, ...] = (),
    want: int = 0,
    held: int = 0,
    foreign: int = 0,
) -> CreditRequest:
    sequence = as_of_ms // DURATION_MS
    cells = (CellPart(sequence, own, own, foreign), CellPart(sequence - 1, previous, previous))
    return CreditRequest(
        bytes(16), writer, number, DURATION_MS, cells, quota, as_of_ms, runs, want, held, RULES.life_ms
    )


def granted(record: SubjectRecord, request: CreditRequest, now_ms: int = NOW_MS) -> int:
    return grant(record, request, now_ms, RULES)[0].granted


# -- the origin


@given(
    previous=st.integers(0, 10**12), elapsed_ms=st.integers(0, DURATION_MS - 1), own=st.integers(0, 10**12)
)
def test_the_only_writer_is_granted_all_that_the_window_leaves(
    previous: int, elapsed_ms: int, own: int
) -> None:
    quota = own + previous + 7
    request = message(own=own, previous=previous, quota=quota, as_of_ms=10_000 + elapsed_ms, want=2 * quota)
    left = quota - own - exact_carried(previous, elapsed_ms, DURATION_MS)
    assert granted(SubjectRecord(), request) == left


def test_a_node_that_asks_in_advance_gets_a_quarter_of_what_is_left() -> None:
    record = SubjectRecord()
    assert granted(record, message("a", want=20)) == 20
    assert granted(record, message("b", want=90)) == 20  # (100 - 20) // 4


def test_each_waiting_request_is_judged_at_its_own_instant() -> None:
    """100 in the previous cell: 90 of it count at 10,100 and 10 at 10,900."""
    runs = (Run(10_100, 20, 1), Run(10_900, 20, 1))
    assert granted(SubjectRecord(), message(previous=100, as_of_ms=10_900, runs=runs)) == 20
    assert granted(SubjectRecord(), message(previous=100, as_of_ms=10_900, runs=(runs[1],))) == 20
    assert granted(SubjectRecord(), message(previous=100, as_of_ms=10_100, runs=(runs[0],))) == 0


def test_a_cheaper_request_behind_a_refused_one_is_granted() -> None:
    runs = (Run(10_500, 101, 1), Run(10_500, 40, 3))
    assert granted(SubjectRecord(), message(runs=runs)) == 80


def test_what_the_next_cell_counts_already_leaves_less_and_is_named() -> None:
    record = SubjectRecord()
    grant(record, message("ahead", own=10, as_of_ms=11_400), NOW_MS, RULES)
    asks = message("b", own=80, runs=(Run(10_500, 6, 2),))
    reply, recalled = grant(record, asks, NOW_MS, RULES)
    assert (reply.granted, reply.spare, reply.following, recalled) == (6, 0, 10, [])
    assert grant(record, message("c", as_of_ms=11_500), NOW_MS, RULES)[0].following == 0


def test_a_doubled_message_gets_the_same_answer_and_an_older_one_none() -> None:
    record = SubjectRecord()
    request = message(number=5, runs=(Run(10_500, 3, 1),))
    assert granted(record, request) == 3
    assert granted(record, request) == 3
    assert granted(record, message(number=4, own=2, want=50)) == OUTDATED
    assert record.cells[10].total == 2  # what it reported counts all the same
    assert record.holds["a"].spare == 3


def test_a_node_never_loses_what_it_keeps() -> None:
    record = SubjectRecord()
    granted(record, message("a", want=60))
    assert granted(record, message("a", 2, held=60, foreign=90)) == 60


def test_a_lower_quota_among_live_holds_bounds_what_others_get() -> None:
    record = SubjectRecord()
    assert granted(record, message("a", quota=10, want=4)) == 4
    reply, recalled = grant(record, message("b", quota=100, runs=(Run(10_500, 7, 1),)), NOW_MS, RULES)
    assert reply.granted == 0
    assert recalled == ["a"]
    assert granted(record, message("a", 2, quota=10)) == 0
    assert granted(record, message("b", 2, quota=100, runs=(Run(10_500, 7, 1),))) == 7


def test_what_waiting_requests_were_granted_is_not_recalled() -> None:
    record = SubjectRecord()
    assert granted(record, message("a", runs=(Run(10_500, 60, 1),))) == 60
    asks = message("b", runs=(Run(10_500, 50, 1),))
    reply, recalled = grant(record, asks, NOW_MS + 1, RULES)
    assert (reply.granted, reply.firm, recalled) == (0, 60, [])
    # It was not spent, and nothing is known of it: then it is credit like any other.
    _, recalled = grant(record, asks._replace(number=2), NOW_MS + RULES.firm_ms, RULES)
    assert recalled == ["a"]


def test_a_holder_that_does_not_answer_is_named_with_the_end_of_its_credit() -> None:
    record = SubjectRecord()
    granted(record, message("a", want=60))
    asks = message("b", runs=(Run(10_500, 50, 1),))
    assert grant(record, asks, NOW_MS + 100, RULES)[1] == ["a"]
    assert grant(record, asks._replace(number=2), NOW_MS + 101, RULES)[1] == []  # asked a moment ago
    reply, recalled = grant(record, asks._replace(number=3), NOW_MS + 150, RULES)
    assert (reply.stuck, reply.stuck_ms, recalled) == (60, 5_850, ["a"])
    assert granted(record, asks._replace(number=4), NOW_MS + 6_000) == 50


def test_a_recall_from_before_the_clock_was_set_back_does_not_count() -> None:
    record = SubjectRecord()
    record.recalled_at_ms = NOW_MS + 10_000
    assert granted(record, message(want=5)) == 5


# -- the node


def new_credit(spare: int, *, quota: int = 100, clock_ms: int = 0) -> Credit:
    credit = Credit()
    credit.wait(Waiter(10_500, 1, quota, 0))
    request = plan(credit, 1, clock_ms)
    credit.apply_reply(request, NOTHING._replace(granted=spare))
    credit.keep_waiting([])
    return credit


def plan(
    credit: Credit, number: int, clock_ms: int, now_ms: int = 10_500, rules: GrantRules = RULES
) -> CreditRequest:
    sequence = credit.sequence_of(now_ms, DURATION_MS)
    cells = (CellPart(sequence, 0), CellPart(sequence - 1, 0))
    return credit.plan_message(bytes(16), "a", number, DURATION_MS, cells, now_ms, clock_ms, rules)


def test_credit_is_spent_only_while_it_lives_under_its_quota_and_at_its_instant() -> None:
    credit = new_credit(5)
    assert credit.can_spend(5, 100, 10_500, 4_999)
    assert not credit.can_spend(6, 100, 10_500, 4_999)
    assert not credit.can_spend(5, 100, 10_500, 5_000)
    assert not credit.can_spend(5, 99, 10_500, 4_999)
    assert not credit.can_spend(5, 100, 10_499, 4_999)
    assert credit.can_spend(5, 100, 15_499, 4_999)
    assert not credit.can_spend(5, 100, 15_500, 4_999)  # a request with a time of its own
    credit.wait(Waiter(10_500, 9, 100, 0))
    assert not credit.can_spend(5, 100, 10_500, 4_999)


def test_a_request_of_cost_zero_needs_an_answer_about_its_own_time() -> None:
    credit = new_credit(5)
    assert credit.covers(0, 1, 10_500, 4_999)
    assert credit.covers(0, 1, 15_499, 4_999)
    assert not credit.covers(0, 1, 10_500, 5_000)
    assert not credit.covers(0, 1, 10_499, 4_999)
    assert not credit.covers(0, 1, 15_500, 4_999)


def test_a_waiting_request_further_ahead_than_credit_lives_asks_by_itself() -> None:
    credit = new_credit(5)
    ahead = Waiter(15_500, 1, 100, 0)
    assert credit.judge(ahead, 1, NOTHING, 1, True, 0) == ASK_AGAIN


def test_what_is_spent_while_the_message_is_under_way_is_part_of_its_grant() -> None:
    credit = new_credit(5)
    credit.spend(1, 0)
    request = plan(credit, 2, 1)
    credit.spend(1, 1)
    assert credit.apply_reply(request, NOTHING._replace(granted=9))
    assert credit.spare == 8


def test_an_answer_to_an_earlier_message_grants_nothing() -> None:
    credit = new_credit(5)
    late = plan(credit, 2, 1)
    credit.fail_message(2)
    plan(credit, 3, 2)
    assert not credit.apply_reply(late, NOTHING._replace(granted=50))
    assert credit.spare <= 5


def test_a_recalled_node_keeps_only_what_serves_its_waiting_requests() -> None:
    credit = new_credit(7)
    credit.wait(Waiter(10_500, 50, 100, 0))
    credit.wait(Waiter(10_500, 3, 100, 0))
    credit.recall()
    assert credit.is_recalled
    request = plan(credit, 2, 1)
    assert (request.held, request.want) == (3, 0)


def test_a_node_that_cannot_be_recalled_asks_for_nothing_in_advance() -> None:
    credit = Credit()
    cells = (CellPart(10, 0), CellPart(9, 0))
    request = credit.plan_message(
        bytes(16), "a", 1, DURATION_MS, cells, 10_500, 0, RULES, can_be_recalled=False
    )
    assert request.want == 0


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_a_message_has_a_bounded_size_and_asks_for_the_first_that_wait(costs: list[int]) -> None:
    credit = Credit()
    waiters = [Waiter(10_500 + index, cost, 10**6, 0) for index, cost in enumerate(costs)]
    for waiter in waiters:
        credit.wait(waiter)
    request = plan(credit, 7, 0)
    assert len(request.runs) <= RUNS_MAX
    asked = [waiter for waiter in waiters if waiter.asked == 7]
    assert asked == waiters[: len(asked)]
    assert sum(run.cost * run.requests for run in request.runs) == sum(waiter.cost for waiter in asked)
    assert request.as_of_ms == asked[-1].at_ms


def test_bursts_are_remembered_and_fade() -> None:
    credit = new_credit(10_000)
    for _ in range(500):
        credit.spend(1, 50)
    assert credit.want(60, 100, 1) == 1_500
    assert credit.want(1_050, 100, 1) > 1_100
    assert 400 < credit.want(4_300, 100, 1) < 600
    assert credit.want(2_000_000, 100, 1) == 1


def test_a_first_message_asks_for_as_many_average_costs_as_the_origin_says() -> None:
    for advance, quota, want in ((1, 10**6, 1), (8, 10**6, 8), (8, 128, 8), (8, 127, 1)):
        credit = Credit()
        credit.wait(Waiter(10_500, 1, quota, 0))
        assert plan(credit, 1, 0, rules=GrantRules(advance=advance)).want == want
    credit = new_credit(30)
    for _ in range(10):
        credit.spend(3, 0)
    assert credit.want(60, 10**6, 20) == 90
    assert credit.want(60, 10**6, 40) == 120


@pytest.mark.parametrize(
    ("effective", "spare", "reply", "is_patient", "verdict"),
    [
        (101, 9, NOTHING, True, DENY),
        (100, 1, NOTHING, True, ACCEPT),
        (90, 0, NOTHING._replace(spare=20), True, WAIT),
        (90, 0, NOTHING._replace(spare=20), False, DENY_HELD),
        (90, 0, NOTHING._replace(spare=20, firm=11), True, DENY),
        (90, 0, NOTHING._replace(spare=20, stuck=11, stuck_ms=700), True, DENY_HELD),
    ],
)
def test_the_outcomes_of_a_waiting_request(
    effective: int, spare: int, reply: CreditReply, is_patient: bool, verdict: int
) -> None:
    credit = Credit()
    waiter = Waiter(10_500, 1, 100, 0)
    credit.wait(waiter)
    reply = reply._replace(granted=spare)
    credit.apply_reply(plan(credit, 1, 0), reply)
    assert credit.judge(waiter, effective, reply, 1, is_patient, reply.stuck) == verdict
    late = Waiter(10_501, 20, 100, 0)
    assert credit.judge(late, 50, reply, 1, is_patient, reply.stuck) == ASK_AGAIN


def test_a_refusal_for_others_credit_names_the_next_moment_at_which_more_is_known() -> None:
    assert retry_held_ms(NOTHING._replace(spare=5), RULES, 5) == RULES.unanswered_ms
    assert retry_held_ms(NOTHING._replace(spare=5, stuck=5, stuck_ms=4_321), RULES, 5) == 4_321
    assert retry_held_ms(NOTHING._replace(spare=5, stuck=5, stuck_ms=4_321), RULES, 120) == 120


def test_what_is_accepted_without_credit_is_reported_and_spends_none() -> None:
    credit = new_credit(5)
    credit.count_without(3, 0)
    assert credit.spare == 5
    assert credit.is_dirty
