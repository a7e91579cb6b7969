"""Programs that check the server from outside, where they are installed (`make test` installs most of them)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# scripts/gateways puts what is not in a system package here.
TOOLS = Path(os.environ.get("TIDEGATE_GATEWAYS", Path(__file__).parents[3] / ".gateways"))


def find_program(name: str, what_is_not_checked: str) -> str:
    """The path of a program; skips the test when it is missing. The summary of the run lists what was not checked."""
    places = os.pathsep.join(
        [str(TOOLS / "bin"), os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"]
    )
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"not checked on {name}, {what_is_not_checked}: not installed (see scripts/gateways)")
    return found
