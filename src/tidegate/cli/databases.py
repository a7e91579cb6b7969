"""The option `--ledger` of commands that work on the shared database, and the connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidegate.cli.progress import Progress
from tidegate.cli.settings import value_options

if TYPE_CHECKING:
    from tidegate.ports import Ledger

__all__ = ["ledger_options", "opened_ledger", "run"]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def ledger_options(command: F) -> F:
    """`--ledger`, `--config` and `--timeout`; the command gets `url` and `timeout_s`."""

    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0.01, 3600),
        default=60.0,
        show_default=True,
        help="Seconds for one statement, including connecting.",
    )
    @value_options("ledger")
    @wraps(command)
    def wrapped(values: dict[str, Any], **rest: Any) -> Any:
        if values["ledger"] is None:
            raise click.UsageError("no database: pass --ledger URL or set TIDEGATE_LEDGER")
        return command(url=values["ledger"], **rest)

    return wrapped  # type: ignore[return-value] # the command's signature, with the options in place of `url`


@asynccontextmanager
async def opened_ledger(url: str, timeout_s: float) -> AsyncIterator[Ledger]:
    """The ledger at `url`, connected, with its schema checked."""
    from tidegate.adapters.urls import open_ledger

    ledger = open_ledger(url)
    try:
        await ledger.open(timeout_s=timeout_s)
        yield ledger
    finally:
        await ledger.close()


def run(work: Coroutine[Any, Any, R], doing: str = "waiting for the database") -> R:
    """Run the asynchronous part of a command, and show on a terminal what it waits for."""
    with Progress(doing):
        return asyncio.run(work)
