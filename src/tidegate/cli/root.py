"""The root of the command line: the table of subcommands, and how errors become messages and exit codes.

`tidegate --help` prints the table, so that the module of a subcommand is imported only when it is called or completed.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from tidegate.cli.outcomes import JSON_KEY, fail
from tidegate.errors import MissingExtra

__all__ = ["COMMANDS", "root"]


class Entry(NamedTuple):
    """One subcommand: its module, its name there, and its line in the help."""

    module: str
    name: str
    summary: str


COMMANDS: Final[dict[str, Entry]] = {
    "serve": Entry("tidegate.cli.serve", "serve", "Run the rate limit server."),
    "demo": Entry(
        "tidegate.cli.demo", "demo", "Run a fleet of several regions on this machine, with faults to try."
    ),
    "top": Entry("tidegate.cli.top", "top", "Show who is being limited right now, live in a terminal."),
    "limit": Entry("tidegate.cli.limit", "limit", "Get a decision from a server; exits 1 if denied."),
    "multi-limit": Entry("tidegate.cli.multi_limit", "multi_limit", "Get several decisions, all or nothing."),
    "usage": Entry(
        "tidegate.cli.usage", "usage", "Show what counts against a limit, and where it was accepted."
    ),
    "reset": Entry(
        "tidegate.cli.reset", "reset", "Set the counter of an identifier back to zero, on all nodes."
    ),
    "overrides": Entry("tidegate.cli.overrides", "overrides", "Set, get, list and delete overrides."),
    "keys": Entry("tidegate.cli.keys", "keys", "Create, list, expire and revoke root keys."),
    "namespaces": Entry("tidegate.cli.namespaces", "namespaces", "List, delete and restore namespaces."),
    "workspaces": Entry("tidegate.cli.workspaces", "workspaces", "List workspaces, set API quotas."),
    "migrate": Entry("tidegate.cli.migrate", "migrate", "Create or upgrade the database schema."),
    "cleanup": Entry(
        "tidegate.cli.cleanup",
        "cleanup",
        "Delete expired and purged rows of the database, once or repeatedly.",
    ),
    "ledger": Entry(
        "tidegate.cli.ledger", "ledger", "Show regions, rows, lag and highest counts in the database."
    ),
    "simulate": Entry(
        "tidegate.sim.commands", "simulate", "Run the simulator: scenario files, seeds, accuracy, capacity."
    ),
    "rules": Entry(
        "tidegate.cli.rules", "rules", "Check and explain rules files of Envoy's rate limit service."
    ),
    "config": Entry("tidegate.cli.config", "config", "Check and show the configuration."),
    "doctor": Entry(
        "tidegate.cli.doctor", "doctor", "Check the configuration and all dependencies, and say what to fix."
    ),
    "version": Entry("tidegate.cli.version", "version", "Show the version of Tidegate."),
    "completion": Entry("tidegate.cli.completion", "completion", "Print a shell completion script."),
}

# The extra that installs a module.
EXTRAS: Final = {
    "msgspec": "server",
    "httptools": "server",
    "uvloop": "server",
    "yaml": "rls",
    "matplotlib": "plot",
}


class Root(click.Group):
    """Imports a subcommand when it is called, and turns every exception into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            command: Any = getattr(importlib.import_module(entry.module), entry.name)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise MissingExtra(extra, f"tidegate {cmd_name}") from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}:{entry.name} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click.Group would import every subcommand for its help; the table has it.
        names = [
            CompletionItem(name, help=entry.summary)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        # Set before parsing, so that a usage error is JSON too.
        ctx.meta[JSON_KEY] = "--json" in ctx.args
        try:
            code = super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any error must end with exit code 2, never 1
            code = fail(ctx, error)
        ctx.exit(code if isinstance(code, int) else 0)


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tidegate.cli.version import installed

        click.echo(f"tidegate {installed()['version']}")
        context.exit()


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def root() -> None:
    """Tidegate: a rate limiter that decides from local memory and converges across nodes and regions.

    Exit codes: 0 success; 1 denied (limit, multi-limit) or failed (simulate); 2 error.
    """
