"""How much of what, on the command line: `100/minute`, or `--limit 100 --duration 60s`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tidegate.cli.durations import DURATION
from tidegate.core.quota import parse_quota

__all__ = ["quota_from", "quota_options"]

F = TypeVar("F", bound=Callable[..., Any])


def quota_options(limit_min: int) -> Callable[[F], F]:
    """A QUOTA argument or the two options; `quota_from` makes one of them."""

    def decorate(command: F) -> F:
        duration = click.option(
            "--duration", "duration_ms", type=DURATION, help="With --limit: the window, such as 60s."
        )
        limit = click.option(
            "--limit", "limit_units", type=click.IntRange(limit_min), help="Instead of QUOTA: how many."
        )
        quota = click.argument("quota", required=False)
        return quota(limit(duration(command)))

    return decorate


def quota_from(quota: str | None, limit_units: int | None, duration_ms: int | None) -> tuple[int, int]:
    """(limit, duration_ms) of one of the two spellings; a usage error for none, both or half of one."""
    if quota is not None and limit_units is None and duration_ms is None:
        return parse_quota(quota)
    if quota is None and limit_units is not None and duration_ms is not None:
        return limit_units, duration_ms
    raise click.UsageError('give a QUOTA such as "100/minute", or both --limit and --duration')
