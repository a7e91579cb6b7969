"""`tidegate version`: the installed version."""

from __future__ import annotations

import platform

import click

from tidegate import __version__, compiled
from tidegate.cli.outcomes import json_option, print_result

__all__ = ["installed", "version"]


def installed() -> dict[str, str | bool]:
    """Version of Tidegate and of Python, and whether the core is compiled."""
    return {"version": __version__, "compiled": compiled, "python": platform.python_version()}


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the version of Tidegate, and whether its core is compiled."""
    here = installed()
    core = "compiled core" if here["compiled"] else "interpreted core"
    print_result(as_json, here, f"tidegate {here['version']}, {core}, Python {here['python']}")
