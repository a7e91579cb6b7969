from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.model import make_limit
from tidegate.server.api.recording import IDENTIFIERS_MAX, RECORDS_EACH_MAX, Recording

LIMIT = make_limit(5, 60_000, "rlns_1", "w")
OTHER = make_limit(5, 60_000, "rlns_2", "w")


def add(recording: Recording, identifier: str, now_ms: int, times: int = 1) -> None:
    followed = recording.followed.get(identifier) or recording.follow(identifier, now_ms / 1000)
    for _ in range(times if followed else 0):
        assert followed is not None
        followed.add(LIMIT, 1, True, now_ms)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 2), st.booleans()), max_size=60))
def test_every_request_of_a_followed_identifier_is_counted_once(asked: list[tuple[int, int, bool]]) -> None:
    recording = Recording()
    followed = recording.follow("user", 0.0)
    assert followed is not None
    now_ms = 0
    for later_ms, cost, allowed in asked:
        now_ms += later_ms
        followed.add(LIMIT, cost, allowed, now_ms)
    found = list(recording.runs("w", "rlns_1", 0))
    for cost in (1, 2):
        for allowed in (False, True):
            counted = sum(row[6] for row in found if row[2] == cost and row[5] is allowed)
            assert counted == sum(1 for _, *rest in asked if rest == [cost, allowed])
    assert all(row[2] > 0 for row in found), "a request that consumes nothing is not replayed"


def test_requests_of_one_second_are_one_record() -> None:
    recording = Recording()
    add(recording, "busy", 1_000, 10_000)
    add(recording, "busy", 1_999, 10_000)
    add(recording, "busy", 2_000)
    found = [(row[1], row[6]) for row in recording.runs("w", "rlns_1", 0)]
    assert found == [(1_000, 20_000), (2_000, 1)]


def test_memory_is_bounded_whatever_callers_send() -> None:
    recording = Recording()
    for number in range(20_000):
        add(recording, f"random-{number}", number * 100)
        add(recording, "hammering", number * 1_000)
    assert len(recording.followed) <= IDENTIFIERS_MAX
    assert all(len(each.records) <= RECORDS_EACH_MAX for each in recording.followed.values())
    assert recording.has_left_out


def test_random_identifiers_do_not_push_out_a_busy_one() -> None:
    recording = Recording()
    for second in range(100):
        add(recording, "busy", second * 1_000, 20)
        for number in range(500):
            add(recording, f"random-{second}-{number}", second * 1_000)
    assert sum(row[6] for row in recording.runs("w", "rlns_1", 0) if row[0] == "busy") == 2_000


def test_only_the_namespace_and_the_time_that_are_asked_for_are_shown() -> None:
    recording = Recording()
    followed = recording.follow("user", 0.0)
    assert followed is not None
    followed.add(LIMIT, 1, True, 1_000)
    followed.add(OTHER, 1, True, 2_000)
    followed.add(LIMIT, 1, True, 3_000)
    assert [row[1] for row in recording.runs("w", "rlns_1", 2_000)] == [3_000]
    assert [row[1] for row in recording.runs("w", "rlns_2", 0)] == [2_000]
    assert list(recording.runs("someone else", "rlns_1", 0)) == []
