"""`tidegate demo`: a fleet of several regions on this machine, with faults to try."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.demo.fleet import REGIONS
from tidegate.demo.session import Options, Report, Session, parse_script
from tidegate.demo.view import Picture, log_line, screen

__all__ = ["demo"]

# The alternate screen of the terminal, so that the main one is unchanged when the demo ends; and no cursor.
ENTER_SCREEN = "\x1b[?1049h\x1b[?25l"
LEAVE_SCREEN = "\x1b[?25h\x1b[?1049l"


@click.command()
@click.option(
    "--regions", type=click.IntRange(1, len(REGIONS)), default=3, show_default=True, help="Number of regions."
)
@click.option(
    "--nodes", type=click.IntRange(1, 8), default=2, show_default=True, help="Number of nodes in each region."
)
@click.option("--redis", is_flag=True, help="Start a Redis for each region instead of origins in memory.")
@click.option("--mysql", is_flag=True, help="Start a MariaDB or MySQL instead of a SQLite file.")
@click.option("--script", metavar="KEYS", help="Press keys at these seconds, e.g. k@5,p@10,h@15.")
@click.option(
    "--seconds", type=click.FloatRange(0.1), help="End after this time. Default: until q or Ctrl-C."
)
@click.option("--browser/--no-browser", default=True, help="Open the console in a browser, on a terminal.")
@json_option
def demo(
    regions: int,
    nodes: int,
    redis: bool,
    mysql: bool,
    script: str | None,
    seconds: float | None,
    browser: bool,
    as_json: bool,
) -> ExitCode:
    """Run a fleet on this machine, with traffic from a hot identifier, an attacker and ordinary users.

    Keys: k kills the origin of a region, p cuts a region off from the database, h heals everything, q ends. Decisions
    continue all the time; after h all nodes agree again. At the end everything is stopped and removed: no process and
    no file is left.

    All nodes run in this process, each with a port of its own. --redis and --mysql need these servers installed; they
    run on free ports with temporary data.
    """
    options = Options(regions, nodes, redis, mysql, parse_script(script) if script else (), seconds)
    report = _run(options, browser=browser, as_json=as_json)
    print_result(as_json, report.document(), "\n".join(_summary(report)))
    return ExitCode.OK


def _run(options: Options, *, browser: bool, as_json: bool) -> Report:
    import uvloop

    is_terminal = sys.stdout.isatty() and sys.stdin.isatty() and not as_json

    async def main() -> Report:
        async with Session.open(options, lambda text: click.echo(text, err=True)) as session:
            if is_terminal:
                if browser:
                    click.launch(session.console)
                with _terminal(session):
                    return await session.run(_draw)
            lines = _Lines(as_json)
            return await session.run(lines.show)

    report: Report = uvloop.run(main())
    return report


@contextmanager
def _terminal(session: Session) -> Iterator[None]:
    """Read single keys, and use the alternate screen, until the block ends."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(keyboard, 64).decode("ascii", "replace"):
            session.press(key)

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    sys.stdout.write(ENTER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _draw(picture: Picture) -> None:
    # A terminal that reports no size (0 × 0) counts as one of 80 × 24.
    columns, rows = shutil.get_terminal_size()
    lines = [line[: columns - 1] for line in screen(picture)[: rows - 1]]
    # Each line clears what is left of the old one; then everything below is cleared.
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    sys.stdout.flush()


class _Lines:
    """Pictures and events as lines, one picture each second; with --json on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._events = 0
        self._shown_s = -1.0

    def show(self, picture: Picture) -> None:
        if self._shown_s < 0:
            for address in picture.addresses:
                click.echo(address, err=self._as_json)
        for event in picture.events[self._events :]:
            click.echo(event, err=self._as_json)
        self._events = len(picture.events)
        if picture.at_s - self._shown_s >= 0.9:
            self._shown_s = picture.at_s
            click.echo(log_line(picture), err=self._as_json)


def _summary(report: Report) -> Iterator[str]:
    yield report.fleet
    yield from report.events
    for phase in report.phases:
        yield (
            f"  {phase.name}, {phase.seconds:.1f} s: {phase.allowed:,} allowed, {phase.denied:,} denied, "
            f"{phase.failed:,} failed"
        )
    yield from report.rounds
    if report.agreed_after_s is not None:
        yield (
            f"After the last request all {len(report.nodes)} nodes agreed within {report.agreed_after_s:.1f} s: "
            f"{report.hot_accepted:,} accepted of {report.hot}."
        )
    elif report.hot is not None:
        seen = ", ".join(f"{name} {count:,}" for name, count in report.hot_seen.items())
        yield f"The nodes did not agree yet: {report.hot_accepted:,} accepted of {report.hot}; {seen}."
