"""Quota strings and the Limit they make."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.model import Limit, make_limit, subject_digest
from tidegate.core.quota import format_count, format_duration, format_quota, parse_quota
from tidegate.errors import InvalidInput

UNITS_MS = {
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
    "secs": 1_000,
    "seconds": 1_000,
    "mins": 60_000,
    "minutes": 60_000,
    "hours": 3_600_000,
    "days": 86_400_000,
    "weeks": 604_800_000,
}


@pytest.mark.parametrize(
    ("quota", "units", "duration_ms"),
    [
        ("100/minute", 100, 60_000),
        ("10/s", 10, 1_000),
        ("5000/30d", 5_000, 30 * 86_400_000),
        ("3 per 15 minutes", 3, 900_000),
        ("  7 / 2 Hours ", 7, 7_200_000),
        ("1/1000ms", 1, 1_000),
        ("2 PER week", 2, 604_800_000),
        (
            "9999999999999999999/999999999999999w",
            9_999_999_999_999_999_999,
            999_999_999_999_999 * 604_800_000,
        ),
    ],
)
def test_quota_strings_mean_what_they_say(quota: str, units: int, duration_ms: int) -> None:
    assert parse_quota(quota) == (units, duration_ms)
    limit = Limit(quota, namespace="default")
    assert (limit.quota, limit.duration_ms) == (units, duration_ms)


@pytest.mark.parametrize(
    "quota",
    [
        "",
        " ",
        "100",
        "100/",
        "/minute",
        "minute",
        "0/minute",
        "-1/minute",
        "+1/minute",
        "1.5/minute",
        "1_000/minute",
        "1e3/minute",
        "١/minute",
        "100/fortnight",
        "100/minute/2",
        "100 minutes",
        "100 per",
        "100perminute",
        "100/0s",
        "100/0minutes",
        "1/ms",
        "1/999ms",
        "1/-5s",
        "1/1.5h",
        "10/ss",
        "10/mss",
        "10/hs",
        "10/ds",
        "10/ws",
        "10/minutess",
        "10/mınute",
        "10/ſ",
        "1" * 20 + "/s",
        "1/" + "9" * 16 + "s",
        "100/minute\x00",
        "100/minute;",
    ],
)
def test_a_quota_string_that_does_not_parse_is_refused_with_field_value_and_example(quota: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Limit(quota, namespace="default")
    assert caught.value.field == "quota"
    assert caught.value.value == quota
    assert caught.value.expected


@given(
    st.integers(1, 10**19 - 1),
    st.integers(1, 10**6),
    st.sampled_from(sorted(UNITS_MS)),
    st.sampled_from(["/", " / ", " per "]),
    st.booleans(),
)
def test_every_quota_string_round_trips(
    units: int, times: int, unit: str, separator: str, upper: bool
) -> None:
    quota = f"{units}{separator}{times if times > 1 else ''} {unit.upper() if upper else unit}"
    assert parse_quota(quota) == (units, times * UNITS_MS[unit])
    limit = Limit(quota, namespace="default")
    again = Limit(f"{limit.quota}/{limit.duration_ms}ms", namespace="default")
    assert again == limit


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused_and_nothing_else(quota: str) -> None:
    try:
        units, duration_ms = parse_quota(quota)
    except InvalidInput:
        return
    assert units >= 1 and duration_ms >= 1_000


def test_a_limit_is_equal_by_value_hashable_and_shows_how_to_make_it() -> None:
    limit = Limit("100/minute", namespace="email.send")
    same = Limit(100, duration_ms=60_000, namespace="email.send")
    assert limit == same and hash(limit) == hash(same)
    assert repr(limit) == "Limit(100, duration_ms=60000, namespace='email.send')"
    assert repr(Limit("1/s", workspace="w", namespace="default")) == (
        "Limit(1, duration_ms=1000, namespace='default', workspace='w')"
    )
    others = [
        Limit("101/minute", namespace="default"),
        Limit("100/hour", namespace="default"),
        Limit("100/minute", workspace="w", namespace="default"),
        "100/minute",
    ]
    assert all(limit != other for other in others)


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.integers(1, 10**6)),
        min_size=2,
        max_size=6,
        unique=True,
    )
)
def test_no_two_subjects_share_a_digest(subjects: list[tuple[str, str, str, int]]) -> None:
    assert len({subject_digest(*subject) for subject in subjects}) == len(subjects)


def test_fields_that_run_into_each_other_do_not_share_a_digest() -> None:
    assert subject_digest("a-b", "c", "d", 1) != subject_digest("a", "b-c", "d", 1)
    assert subject_digest("a", "b", "c1", 1) != subject_digest("a", "b", "c", 11)
    assert subject_digest("a\x00", "b", "c", 1) != subject_digest("a", "\x00b", "c", 1)
    assert len(subject_digest("a", "b", "\ud800", 1)) == 16


def test_limits_can_be_copied_and_pickled() -> None:
    for limit in (
        Limit("100/minute", namespace="n", workspace="w"),
        make_limit(0, 1_000, "n", "w"),
        Limit("5/minute", namespace="login", on_outage="deny"),
    ):
        for twin in (copy(limit), deepcopy(limit), pickle.loads(pickle.dumps(limit))):
            assert twin == limit and twin.key == limit.key


@pytest.mark.parametrize(
    ("quota", "shown"),
    [
        ("100/minute", "100 per minute"),
        ("3 per 15 minutes", "3 per 15 minutes"),
        ("10/s", "10 per second"),
        ("5000/30d", "5000 per 30 days"),
        ("7/1500ms", "7 per 1.5 seconds"),
        ("1/90s", "1 per 90 seconds"),
    ],
)
def test_a_limit_is_shown_in_human_units(quota: str, shown: str) -> None:
    limit = Limit(quota, namespace="default")
    assert str(limit) == shown == format_quota(limit.quota, limit.duration_ms)


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (0, "0 ms"),
        (300, "300 ms"),
        (1_000, "1 s"),
        (17_001, "18 s"),
        (59_999, "1 min"),
        (720_000, "12 min"),
        (7_500_000, "2 h 5 min"),
        (7_200_000, "2 h"),
        (86_400_000, "1 d"),
        (90_061_000, "1 d 1 h"),
        (86_461_000, "1 d"),
    ],
)
def test_a_wait_is_shown_in_its_two_largest_units(milliseconds: int, shown: str) -> None:
    assert format_duration(milliseconds) == shown


def test_limits_cannot_be_changed() -> None:
    limit = Limit("100/minute", namespace="n")
    for name in ("quota", "duration_ms", "namespace", "workspace", "key"):
        with pytest.raises(AttributeError):
            setattr(limit, name, getattr(limit, name))
        with pytest.raises(AttributeError):
            delattr(limit, name)
    assert limit == Limit(100, duration_ms=60_000, namespace="n")


def test_a_number_of_things_is_written_for_people() -> None:
    shown = [format_count(number, "request") for number in (0, 1, 2, 12_345)]
    assert shown == ["0 requests", "1 request", "2 requests", "12,345 requests"]
