from __future__ import annotations

import click
import pytest

from tidegate.cli.durations import DURATION
from tidegate.cli.quotas import quota_from
from tidegate.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("60s", 60_000),
        ("5m", 300_000),
        ("1h", 3_600_000),
        ("30d", 2_592_000_000),
        ("250ms", 250),
        ("2 weeks", 1_209_600_000),
        ("1minute", 60_000),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, milliseconds: int) -> None:
    assert DURATION.convert(text, None, None) == milliseconds


@pytest.mark.parametrize("text", ["60", "s", "", "-1s", "1.5h", "1 fortnight", "1s2m", "٣s"])
def test_text_that_is_not_a_duration_is_an_error(text: str) -> None:
    with pytest.raises(click.UsageError, match="is not a duration"):
        DURATION.convert(text, None, None)


def test_the_error_for_a_missing_unit_suggests_one() -> None:
    with pytest.raises(click.UsageError) as caught:
        DURATION.convert("60", None, None)
    assert caught.value.message == "'60' is not a duration: add a unit, e.g. 60s"


def test_a_quota_is_a_text_or_a_number_with_a_duration() -> None:
    assert quota_from("100/minute", None) == (100, 60_000)
    assert quota_from("100", 60_000) == (100, 60_000)
    assert quota_from("0", 60_000, quota_min=0) == (0, 60_000)


@pytest.mark.parametrize(
    ("quota", "duration_ms", "message"),
    [
        ("100", None, "quota '100' has no window: write 100/minute, or add --duration 60s"),
        ("1/s", 1000, "quota '1/s': with --duration it must be a number, e.g. 100"),
        ("many", 1000, "quota 'many': with --duration it must be a number, e.g. 100"),
        ("0", 1000, "quota '0': it must be at least 1"),
    ],
)
def test_a_quota_without_a_duration_or_with_two_is_an_error(
    quota: str, duration_ms: int | None, message: str
) -> None:
    with pytest.raises(click.UsageError) as caught:
        quota_from(quota, duration_ms)
    assert caught.value.message == message


def test_a_quota_that_cannot_be_parsed_is_an_error() -> None:
    with pytest.raises(InvalidInput):
        quota_from("many", None)
