"""The command line: `tidegate serve`, `tidegate limit` and the rest, one file per subcommand.

A command translates arguments into calls of the layers below, and prints text or, with `--json`, JSON. Exit codes are a
contract (docs/reference/exit-codes.md). Modules are imported only when a subcommand needs them: `tidegate --help` loads
no driver, no server and no telemetry.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The `tidegate` program. Never returns."""
    try:
        from tidegate.cli.root import root
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.stderr.write(
            "tidegate: the command line needs click; install it with: pip install 'tidegate[cli]'\n"
        )
        sys.exit(2)
    root.main(prog_name="tidegate")
