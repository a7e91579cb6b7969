"""Processes whose imports are looked at: `make coverage` would add its own to them."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["run_untraced"]


def run_untraced(program: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, with what it wrote. It must end well."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
