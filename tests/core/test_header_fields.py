from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.header_fields import policy_name, ratelimit_headers, whole_seconds

# RFC 9651: a String is printable ASCII in quotes, with \ before " and \; an Integer has at most 15 digits.
STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
POLICY = re.compile(rf"{STRING};q=\d{{1,15}};w=\d{{1,15}}")
STATE = re.compile(rf"{STRING};r=\d{{1,15}};t=\d{{1,15}}")

names = st.text(min_size=1, max_size=512)
numbers = st.integers(0, 2**63 - 1)
durations = st.integers(1, 2**63 - 1)


@given(names, numbers, durations, numbers, durations)
def test_an_allowed_answer_carries_two_well_formed_fields(
    name: str, quota: int, duration_ms: int, remaining: int, reset_in_ms: int
) -> None:
    found = ratelimit_headers(name, quota, duration_ms, remaining, reset_in_ms, None)
    assert set(found) == {"RateLimit-Policy", "RateLimit"}
    assert POLICY.fullmatch(found["RateLimit-Policy"])
    assert STATE.fullmatch(found["RateLimit"])
    assert int(found["RateLimit"].rpartition("=")[2]) >= 1


@given(names, durations, durations)
def test_a_denied_answer_says_when_to_retry_in_both_places_alike(
    name: str, retry_after_ms: int, reset_in_ms: int
) -> None:
    found = ratelimit_headers(name, 5, 1_000, 0, reset_in_ms, retry_after_ms)
    assert STATE.fullmatch(found["RateLimit"])
    assert found["Retry-After"] == found["RateLimit"].rpartition("=")[2]
    assert int(found["Retry-After"]) * 1000 >= min(retry_after_ms, 999_999_999_999_999_000)


@given(names)
def test_a_name_that_a_header_can_hold_is_sent_and_can_be_read_back(name: str) -> None:
    shown = policy_name(name, "rlns_123456789")
    assert re.fullmatch(STRING, shown)
    read = re.sub(r"\\(.)", r"\1", shown[1:-1])
    assert read in {name, "rlns_123456789"}
    if len(name) <= 64 and name.isascii() and name.isprintable():
        assert read == name


def test_names_that_a_header_cannot_hold_stay_different() -> None:
    shown = {policy_name("é"), policy_name("è"), policy_name("x" * 65)}
    assert len(shown) == 3
    assert all(re.fullmatch(STRING, name) for name in shown)


def test_seconds_are_rounded_up() -> None:
    assert [whole_seconds(milliseconds) for milliseconds in (-5, 0, 1, 1_000, 1_001)] == [1, 1, 1, 1, 2]
