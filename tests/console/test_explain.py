from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.windows import carried
from tidegate.server.api.activity import Denial
from tidegate.server.console.explain import explain

AT_MS = 1_794_837_787_000  # 14:03:07 UTC


def denial(**changes: object) -> Denial:
    values: dict[str, object] = {
        "at_ms": AT_MS,
        "count": 1,
        "cost": 1,
        "quota": 100,
        "duration_ms": 60_000,
        "source": "local",
        "effective": 101,
        "retry_after_ms": 18_000,
        "regional_age_ms": 120,
        "global_age_ms": None,
        "current": (40, 10, 6),
        "previous": (30, 10, 10),
    }
    return Denial(**{**values, **changes})  # type: ignore[arg-type] # by name


def test_the_reasons_name_the_limit_the_cells_their_weights_the_override_and_the_source() -> None:
    lines = explain("email.send", "user_123", denial(count=12))
    first, current, previous, override, source, retry, number = lines
    assert first.endswith("With a cost of 1 the window would hold 101, and the limit is 100 per minute.")
    assert first.startswith("user_123 in email.send was denied at 14:03:07 UTC.")
    parts = "(40 by this node, 10 by other nodes of the region, 6 by other regions)"
    assert current == f"Current window, since 14:03:00 UTC: 56 accepted {parts}. All of it counts."
    parts = "(30 by this node, 10 by other nodes of the region, 10 by other regions)"
    assert previous == f"Previous window: 50 accepted {parts}. 88 % of it still counts: 44."
    assert override == "No override applies: the limit came with the request."
    assert source == "Decided from the memory of this node; the counts of other nodes were 120 ms old."
    assert retry == "The same request fits 18 s later, if no other comes before."
    assert number == "About 12 requests were denied in that second."


def test_an_override_is_named() -> None:
    lines = explain("n", "x", denial(override_id="rlor_1", override_identifier="premium_*"))
    assert "The limit is that of override 'premium_*' (rlor_1)." in lines


def test_a_limit_of_zero_and_a_cost_that_never_fits_are_explained() -> None:
    assert "The limit is 0: everything is blocked." in explain("n", "x", denial(quota=0))[0]
    assert "A cost of 500 never fits into 100 per minute." in explain(
        "n", "x", denial(cost=500, retry_after_ms=None)
    )


def test_a_denial_that_the_counts_do_not_explain_says_what_else_it_can_be() -> None:
    assert "probably" in explain("n", "x", denial(effective=100))[0]


def test_a_node_without_its_origin_says_so() -> None:
    assert any("did not answer" in line for line in explain("n", "x", denial(source="degraded")))


@given(
    st.integers(0, 2**45),
    st.integers(1_000, 2**31),
    st.tuples(*[st.integers(0, 2**40)] * 3),
    st.tuples(*[st.integers(0, 2**40)] * 3),
)
def test_the_weight_in_the_text_is_that_of_the_formula(
    at_ms: int, duration_ms: int, current: tuple[int, int, int], previous: tuple[int, int, int]
) -> None:
    lines = explain(
        "n", "x", denial(at_ms=at_ms, duration_ms=duration_ms, current=current, previous=previous)
    )
    if sum(previous):
        weight = carried(sum(previous), at_ms % duration_ms, duration_ms)
        assert any(line.endswith(f"still counts: {weight}.") for line in lines)
