"""`tidegate migrate`: create or upgrade the database schema."""

from __future__ import annotations

import click

from tidegate.cli.databases import ledger_options, run
from tidegate.cli.outcomes import json_option, print_result

__all__ = ["migrate"]


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the SQL without running it.")
@ledger_options
@json_option
def migrate(url: str, timeout_s: float, dry_run: bool, as_json: bool) -> None:
    """Create or upgrade the schema in the database of --ledger.

    Safe to run repeatedly and from several machines at once: one runs, the others wait and then find nothing to do.
    """
    from tidegate.adapters import migrations

    statements = run(migrations.migrate(url, dry_run=dry_run, timeout_s=timeout_s))
    if dry_run:
        text = "\n".join(f"{statement};" for statement in statements) or "-- up to date: nothing to run"
    else:
        text = f"migrated: {len(statements)} statements" if statements else "up to date"
    print_result(as_json, {"dry_run": dry_run, "statements": statements}, text)
