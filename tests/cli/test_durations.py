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
def test_a_duration_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="no duration"):
        DURATION.convert(text, None, None)


def test_a_quota_has_two_spellings() -> None:
    assert quota_from("100/minute", None, None) == (100, 60_000)
    assert quota_from(None, 100, 60_000) == (100, 60_000)


@pytest.mark.parametrize(
    ("quota", "limit", "duration_ms"),
    [
        (None, None, None),
        ("1/s", 1, None),
        ("1/s", None, 1000),
        (None, 1, None),
        (None, None, 1000),
        ("1/s", 1, 1000),
    ],
)
def test_half_a_quota_or_two_are_refused(
    quota: str | None, limit: int | None, duration_ms: int | None
) -> None:
    with pytest.raises(click.UsageError, match="give a QUOTA"):
        quota_from(quota, limit, duration_ms)


def test_a_quota_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidInput):
        quota_from("many", None, None)
