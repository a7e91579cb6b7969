"""Quotas on the command line, as in `Limit`: `100/minute`, or a number with `--duration`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tidegate.cli.durations import DURATION
from tidegate.core.quota import parse_quota

__all__ = ["counter_of", "quota_from", "quota_options"]

F = TypeVar("F", bound=Callable[..., Any])


def quota_options(command: F) -> F:
    """The argument QUOTA and the option `--duration`; `quota_from` reads both."""
    duration = click.option(
        "--duration", "duration_ms", type=DURATION, help="Window of a QUOTA that is only a number, e.g. 60s."
    )
    quota = click.argument("quota")
    return quota(duration(command))


def quota_from(quota: str, duration_ms: int | None, *, quota_min: int = 1) -> tuple[int, int]:
    """(quota, duration_ms) of the argument and the option."""
    is_number = quota.isascii() and quota.isdecimal()
    if duration_ms is None and not is_number:
        return parse_quota(quota)
    if duration_ms is None:
        raise click.UsageError(f"quota {quota!r} has no window: write {quota}/minute, or add --duration 60s")
    if not is_number:
        raise click.UsageError(f"quota {quota!r}: with --duration it must be a number, e.g. 100")
    if int(quota) < quota_min:
        raise click.UsageError(f"quota {quota!r}: it must be at least {quota_min}")
    return int(quota), duration_ms


def counter_of(namespace: str, identifier: str, quota: str, duration_ms: int | None) -> dict[str, Any]:
    """The fields of a request that name a counter and its limit."""
    number, window_ms = quota_from(quota, duration_ms)
    return {"namespace": namespace, "identifier": identifier, "limit": number, "duration": window_ms}
