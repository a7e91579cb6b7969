"""`tidegate simulate`: scenario files, seeded worlds, accuracy and capacity.

`simulate FILE…` and `simulate --seed N` are one command without a name of its own; `accuracy` and `fleet` are named.
Exit codes: 0 when everything held, 1 when a scenario or a world failed, 2 for an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tidegate.sim import scenario_report
from tidegate.sim.scenario_files import load_file
from tidegate.sim.scenario_runner import run_scenario

__all__ = ["simulate"]

F = TypeVar("F", bound=Callable[..., Any])

FAILED: Final = 1
# The command that is meant when none is named.
UNNAMED: Final = "run"
# Where the root command looks when it has to report an error as JSON.
JSON_KEY: Final = "tidegate.cli.json"


class Simulate(click.Group):
    """A group with a command for what names no command: files and seeds."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [UNNAMED, *args]
        return super().parse_args(ctx, args)


def _remember(context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    context.meta[JSON_KEY] = context.meta.get(JSON_KEY, False) or value
    return value


def _json_option(command: F) -> F:
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_remember,
        help="Answer with one JSON document on stdout.",
    )
    return option(command)


def _answer(as_json: bool, document: object, text: str) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=1) if as_json else text)


@click.group(cls=Simulate)
def simulate() -> None:
    """Run scenario files and seeded worlds; measure accuracy and capacity."""


@simulate.command(UNNAMED, hidden=True)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@_json_option
@click.pass_context
def run(context: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    """Run scenario FILEs: stories in virtual time, with expected answers."""
    if not files:
        raise click.UsageError("nothing to simulate: name scenario files")
    # All files are read before anything runs: a malformed one is an error, not a failed scenario.
    scenarios = [scenario for file in files for scenario in load_file(file)]
    outcomes = [run_scenario(scenario) for scenario in scenarios]
    _answer(as_json, scenario_report.document(outcomes), "\n".join(scenario_report.lines(outcomes)))
    if not all(outcome.ok for outcome in outcomes):
        context.exit(FAILED)
