"""Every deliberately broken variant is found by a simulation, which passes otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.mutants import ENDED, MUTANTS

ROOT = Path(__file__).parents[2]


def test_there_are_at_least_ninety_mutants() -> None:
    assert len(MUTANTS) >= 90


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The program that forks for each name that it reads: importing it takes longer than most of the simulations."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sim.mutants"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        yield program


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_simulator_finds(name: str, forks: subprocess.Popen[str]) -> None:
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(f"{name}\n")
    forks.stdin.flush()
    output = []
    for line in forks.stdout:
        output.append(line)
        if line.startswith(ENDED):
            break
    assert output[-1:] == [f"{ENDED}0\n"], "".join(output)
