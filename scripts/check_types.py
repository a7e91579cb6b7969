#!/usr/bin/env python3
"""Checks with pyright that everything a user of the library can import has a complete type.

    python scripts/check_types.py

`pyright --verifytypes` judges every module. The library must be complete; the server, the simulator, the demo, the
command line and the servers for tests are programs, whose modules are not public. Needs Node.js: the pyright package
uses the one on the machine, or tries to fetch one; without it, this script says so and checks nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = (
    "tidegate.server",
    "tidegate.sim",
    "tidegate.cli",
    "tidegate.demo",
    "tidegate.testing",
    "tidegate.integrations",
)
# Test tools that users import.
TOOLS = ("tidegate.testing.clock", "tidegate.testing.limiters", "tidegate.testing.faults")


def is_library(name: str) -> bool:
    """Whether users of the library see this name."""
    module = tuple(f"{prefix}." for prefix in PROGRAMS)
    return not name.startswith(module) or name.startswith(tuple(f"{tool}." for tool in TOOLS))


def main() -> int:
    """0 when complete, or when it could not be checked."""
    if shutil.which("node") is None:
        print("check_types: not checked: Node.js is not installed, and pyright needs it")
        return 0
    here = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--verifytypes",
        "tidegate",
        "--ignoreexternal",
        "--outputjson",
    ]
    run = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    try:
        found = json.loads(run.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        print(f"check_types: not checked: pyright did not run: {(run.stderr or run.stdout).strip()[-300:]}")
        return 0
    symbols = [symbol for symbol in found["symbols"] if is_library(symbol["name"])]
    if len(symbols) < 500:
        print(f"check_types: only {len(symbols)} names were found; is the package importable?")
        return 1
    incomplete = [symbol for symbol in symbols if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]]
    for symbol in incomplete:
        reasons = [each["message"].splitlines()[0] for each in symbol["diagnostics"]]
        print(f"check_types: {symbol['name']}: {'; '.join(reasons) or 'refers to an incomplete type'}")
    print(f"check_types: {len(symbols) - len(incomplete)} of {len(symbols)} names have a complete type")
    return 1 if incomplete else 0


if __name__ == "__main__":
    raise SystemExit(main())
