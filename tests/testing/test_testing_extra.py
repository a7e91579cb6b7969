from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate

# Setting a module to None in sys.modules makes Python raise ImportError for it.
WITHOUT_EXTRA = """
import sys
sys.modules.update(dict.fromkeys(("pytest", "_pytest", "pytest_asyncio", "hypothesis")))
"""


def run_without_extra(code: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(tidegate.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA + code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_clock_the_fault_wrappers_and_the_servers_need_no_extra() -> None:
    done = run_without_extra(
        "from tidegate.testing import *\n"
        "clock = ManualClock(5)\n"
        "assert clock.advance(10) == 15\n"
        "print(FailingOrigin.__name__, TrackingLedger.__name__, RedisServer.__name__, FaultProxy.__name__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FailingOrigin", "TrackingLedger", "RedisServer", "FaultProxy"]


@pytest.mark.parametrize(
    ("module", "needed_for"),
    [
        ("tidegate.testing.contracts", "tidegate.testing.contracts"),
        ("tidegate.testing.contracts.origin", "tidegate.testing.contracts"),
        ("tidegate.testing.contracts.catalog", "tidegate.testing.contracts"),
        ("tidegate.testing.fixtures", "tidegate.testing.fixtures"),
    ],
)
def test_contracts_and_fixtures_without_the_extra_name_the_extra(module: str, needed_for: str) -> None:
    done = run_without_extra(f"import {module}")
    assert done.returncode == 1
    expected = f"MissingExtra: {needed_for} needs an optional dependency: pip install 'tidegate[testing]'"
    assert done.stderr.splitlines()[-1].endswith(expected)
