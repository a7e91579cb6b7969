"""The arithmetic alone, against the oracle in fractions; and the oracle itself, against plain search."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from tests.core import oracle
from tidegate.core.windows import carried, cover_ms, earliest_fit, publish_threshold, wait_ms

COUNT_MAX = 2**53

counts = st.integers(0, COUNT_MAX) | st.integers(0, 1000)
# Any duration: a second, the usual ones, thirty days, ten thousand years.
durations_ms = st.integers(1000, 10_000) | st.integers(1000, 2_592_000_000) | st.integers(1000, 2**48)


@st.composite
def instants(draw: st.DrawFn) -> tuple[int, int]:
    """(elapsed_ms, duration_ms), with both ends of a cell likely."""
    duration_ms = draw(durations_ms)
    elapsed_ms = draw(st.sampled_from([0, 1, duration_ms - 1]) | st.integers(0, duration_ms - 1))
    return elapsed_ms, duration_ms


@given(counts, instants())
@example(COUNT_MAX, (1, 2_592_000_000))
def test_the_previous_cell_weighs_exactly_its_covered_share_rounded_down(
    previous: int, instant: tuple[int, int]
) -> None:
    elapsed_ms, duration_ms = instant
    weight = carried(previous, elapsed_ms, duration_ms)
    assert weight == oracle.carried(previous, elapsed_ms, duration_ms)
    share = previous * Fraction(duration_ms - elapsed_ms, duration_ms)
    assert weight <= share < weight + 1


@given(counts, durations_ms)
def test_a_cell_weighs_everything_at_its_end_and_fades_without_ever_growing(
    previous: int, duration_ms: int
) -> None:
    assert carried(previous, 0, duration_ms) == previous
    steps = [duration_ms * i // 16 for i in range(16)] + [duration_ms - 1]
    weights = [carried(previous, elapsed_ms, duration_ms) for elapsed_ms in steps]
    assert weights == sorted(weights, reverse=True)
    assert carried(previous, duration_ms, duration_ms) == 0


@given(st.integers(1, COUNT_MAX), counts, durations_ms)
def test_the_cover_is_the_longest_that_weighs_no_more_than_what_is_free(
    count: int, free: int, duration_ms: int
) -> None:
    cover = cover_ms(count, free, duration_ms)
    assert count * Fraction(cover, duration_ms) < free + 1
    assert count * Fraction(cover + 1, duration_ms) >= free + 1


@given(counts, counts, counts, instants())
def test_the_earliest_fit_is_the_first_instant_of_this_cell_that_fits(
    current: int, previous: int, room: int, instant: tuple[int, int]
) -> None:
    elapsed_ms, duration_ms = instant
    earliest_ms = earliest_fit(current, previous, room, elapsed_ms, duration_ms)
    if current > room:
        assert earliest_ms == -1
        return
    assert elapsed_ms <= earliest_ms <= duration_ms
    assert current + oracle.carried(previous, earliest_ms, duration_ms) <= room
    if earliest_ms > elapsed_ms:
        assert current + oracle.carried(previous, earliest_ms - 1, duration_ms) > room


@given(counts, counts, counts, instants())
def test_the_wait_equals_that_of_the_oracle(
    current: int, previous: int, room: int, instant: tuple[int, int]
) -> None:
    elapsed_ms, duration_ms = instant
    history = {9: previous, 10: current}
    now_ms = 10 * duration_ms + elapsed_ms
    expected = oracle.retry_after_ms(history, 0, room, now_ms, duration_ms)
    assert wait_ms(current, previous, room, elapsed_ms, duration_ms) == expected


@given(
    st.dictionaries(st.integers(3, 6), st.integers(0, 12), max_size=4),
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(40, 49),
)
def test_the_oracle_agrees_with_trying_every_millisecond(
    history: dict[int, int], cost: int, limit: int, now_ms: int
) -> None:
    found = oracle.retry_after_ms(history, cost, limit, now_ms, 10)
    tried = next((w for w in range(60) if oracle.fits(history, cost, limit, now_ms + w, 10)), None)
    assert found == tried


@given(st.integers(1, COUNT_MAX) | st.integers(1, 100), st.integers(1, 1000))
def test_the_publish_threshold_is_the_one_of_the_design(limit: int, regions: int) -> None:
    fifth = -(-limit // 5)
    assert publish_threshold(limit, regions) == max(1, min(fifth, limit // (2 * regions) + 1))


@given(st.integers(1, COUNT_MAX), st.integers(1, 1000))
def test_more_regions_and_lower_limits_never_raise_the_threshold(limit: int, regions: int) -> None:
    threshold = publish_threshold(limit, regions)
    assert publish_threshold(limit, regions + 1) <= threshold
    assert publish_threshold(limit + 1, regions) >= threshold
