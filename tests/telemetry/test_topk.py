from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.telemetry.topk import SpaceSaving, Thinning

streams = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=300)


@given(streams, st.integers(1, 12))
def test_a_held_key_is_never_counted_too_low_and_too_high_by_at_most_its_error(
    stream: list[tuple[int, int]], capacity: int
) -> None:
    sketch: SpaceSaving[int] = SpaceSaving(capacity)
    truth: Counter[int] = Counter()
    for key, weight in stream:
        sketch.add(key, weight)
        truth[key] += weight
    assert sketch.total == truth.total()
    for heavy in sketch.top(capacity):
        assert heavy.weight - heavy.error <= truth[heavy.key] <= heavy.weight
        assert heavy.error <= sketch.total / capacity


@given(streams, st.integers(1, 12))
def test_a_key_with_more_than_its_share_is_always_held(stream: list[tuple[int, int]], capacity: int) -> None:
    sketch: SpaceSaving[int] = SpaceSaving(capacity)
    truth: Counter[int] = Counter()
    for key, weight in stream:
        sketch.add(key, weight)
        truth[key] += weight
    held = {heavy.key for heavy in sketch.top(capacity)}
    assert {key for key, weight in truth.items() if weight > sketch.total / capacity} <= held


@given(streams)
def test_without_pressure_the_counts_are_exact(stream: list[tuple[int, int]]) -> None:
    sketch: SpaceSaving[int] = SpaceSaving(31)
    truth: Counter[int] = Counter()
    for key, weight in stream:
        sketch.add(key, weight)
        truth[key] += weight
    assert {heavy.key: heavy.weight for heavy in sketch.top(31)} == {k: w for k, w in truth.items() if w}


def test_two_hundred_thousand_distinct_keys_use_no_more_memory_than_its_capacity() -> None:
    sketch: SpaceSaving[int] = SpaceSaving(100)
    for key in range(200_000):
        sketch.add(key)
        if key % 10 == 0:
            sketch.add(-1)
    assert len(sketch) == 100
    assert len(sketch._heap) == 100
    assert len(sketch._errors) <= 100
    assert sketch.top(1)[0].key == -1


def test_the_heaviest_come_first() -> None:
    sketch: SpaceSaving[str] = SpaceSaving(10)
    for key, weight in (("a", 1), ("b", 5), ("c", 3)):
        sketch.add(key, weight)
    assert [(heavy.key, heavy.weight) for heavy in sketch.top(2)] == [("b", 5), ("c", 3)]


def test_a_capacity_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="capacity"):
        SpaceSaving(0)


def test_few_events_all_have_weight_one() -> None:
    thinning = Thinning(10, 4, Random(1).random)
    assert [thinning.weight(second) for second in range(5) for _ in range(10)] == [1] * 50


def test_at_high_rates_a_sample_is_weighted_and_the_sum_stays_correct() -> None:
    thinning = Thinning(1_000, 16, Random(7).random)
    weights = [thinning.weight(5) for _ in range(101_000)]
    assert weights[:1_000] == [1] * 1_000
    assert set(weights[1_000:]) == {0, 16}
    assert 95_000 < sum(weights[1_000:]) < 105_000
    assert thinning.weight(6) == 1, "the next second starts again"


def test_the_sample_is_random_and_does_not_depend_on_the_period_of_the_stream() -> None:
    thinning = Thinning(0, 16, Random(3).random)
    heavy: SpaceSaving[int] = SpaceSaving(10)
    for event in range(64_000):
        heavy.add(event % 4, thinning.weight(1))
    assert all(14_000 < each.weight < 18_000 for each in heavy.top(4))
