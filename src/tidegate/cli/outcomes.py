"""Exit codes, results and errors of all subcommands.

Rules: the result goes to stdout, everything else to stderr; with `--json` each is one JSON document; no message has a
secret. Exit code 1 means denied or failed, never an error, so that a script can tell them apart.
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

__all__ = ["EXIT_CODES", "JSON_KEY", "ExitCode", "fail", "json_option", "print_error", "print_result", "warn"]

F = TypeVar("F", bound=Callable[..., Any])

JSON_KEY: Final = "tidegate.cli.json"
"""Key in the click context: whether `--json` was given. Written by the root command, which parses first."""


class ExitCode(IntEnum):
    """The exit codes, a contract with scripts."""

    OK = 0
    DENIED = 1
    ERROR = 2
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_CODES: Final = {
    ExitCode.OK: "Success. For `limit` and `multi-limit`: allowed.",
    ExitCode.DENIED: "Denied (`limit`, `multi-limit`), or a scenario or seed failed (`simulate`). No other command and "
    "no error exits with 1.",
    ExitCode.ERROR: "An error: wrong usage, an invalid configuration, an error response, an unreachable server, or a "
    "failed check of `doctor` or `config check`. The message says what happened and what to do. It is on stderr; "
    "`doctor` and `config check` print their findings on stdout.",
    ExitCode.INTERRUPTED: "Interrupted with Ctrl-C (SIGINT).",
    ExitCode.BROKEN_PIPE: "The reader of the output closed the pipe.",
}


def json_option(command: F) -> F:
    """`--json`, the same for every command."""
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print the result as one JSON document on stdout, an error as one on stderr.",
    )
    return option(command)


def print_result(as_json: bool, document: object, text: str) -> None:
    """Print the result of a command: `document` with `--json`, otherwise `text`."""
    click.echo(json.dumps(document, ensure_ascii=False) if as_json else text)


def fail(context: click.Context, error: BaseException) -> ExitCode:
    """Print an error, and return the exit code for it."""
    if isinstance(error, BrokenPipeError):
        # Python would report the closed pipe once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    as_json = bool(context.meta.get(JSON_KEY))
    if isinstance(error, KeyboardInterrupt | EOFError | click.Abort):
        if as_json:
            print_error(as_json, "Interrupted", "interrupted")
        else:
            click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    if isinstance(error, click.UsageError) and not as_json:
        error.show()
        return ExitCode.ERROR
    if os.environ.get("TIDEGATE_DEBUG"):
        click.echo(mask("".join(traceback.format_exception(error))), err=True, nl=False)
    print_error(as_json, _kind(error), mask(_message(error)))
    return ExitCode.ERROR


def print_error(as_json: bool, kind: str, message: str) -> None:
    """Print an error on stderr. The caller has masked secrets in the message."""
    if as_json:
        click.echo(json.dumps({"error": {"type": kind, "message": message}}), err=True)
    else:
        click.echo(f"error: {message}", err=True)


def warn(as_json: bool, warnings: Sequence[str]) -> None:
    """Print warnings on stderr; with --json as one document."""
    texts = [mask(warning) for warning in warnings]
    if as_json and texts:
        click.echo(json.dumps({"warnings": texts}, ensure_ascii=False), err=True)
    elif texts:
        click.echo("\n".join(f"warning: {text}" for text in texts), err=True)


def _kind(error: BaseException) -> str:
    # An error of ours: the class name of click would mean nothing to a program.
    return "Failed" if type(error) is click.ClickException else type(error).__name__


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, TidegateError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = "this is a bug: set TIDEGATE_DEBUG=1 for a traceback, and report it"
    return f"unexpected {type(error).__name__}: {error} ({hint})"
