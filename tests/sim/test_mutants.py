"""Every deliberately broken variant is found by a simulation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


def test_there_are_at_least_ninety_mutants() -> None:
    assert len(MUTANTS) >= 90


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_simulator_finds(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.mutants", name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{name}: seed ")
