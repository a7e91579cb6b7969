"""Exit codes, answers and failures: what every subcommand has in common with what calls it.

Laws: the answer goes to stdout, everything else to stderr; with `--json` both are JSON, one document each; no message
holds a secret. Exit code 1 means that the answer is no, and never an error: a script can tell "no" from "broken".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

import click

from tidegate.adapters.secrets import mask
from tidegate.errors import TidegateError

__all__ = ["EXIT_CODES", "JSON_KEY", "ExitCode", "answer", "complain", "fail", "json_option", "warn"]

F = TypeVar("F", bound=Callable[..., Any])

JSON_KEY: Final = "tidegate.cli.json"
"""In the context: whether this call wants JSON. Written by the root, which sees the arguments first."""


class ExitCode(IntEnum):
    """What a script may rely on."""

    OK = 0
    DENIED = 1
    ERROR = 2
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_CODES: Final = {
    ExitCode.OK: "It worked. For `limit` and `multi-limit`: allowed.",
    ExitCode.DENIED: "It worked, and the answer is no: `limit` or `multi-limit` was denied; with `simulate`, a "
    "scenario or a world failed. Nothing else exits with 1.",
    ExitCode.ERROR: "An error: wrong usage, a faulty configuration, a server that refuses or cannot be reached, "
    "a check of `doctor` or `config check` that failed. The message says what and what to do next: on stderr; of those "
    "two checks, whose answer it is, on stdout.",
    ExitCode.INTERRUPTED: "Interrupted with Ctrl-C (SIGINT) before it was done.",
    ExitCode.BROKEN_PIPE: "Whoever read the output stopped reading.",
}


def json_option(command: F) -> F:
    """`--json`, the same for every command."""
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Answer with one JSON document on stdout; an error is one on stderr.",
    )
    return option(command)


def answer(as_json: bool, document: object, text: str) -> None:
    """The answer of a command: `document` for programs, `text` for people."""
    click.echo(json.dumps(document, ensure_ascii=False) if as_json else text)


def fail(context: click.Context, error: BaseException) -> ExitCode:
    """Tell what went wrong, and how the program ends."""
    if isinstance(error, BrokenPipeError):
        # Nobody listens: also not to the complaint that Python would write when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    as_json = bool(context.meta.get(JSON_KEY))
    if isinstance(error, KeyboardInterrupt | EOFError | click.Abort):
        if as_json:
            complain(as_json, "Interrupted", "interrupted")
        else:
            click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    if isinstance(error, click.UsageError) and not as_json:
        error.show()
        return ExitCode.ERROR
    if os.environ.get("TIDEGATE_DEBUG"):
        click.echo(mask("".join(traceback.format_exception(error))), err=True, nl=False)
    complain(as_json, _kind(error), mask(_message(error)))
    return ExitCode.ERROR


def complain(as_json: bool, kind: str, message: str) -> None:
    """What went wrong, on stderr. Whoever calls it has masked the message."""
    if as_json:
        click.echo(json.dumps({"error": {"type": kind, "message": message}}), err=True)
    else:
        click.echo(f"error: {message}", err=True)


def warn(as_json: bool, warnings: Sequence[str]) -> None:
    """What did not keep the command from its work but may not be meant, on stderr. With --json one document."""
    texts = [mask(warning) for warning in warnings]
    if as_json and texts:
        click.echo(json.dumps({"warnings": texts}, ensure_ascii=False), err=True)
    elif texts:
        click.echo("\n".join(f"warning: {text}" for text in texts), err=True)


def _kind(error: BaseException) -> str:
    # What a command says for itself; the library's word for it would tell a program nothing.
    return "Failed" if type(error) is click.ClickException else type(error).__name__


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, TidegateError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = "set TIDEGATE_DEBUG=1 to see where, and report it"
    return f"unexpected {type(error).__name__}: {error} ({hint})"
