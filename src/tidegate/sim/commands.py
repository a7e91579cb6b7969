"""`tidegate simulate`: runs scenario files and seeds, and measures accuracy and capacity.

`simulate FILE…` and `simulate --seed N` are one command without a name; `accuracy`, `fleet` and `replay` have one.
Exit codes: 0 if everything passed, 1 if a scenario or a seed failed, 2 for an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tidegate.core.quota import format_count, parse_quota
from tidegate.sim import scenario_report
from tidegate.sim.accuracy import GROUPS as ACCURACY_GROUPS
from tidegate.sim.accuracy import cases, measure_all
from tidegate.sim.accuracy import table as accuracy_table
from tidegate.sim.capacity import measure_fleets
from tidegate.sim.capacity import table as fleet_table
from tidegate.sim.plan import TRAFFIC, Options, draw_plan
from tidegate.sim.plots import plot_accuracy, plot_fleet, plot_replay
from tidegate.sim.scenario_files import load_file
from tidegate.sim.scenario_runner import run_scenario
from tidegate.sim.seeds import Summary, run_seeds, shrink, write_scenario
from tidegate.sim.simulation import Report, run_plan
from tidegate.telemetry.decisions import read_records
from tidegate.telemetry.what_if import WhatIf
from tidegate.telemetry.what_if import replay as replay_records

__all__ = ["simulate"]

F = TypeVar("F", bound=Callable[..., Any])

FAILED: Final = 1
# Often enough to see that a command still runs, rarely enough for a log.
PROGRESS_S: Final = 5.0
# The command that runs if none is named.
UNNAMED: Final = "run"
# The root command reads this key to report errors as JSON.
JSON_KEY: Final = "tidegate.cli.json"


class Simulate(click.Group):
    """A group that runs the command for files and seeds if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [UNNAMED, *args]
        return super().parse_args(ctx, args)


class Unnamed(click.Command):
    """A command that has the name of its group in its usage line."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        path = ctx.command_path if ctx.parent is None else ctx.parent.command_path
        formatter.write_usage(path, " ".join(self.collect_usage_pieces(ctx)))


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
        help="Print one JSON document on stdout.",
    )
    return option(command)


class _Progress:
    """Shows on stderr how far a long command has come, at most every `PROGRESS_S`. Silent with --json."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._next_s = 0.0

    def say(self, text: str, *, always: bool = False) -> None:
        now_s = time.monotonic()
        if not self._as_json and (always or now_s >= self._next_s):
            self._next_s = now_s + PROGRESS_S
            click.echo(text, err=True)


def _print_result(as_json: bool, document: object, text: str) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=1) if as_json else text)


@click.group(cls=Simulate)
def simulate() -> None:
    """Run scenario files and seeded simulations; measure accuracy and capacity; replay logs of decisions."""


class SeedRange(click.ParamType[Sequence[int]]):
    """`A..B`, both included."""

    name = "A..B"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[int]:
        first, dots, last = str(value).partition("..")
        if not dots or not first.isdigit() or not last.isdigit() or int(first) > int(last):
            self.fail(f"{value!r} is not a range of seeds: write it as 1..2000", param, ctx)
        return range(int(first), int(last) + 1)


@simulate.command(UNNAMED, cls=Unnamed, hidden=True)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(0), help="Run the simulation of this seed.")
@click.option("--seeds", type=SeedRange(), help="Run the simulations of these seeds, both ends included.")
@click.option(
    "--regions", type=click.IntRange(1, 100), help="Number of regions; drawn from the seed by default."
)
@click.option(
    "--nodes", type=click.IntRange(1, 100), help="Nodes per region; drawn from the seed by default."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.01),
    help="Virtual minutes of traffic and faults; drawn from the seed by default.",
)
@click.option(
    "--traffic",
    type=click.Choice(TRAFFIC),
    help="How requests are distributed; drawn from the seed by default.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Number of processes to run seeds in.",
)
@click.option(
    "--shrink",
    "shrink_to",
    is_flag=False,
    flag_value="",
    type=str,
    help="Reduce a failing seed to few events and write them to this scenario file (default: seed-N.json).",
)
@_json_option
@click.pass_context
def run(
    context: click.Context,
    files: tuple[Path, ...],
    seed: int | None,
    seeds: Sequence[int] | None,
    regions: int | None,
    nodes: int | None,
    minutes: float | None,
    traffic: str | None,
    jobs: int,
    shrink_to: str | None,
    as_json: bool,
) -> None:
    """Run scenario FILEs: timed steps in virtual time, with expected results. Or run simulations, with --seed or
    --seeds: traffic and faults are drawn from the seed, and the invariants are checked at every step.

    See also `tidegate simulate accuracy --help` and `tidegate simulate fleet --help`.
    """
    if sum((bool(files), seed is not None, seeds is not None)) != 1:
        raise click.UsageError("give scenario files, or --seed N, or --seeds A..B")
    if files:
        passed = _run_files(files, as_json)
    else:
        options = Options(regions, nodes, minutes, traffic)
        chosen = [seed] if seed is not None else seeds or ()
        passed = _run_seeds(chosen, options, jobs, shrink_to, as_json)
    if not passed:
        context.exit(FAILED)


