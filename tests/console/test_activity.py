from __future__ import annotations

import random
from collections import Counter
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import AsyncLimiter, Decision, Limit
from tidegate.server.api import activity as module
from tidegate.server.api.activity import Activity, Name, Recent, bucket_of, percentile, upper_ns
from tidegate.server.catalog.overrides import Override

LIMIT = Limit(5, duration_ms=60_000, namespace="rlns_1", workspace="w")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def made(clock: Clock, seed: int = 1) -> Activity:
    limiter = AsyncLimiter()
    return Activity(lambda: limiter.inspection, time_ns=clock, random=random.Random(seed).random)


def observe(activity: Activity, key: Name) -> bool:
    """Record one operation as `operations` does. Returns whether it was recorded."""
    sample = activity.take()
    if sample is not None:
        activity.end(sample, key)
    return sample is not None


@given(st.integers(0, 2**45))
def test_a_duration_is_in_a_bucket_whose_upper_end_is_at_most_a_quarter_above_it(duration: int) -> None:
    upper = upper_ns(bucket_of(duration))
    assert duration <= upper
    assert upper <= max(8, duration * 1.25)


@given(st.lists(st.integers(4, 10**9), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_percentile_is_never_below_the_true_one_and_at_most_a_quarter_above(
    durations: list[int], share: float
) -> None:
    counts = Counter(bucket_of(each) for each in durations)
    durations.sort()
    true = next(each for index, each in enumerate(durations, 1) if index >= share * len(durations))
    found = percentile(dict(counts), share)
    assert found is not None
    assert true <= found * 1e9 + 1 <= max(9, true * 1.25 + 1)


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile({}, 0.5) is None


def test_a_quiet_server_records_everything_and_a_busy_one_a_bounded_number() -> None:
    clock = Clock()
    activity = made(clock)
    assert sum(observe(activity, ("w", "n", "x")) for _ in range(1_000)) == 1_000
    recorded = sum(observe(activity, ("w", "n", "x")) for _ in range(64 * module.SHARE))
    assert recorded < 200, "about one in SHARE"


def test_the_weights_of_a_sample_add_up_to_what_happened() -> None:
    clock = Clock()
    activity = made(clock)
    for _ in range(10):
        clock.advance(1)
        for number in range(40_000):
            observe(activity, ("w", "n", "hot" if number % 4 == 0 else f"cold {number % 97}"))
    total = sum(activity.latency.values())
    assert total == pytest.approx(400_000, rel=0.05)
    (hottest, per_s), *_ = activity.hottest("w", 5)
    assert hottest == ("w", "n", "hot")
    assert per_s == pytest.approx(10_000, rel=0.15)


def test_the_sketch_stays_within_its_bound_however_many_identifiers_come() -> None:
    clock = Clock()
    activity = made(clock)
    for number in range(50_000):
        clock.advance(0.01)
        observe(activity, ("w", "n", f"sprayed {number}"))
        if number % 10 == 0:
            observe(activity, ("w", "n", "regular"))
    assert activity.hottest("w", 1)[0][0] == ("w", "n", "regular")
    assert len(activity.hottest("w", 10**6)) <= 2 * module.SKETCH_KEYS


def test_an_identifier_that_was_busy_a_while_ago_is_not_hot_now() -> None:
    clock = Clock()
    recent = Recent(10, 60, clock() / 1e9)
    key = ("w", "n", "x")
    recent.add(key, 600, clock() / 1e9)
    clock.advance(59)
    before = dict(recent.top("w", 1, clock() / 1e9))[key]
    clock.advance(31)
    fading = dict(recent.top("w", 1, clock() / 1e9))[key]
    assert before > fading > 0
    clock.advance(61)
    assert recent.top("w", 1, clock() / 1e9) == []


def test_a_workspace_sees_nothing_of_another() -> None:
    clock = Clock()
    activity = made(clock)
    for name in ("mine", "yours"):
        observe(activity, (name, "n", f"{name} user"))
        limit = Limit(5, duration_ms=60_000, namespace="rlns_1", workspace=name)
        decision = deny(limit)
        activity.record_denial((name, "n", f"{name} user"), limit, None, decision, 1, 1_000, 1)
        activity.counts(name, f"{name} namespace").allowed += 1
    assert [key[2] for key, _ in activity.hottest("mine", 9)] == ["mine user"]
    assert [key[2] for key, _ in activity.most_denied("mine", 9)] == ["mine user"]
    assert [key[2] for key, _ in activity.last_denials("mine", 9)] == ["mine user"]
    assert activity.denials_of("mine", None, "yours user") == []
    assert list(activity.namespaces("mine", 9)) == ["mine namespace"]
    assert [key[2] for key in activity.search("mine", "user", 9)] == ["mine user"]


def deny(limit: Limit, cost: int = 6) -> Decision:
    decision = AsyncLimiter().limit_nowait(limit, "x", cost)
    assert decision is not None and not decision.allowed
    return decision


def test_denials_of_one_second_are_one_entry_and_an_attacker_does_not_push_out_the_others() -> None:
    clock = Clock()
    activity = made(clock)
    decision = deny(LIMIT)
    activity.record_denial(("w", "n", "user_123"), LIMIT, None, decision, 1, 1_000, 1)
    for number in range(100_000):
        activity.record_denial(("w", "n", "attacker"), LIMIT, None, decision, 1, 2_000 + number, 1)
    ((_, kept),) = activity.denials_of("w", "n", "user_123")
    assert kept.at_ms == 1_000
    attacks = activity.denials_of("w", "n", "attacker")
    assert len(attacks) == module.DENIALS_EACH_MAX
    assert {denial.count for _, denial in attacks} == {1_000}


def test_a_caller_who_is_denied_for_an_hour_can_ask_why_it_began_and_why_at_any_time_since() -> None:
    activity = made(Clock())
    decision = deny(LIMIT)
    for second in range(3_600):
        activity.record_denial(("w", "n", "x"), LIMIT, None, decision, 1, second * 1_000, 1)
    seconds = [denial.at_ms // 1_000 for _, denial in reversed(activity.denials_of("w", "n", "x"))]
    assert len(seconds) == module.DENIALS_EACH_MAX
    assert (seconds[0], seconds[-1]) == (0, 3_599)
    gaps = [after - before for before, after in pairwise(seconds)]
    assert max(gaps) <= 3_600 / module.DENIALS_EACH_MAX * 3


def test_the_identifiers_whose_denials_are_kept_are_bounded() -> None:
    activity = made(Clock())
    decision = deny(LIMIT)
    for number in range(3 * module.DENIED_MAX):
        activity.record_denial(("w", "n", f"u{number}"), LIMIT, None, decision, 1, number, 1)
    kept = activity.last_denials("w", 10**6)
    assert len(kept) == module.DENIED_MAX
    assert kept[0][0][2] == f"u{3 * module.DENIED_MAX - 1}", "the newest first"


def test_a_denial_keeps_the_counts_and_the_override_behind_it() -> None:
    limiter = AsyncLimiter()
    activity = Activity(lambda: limiter.inspection)
    for _ in range(3):
        assert limiter.limit_nowait(LIMIT, "x", 1, now_ms=59_000)
    for _ in range(2):
        assert limiter.limit_nowait(LIMIT, "x", 1, now_ms=60_000)
    decision = limiter.limit_nowait(LIMIT, "x", 2, now_ms=60_001)
    assert decision is not None and not decision.allowed
    override = Override("rlor_1", "x*", 5, 60_000)
    activity.record_denial(("w", "n", "x"), LIMIT, override, decision, 2, 60_001, 1)
    ((_, kept),) = activity.denials_of("w", None, "x")
    assert (kept.current, kept.previous) == ((2, 0, 0), (3, 0, 0))
    assert (kept.override_id, kept.override_identifier) == ("rlor_1", "x*")
    assert (kept.effective, kept.cost, kept.source) == (6, 2, "local")


def test_namespaces_that_are_counted_separately_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMESPACES_MAX", 3)
    activity = made(Clock())
    for name in ("a", "b", "c", "d", "e"):
        activity.counts("w", name).allowed += 1
    assert activity.namespaces("w", 9) == {
        module.OTHER_NAMESPACES: (2, 0),
        "a": (1, 0),
        "b": (1, 0),
        "c": (1, 0),
    }


def test_a_sample_is_fair_to_callers_that_take_turns() -> None:
    """Two callers alternate, at far more requests than are recorded in full: each gets half of the weight."""
    clock = Clock()
    activity = made(clock)
    turns = count()
    for _ in range(400_000):
        observe(activity, ("w", "n", "even" if next(turns) % 2 == 0 else "odd"))
    rates = {key[2]: rate for key, rate in activity.hottest("w", 2)}
    assert rates["even"] == pytest.approx(rates["odd"], rel=0.15)
