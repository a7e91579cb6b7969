"""On what machine a figure was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tidegate

__all__ = ["describe", "name_peers"]


def describe() -> str:
    """One line: processor, cores, system, Python, build, servers, load."""
    core = "compiled" if tidegate.compiled else "interpreted"
    parts = [
        f"{_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        f"{platform.system()} {platform.release()}",
        f"{platform.python_implementation()} {platform.python_version()}",
        f"tidegate {tidegate.__version__} ({core})",
        _version("redis-server"),
        f"load {os.getloadavg()[0]:.1f}",
    ]
    return " · ".join(part for part in parts if part)


def name_peers(names: Sequence[str]) -> None:
    """Print which version of each peer runs. A benchmark that needs one which is not installed ends here."""
    missing = []
    for name in names:
        try:
            print(f"- {name} {version(name)}: runs")
        except PackageNotFoundError:
            print(f"- {name}: not run, it is not installed")
            missing.append(name)
    if missing:
        raise SystemExit(f"{', '.join(missing)}: make bench installs it")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(program: str) -> str:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    words = dict(word.partition("=")[::2] for word in said.split())
    return f"Redis {words['v']}" if "v" in words else ""


if __name__ == "__main__":
    print(describe())
