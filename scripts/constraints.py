#!/usr/bin/env python3
"""Resolves all dependencies of pyproject.toml to their newest versions, and writes constraints.txt.

Run it with the oldest supported Python, as `make constraints` does: the versions must install on all of them.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from environment import ROOT, requirements


def resolved(wanted: set[str]) -> list[str]:
    """The versions that pip would install into an empty environment, as sorted name==version lines."""
    with tempfile.TemporaryDirectory(prefix="tidegate-constraints-") as name:
        python = str(Path(name) / "venv" / "bin" / "python")
        report = Path(name) / "report.json"
        pip_install = [python, "-m", "pip", "install", "--quiet", "--no-input"]
        for command in (
            [sys.executable, "-m", "venv", str(Path(name) / "venv")],
            [*pip_install, "--upgrade", "pip"],
            [*pip_install, "--dry-run", "--ignore-installed", "--report", str(report), *sorted(wanted)],
        ):
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return sorted(f"{re.sub(r'[-_.]+', '-', item['name']).lower()}=={item['version']}" for item in found)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = resolved(
        requirements(project, project["project"]["optional-dependencies"], project["dependency-groups"])
    )
    (ROOT / "constraints.txt").write_text("\n".join(lines) + "\n")
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
