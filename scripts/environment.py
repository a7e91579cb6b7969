#!/usr/bin/env python3
"""Updates a virtual environment; does nothing if it is up to date.

    PYTHON scripts/environment.py DIR [--extra NAME]... [--group NAME]... [--package]

PYTHON becomes the Python of the environment. Extras and dependency groups of pyproject.toml are installed with the
exact versions of constraints.txt; later calls can add more. If either file or PYTHON changes, the environment is
created again, so that it contains no package that is no longer required.

--package also installs Tidegate itself, as users get it: not editable, compiled where possible. It is installed again
when the contents of the sources change, so that tests never run against an old install. The build uses a temporary
copy, because setuptools would include leftovers of earlier builds in build/.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "*.pyd")
# How often a long step shows how long it has been running: as a new line, or on a terminal in the same line.
PROGRESS_S = 10
TERMINAL_PROGRESS_S = 1
SELF_REFERENCE = re.compile(r"tidegate\[([\w\s,-]+)\]$")


def requirements(project: dict[str, Any], extras: Iterable[str], groups: Iterable[str]) -> set[str]:
    """The requirements of the extras and groups, with references resolved."""
    wanted: set[str] = set()

    def add_extra(name: str) -> None:
        for requirement in project["project"]["optional-dependencies"][name]:
            if reference := SELF_REFERENCE.match(requirement):
                for part in reference[1].split(","):
                    add_extra(part.strip())
            else:
                wanted.add(requirement)

    def add_group(name: str) -> None:
        for entry in project["dependency-groups"][name]:
            if isinstance(entry, dict):
                add_group(entry["include-group"])
            else:
                wanted.add(entry)

    for name in extras:
        add_extra(name)
    for name in groups:
        add_group(name)
    return wanted


def digest(*files: Path, base: Path) -> str:
    """A digest of the names and contents of files, sorted by name."""
    total = hashlib.sha256(f"{sys.version} {sys.base_prefix}".encode())
    for file in sorted(files):
        content = file.read_bytes()
        total.update(f"\0{file.relative_to(base)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


class Environment:
    """One virtual environment, and the file in it that records its contents."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self._record = directory / "tidegate-environment.json"
        self.state: dict[str, Any] = {}
        if self._record.is_file() and self.python.exists():
            self.state = json.loads(self._record.read_text())

    def create(self, basis: str) -> None:
        title = f"{self.directory}: creating an environment with Python {sys.version.split()[0]}"
        run([sys.executable, "-m", "venv", "--clear", str(self.directory)], title)
        self.state = {"basis": basis, "requirements": [], "package": None}

    def pip_install(self, title: str, *arguments: str) -> None:
        """Run pip. The record is missing until `complete`, so that an interrupted install never counts as complete."""
        self._record.unlink(missing_ok=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--no-input", *arguments]
        run(pip, f"{self.directory}: {title}")

    def complete(self, **changes: object) -> None:
        """Record what has been installed."""
        self.state.update(changes)
        self._record.write_text(json.dumps(self.state, indent=1) + "\n")


def install_requirements(environment: Environment, extras: list[str], groups: list[str]) -> None:
    constraints = ROOT / "constraints.txt"
    basis = digest(ROOT / "pyproject.toml", constraints, base=ROOT)
    if environment.state.get("basis") != basis:
        environment.create(basis)
    installed = set(environment.state["requirements"])
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), extras, groups) | installed
    if wanted != installed:
        every = sorted(wanted)
        title = f"installing {len(every)} requirements ({', '.join(extras + groups)})"
        constrained = ("--constraint", str(constraints))
        environment.pip_install(title, *constrained, *every)
        if any(each.startswith("xds-protos") for each in every):
            # It holds an older copy of some files of opentelemetry-proto. Which copy stays depends on the order in
            # which pip installs the two, unless the right one is written once more.
            flags = ("--no-deps", "--force-reinstall", *constrained)
            environment.pip_install(
                "installing opentelemetry-proto over xds-protos", *flags, "opentelemetry-proto"
            )
        environment.complete(requirements=every)


def install_package(environment: Environment) -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-build-") as name:
        copy = Path(name)
        for file in PACKAGE_FILES:
            shutil.copy2(ROOT / file, copy / file)
        shutil.copytree(ROOT / "src", copy / "src", ignore=BUILD_LEFTOVERS)
        built_from = digest(*(path for path in copy.rglob("*") if path.is_file()), base=copy)
        built_from += " pure" if os.environ.get("TIDEGATE_PURE", "") not in ("", "0") else ""
        built_from += f" -O{os.environ.get('TIDEGATE_OPT_LEVEL', '3')}"
        if environment.state["package"] == built_from:
            return
        flags = ("--no-deps", "--no-build-isolation", "--force-reinstall", "--no-cache-dir")
        title = "building and installing tidegate (about a minute where it is compiled)"
        environment.pip_install(title, *flags, str(copy))
        environment.complete(package=built_from)


def run(command: list[str], title: str, *, quiet: bool = False, **variables: str) -> None:
    """Run a command, and show on stderr what it does and how long it has been running. `quiet` shows its output only
    if it fails."""
    # No prompts; and the caller's PYTHONPATH must not affect the installation.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    with tempfile.TemporaryFile() as output:
        hidden = output if quiet else None
        began = time.monotonic()
        is_terminal = sys.stderr.isatty()
        log(title, end="" if is_terminal else "\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=hidden,
            stderr=subprocess.STDOUT if quiet else None,
            env=environ,
        )
        code = None
        while code is None:
            try:
                code = process.wait(timeout=TERMINAL_PROGRESS_S if is_terminal else PROGRESS_S)
            except subprocess.TimeoutExpired:
                progress = f"{title}: {time.monotonic() - began:.0f} s"
                log(f"\r{progress}" if is_terminal else progress, end="" if is_terminal else "\n")
            except BaseException:
                process.terminate()
                raise
        if is_terminal:
            log("")
        if code != 0:
            if quiet:
                output.seek(0)
                sys.stderr.write(output.read().decode(errors="replace"))
            raise SystemExit(f"{sys.argv[0]}: command failed: {' '.join(command)}")


def log(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--package", action="store_true")
    options = parser.parse_args()
    groups = [*options.group, *(["build"] if options.package else [])]
    environment = Environment(options.directory)
    install_requirements(environment, options.extra, groups)
    if options.package:
        install_package(environment)


if __name__ == "__main__":
    main()
