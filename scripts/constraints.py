#!/usr/bin/env python3
"""Resolves all dependencies of pyproject.toml to their newest versions, and writes constraints.txt.

Run it with the oldest supported Python, as `make constraints` does: the versions must install on all of them.

It also writes deploy/requirements.txt, what a server needs, with the hash of every file of these versions:
`pip install --require-hashes` then installs nothing else. pip checks hashes of requirements only, not of constraints.
`--hashes` writes this file alone, for the versions that constraints.txt has.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

from environment import ROOT, log, requirements, run

# A link of an index page (PEP 503): the address ends with the hash, the text is the name of the file.
LINK = re.compile(r'<a [^>]*href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<]+?)\s*</a>')
# What the container image installs.
EXTRAS = ("server", "rls", "redis", "mysql", "postgres", "otel")
HASHED = ROOT / "deploy" / "requirements.txt"


def index_url() -> str:
    """The index that pip uses."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return os.environ.get("PIP_INDEX_URL") or found.stdout.strip() or "https://pypi.org/simple"


def hashes_of(name: str, version: str, index: str) -> list[str]:
    """The hashes of all files of one version, sorted."""
    with urllib.request.urlopen(  # noqa: S310 - the index that pip itself uses
        f"{index.rstrip('/')}/{name}/", timeout=60
    ) as response:
        page = response.read().decode("utf-8")
    files = re.compile(rf"(?i){name.replace('-', '[-_.]+')}-{re.escape(version)}(?:-.*\.whl|\.tar\.gz|\.zip)")
    found = sorted({digest for digest, file in LINK.findall(page) if files.fullmatch(file)})
    if not found:
        raise SystemExit(f"the index has no file of {name} {version} with a hash")
    return found


def write_hashed(project: dict[str, Any]) -> None:
    """deploy/requirements.txt: what `EXTRAS` need, in the versions of constraints.txt."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    wanted = requirements(project, EXTRAS, [])
    versions = dict(line.split("==") for line in resolved(wanted, constraints=ROOT / "constraints.txt"))
    index = index_url()
    log(f"constraints: reading the hashes of {len(versions)} packages")
    lines = [
        "# Made by `make constraints`: what a server needs, with the hash of every file. Install with --require-hashes."
    ]
    for name, version in sorted(versions.items()):
        assert pinned[name] == version, (name, version)
        hashes = [f"    --hash=sha256:{digest}" for digest in hashes_of(name, version, index)]
        lines.append(" \\\n".join([f"{name}=={version}", *hashes]))
    HASHED.write_text("\n".join(lines) + "\n")
    print(f"{HASHED.relative_to(ROOT)}: {len(versions)} packages")


def resolved(wanted: set[str], constraints: Path | None = None) -> list[str]:
    """The versions that pip would install into an empty environment, as sorted name==version lines."""
    limits = [] if constraints is None else ["--constraint", str(constraints)]
    with tempfile.TemporaryDirectory(prefix="tidegate-constraints-") as name:
        python = str(Path(name) / "venv" / "bin" / "python")
        report = Path(name) / "report.json"
        pip_install = [python, "-m", "pip", "install", "--quiet", "--no-input"]
        run([sys.executable, "-m", "venv", str(Path(name) / "venv")], "constraints: creating an environment")
        run([*pip_install, "--upgrade", "pip"], "constraints: updating its pip")
        dry_run = ["--dry-run", "--ignore-installed", "--report", str(report)]
        run(
            [*pip_install, *dry_run, *limits, *sorted(wanted)],
            f"constraints: resolving {len(wanted)} requirements",
        )
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return sorted(f"{re.sub(r'[-_.]+', '-', item['name']).lower()}=={item['version']}" for item in found)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if "--hashes" not in sys.argv[1:]:
        lines = resolved(
            requirements(project, project["project"]["optional-dependencies"], project["dependency-groups"])
        )
        (ROOT / "constraints.txt").write_text("\n".join(lines) + "\n")
        print(f"constraints.txt: {len(lines)} packages")
    write_hashed(project)


if __name__ == "__main__":
    main()
