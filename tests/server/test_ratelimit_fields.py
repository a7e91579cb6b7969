from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tidegate.server.ratelimit_fields import (
    allowed_line,
    denied_line,
    policy_lines,
    policy_name,
    whole_seconds,
)

# RFC 9651: a String is printable ASCII in quotes, with \ before " and \; an Integer has at most 15 digits.
STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
FIELD = re.compile(rf"{STRING};q=\d{{1,15}};w=\d{{1,15}}")
LIMIT = re.compile(rf"{STRING};r=\d{{1,15}};t=\d{{1,15}}")

names = st.text(min_size=1, max_size=512)
numbers = st.integers(0, 2**63 - 1)
durations = st.integers(1, 2**63 - 1)


def fields(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.removesuffix("\r\n").split("\r\n"))


@given(names, numbers, durations, numbers, durations)
def test_an_allowed_answer_carries_two_well_formed_fields(
    name: str, quota: int, duration_ms: int, remaining: int, reset_in_ms: int
) -> None:
    policy = policy_name(name, "rlns_123456789")
    found = fields(policy_lines(policy, quota, duration_ms) + allowed_line(remaining, reset_in_ms))
    assert set(found) == {"ratelimit-policy", "ratelimit"}
    assert FIELD.fullmatch(found["ratelimit-policy"])
    assert LIMIT.fullmatch(found["ratelimit"])
    assert int(found["ratelimit"].rpartition("=")[2]) >= 1


@given(names, st.none() | durations, durations)
def test_a_denied_answer_says_when_to_come_back_in_both_places_alike(
    name: str, retry_after_ms: int | None, reset_in_ms: int
) -> None:
    lines = policy_lines(policy_name(name, "rlns_123456789"), 5, 1_000) + denied_line(
        retry_after_ms, reset_in_ms
    )
    found = fields(lines)
    assert LIMIT.fullmatch(found["ratelimit"])
    if retry_after_ms is None:
        assert "retry-after" not in found
    else:
        assert found["retry-after"] == found["ratelimit"].rpartition("=")[2]
        assert int(found["retry-after"]) * 1000 >= min(retry_after_ms, 999_999_999_999_999_000)


@given(names)
def test_a_name_that_a_header_can_carry_is_carried_and_can_be_read_back(name: str) -> None:
    shown = policy_name(name, "rlns_123456789")
    assert re.fullmatch(STRING, shown)
    read = re.sub(r"\\(.)", r"\1", shown[1:-1])
    assert read in {name, "rlns_123456789"}
    if len(name) <= 64 and name.isascii() and name.isprintable():
        assert read == name


def test_seconds_are_rounded_up() -> None:
    assert [whole_seconds(milliseconds) for milliseconds in (-5, 0, 1, 1_000, 1_001)] == [1, 1, 1, 1, 2]