def _run_files(files: Sequence[Path], as_json: bool) -> bool:
    # Read all files before anything runs: a malformed file is an error, not a failed scenario.
    scenarios = [scenario for file in files for scenario in load_file(file)]
    outcomes = [run_scenario(scenario) for scenario in scenarios]
    _print_result(as_json, scenario_report.document(outcomes), "\n".join(scenario_report.lines(outcomes)))
    return all(outcome.ok for outcome in outcomes)


def _run_seeds(
    seeds: Sequence[int], options: Options, jobs: int, shrink_to: str | None, as_json: bool
) -> bool:
    named = {name: value for name, value in options._asdict().items() if value is not None}
    summary = Summary()
    progress = _Progress(as_json or len(seeds) == 1)
    for number, report in enumerate(run_seeds(seeds, options, jobs), 1):
        summary.add(report)
        if not as_json:
            for line in _seed_lines(report, named, len(seeds) == 1):
                click.echo(line)
        progress.say(f"{number} of {len(seeds)} seeds, {len(summary.failures)} failed")
    for report in summary.failures if shrink_to is not None else ():
        path = Path(shrink_to or f"seed-{report.seed}.json")
        small = shrink(draw_plan(report.seed, options), lambda plan: not run_plan(plan).ok)
        write_scenario(path, small, run_plan(small))
        click.echo(f"seed {report.seed}: fails with {len(small.events)} events, written to {path}", err=True)
    document = {"seeds": [seeds[0], seeds[-1]], "options": named, **summary.document()}
    _print_result(as_json, document, "\n".join(summary.lines()))
    return not summary.failures


def _seed_lines(report: Report, named: Mapping[str, object], alone: bool) -> Iterator[str]:
    if report.ok and not alone:
        return
    options = "".join(f" --{name} {value}" for name, value in named.items())
    state = "ok" if report.ok else "FAILED"
    yield f"seed {report.seed}: {state}, trace {report.trace} (repeat: tidegate simulate --seed {report.seed}{options})"
    yield f"  {report.decisions} decisions in {report.virtual_s:.1f} virtual seconds; {report.description}"
    for violation in report.violations:
        yield f"  {violation}"


def _plot_option(command: F) -> F:
    option = click.option(
        "--plot",
        "plot_to",
        type=click.Path(path_type=Path, file_okay=False),
        help="Write plots (PNG and SVG) into this directory; needs tidegate[plot].",
    )
    return option(command)


@simulate.command()
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the requests.")
@click.option(
    "--group", "groups", multiple=True, type=click.Choice(ACCURACY_GROUPS), help="Measure only these groups."
)
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Number of processes.")
@_plot_option
@_json_option
def accuracy(seed: int, groups: tuple[str, ...], jobs: int, plot_to: Path | None, as_json: bool) -> None:
    """Measure what is admitted, compared with one perfect counter, an exact log and the plain scheme.

    "× limit" and the plain scheme's columns are multiples of the limit, admitted in the first window.
    """
    chosen = [case for case in cases(seed) if not groups or case.group in groups]
    progress = _Progress(as_json)
    results = []
    for one in measure_all(chosen, jobs):
        results.append(one)
        progress.say(f"{len(results)} of {len(chosen)} cases")
    if plot_to is not None:
        plot_accuracy(results, plot_to)
    _print_result(
        as_json, {"results": [one.document() for one in results]}, "\n".join(accuracy_table(results))
    )


