"""`tidegate migrate`: the schema of a ledger, created or brought up to date."""

from __future__ import annotations

import click

from tidegate.cli.databases import ledger_options, run
from tidegate.cli.outcomes import answer, json_option

__all__ = ["migrate"]


@click.command()
@click.option("--dry-run", is_flag=True, help="Change nothing; show the SQL that would be run.")
@ledger_options
@json_option
def migrate(url: str, timeout_s: float, dry_run: bool, as_json: bool) -> None:
    """Create or upgrade the schema in the database of --ledger.

    Safe to run twice, and from several places at once: one works, the others wait and find nothing left to do.
    """
    from tidegate.adapters import migrations

    statements = run(migrations.migrate(url, dry_run=dry_run, timeout_s=timeout_s))
    if dry_run:
        text = "\n".join(f"{statement};" for statement in statements) or "-- up to date: nothing to run"
    else:
        text = f"migrated: {len(statements)} statements" if statements else "up to date"
    answer(as_json, {"dry_run": dry_run, "statements": statements}, text)