@simulate.command()
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the requests.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=5,
    show_default=True,
    help="Virtual seconds of requests for each fleet.",
)
@_plot_option
@_json_option
def fleet(seed: int, seconds: float, plot_to: Path | None, as_json: bool) -> None:
    """Measure the cost of the reference fleet, of one ten times as large, and of one with a hundred times its nodes."""
    progress = _Progress(as_json)
    costs = measure_fleets(seconds, seed, lambda text: progress.say(f"measuring {text}", always=True))
    if plot_to is not None:
        plot_fleet(costs, plot_to)
    _print_result(as_json, {"fleets": [one.document() for one in costs]}, "\n".join(fleet_table(costs)))


@simulate.command()
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--limit", "quota", required=True, metavar="QUOTA", help="The other limit, e.g. 50/minute.")
@click.option("--namespace", help="Whose limit to replace; needed if the log has several.")
@click.option(
    "--top", type=click.IntRange(0), default=20, show_default=True, help="How many identifiers to list."
)
@_plot_option
@_json_option
def replay(
    logs: tuple[Path, ...], quota: str, namespace: str | None, top: int, plot_to: Path | None, as_json: bool
) -> None:
    """Replay recorded decisions against another limit: who would have been denied?

    LOGS are files, or directories with *.jsonl files, that servers with decisions.log_dir have written; give those of
    all nodes together. The new limit applies to every identifier of the namespace, also to those with an override.
    The replay is one counter for all nodes, and assumes that clients would have sent the same requests.
    """
    result = replay_records(read_records(logs), *parse_quota(quota), namespace)
    if plot_to is not None:
        plot_replay(result, plot_to)
    _print_result(as_json, result.document(top), "\n".join(_replay_lines(result, top)))


def _replay_lines(result: WhatIf, top: int) -> Iterator[str]:
    limits = ", ".join(
        f"{limit} ({format_count(count, 'request')})" for limit, count in list(result.limits.items())[:3]
    )
    yield f"namespace {result.namespace}: {limits}; replayed with {result.new_limit}"
    yield (
        f"{format_count(result.requests, 'request')} of {format_count(len(result.callers), 'identifier')} in "
        f"{result.seconds:,.0f} s; the replay "
        f"agrees with {result.agreed / result.requests:.2%} of the log under its own limits"
    )
    denied, would_be = result.requests - result.allowed, result.requests - result.would_be_allowed
    yield ""
    yield f"{'':<22}{'as logged':>12}{'would be':>12}"
    yield f"{'allowed':<22}{result.allowed:>12,}{result.would_be_allowed:>12,}"
    yield f"{'denied':<22}{denied:>12,}{would_be:>12,}"
    yield ""
    yield (
        f"{format_count(result.newly_denied, 'request')} of {format_count(result.callers_newly_denied, 'identifier')} "
        f"would have been denied; "
        f"{result.newly_allowed:,} would have been allowed instead of denied"
    )
    shown = [caller for caller in result.callers[:top] if caller.newly_denied or caller.newly_allowed]
    if not shown:
        return
    # Text of a client: nothing in it may move the cursor.
    names = [name if name.isprintable() else repr(name) for name in (caller.identifier for caller in shown)]
    width = min(40, max(map(len, ["identifier", *names])))
    yield ""
    yield (
        f"{'identifier':<{width}}  {'requests':>9}  {'allowed':>9}  {'would be':>9}  {'newly denied':>12}  "
        f"{'newly allowed':>13}"
    )
    for name, caller in zip(names, shown, strict=True):
        cut = name if len(name) <= width else name[: width - 1] + "…"
        yield (
            f"{cut:<{width}}  {caller.requests:>9,}  {caller.allowed:>9,}  {caller.would_be_allowed:>9,}  "
            f"{caller.newly_denied:>12,}  {caller.newly_allowed:>13,}"
        )
    left = result.callers_newly_denied - sum(caller.newly_denied > 0 for caller in shown)
    if left > 0:
        yield f"and {left:,} more identifiers (--top)"
