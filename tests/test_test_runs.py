"""`scripts/test` with programs that only print that they ran: what runs, the exit code, and what is left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tidegate.testing.servers.process import wait_until

ROOT = Path(__file__).parents[1]
# Replaces each Python. FAIL is a part of the arguments of the run that fails, HANG of the one that does not end.
PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) echo 3.11 ;;
    *"import tidegate"*) [[ -n ${PYTHONPATH:-} ]] && echo "0 src" || echo "${COMPILED:-1} installed" ;;
    *--collect-only*) ;;
    *environment.py*)
        until [[ -z ${WAITING:-} || -s $WAITING ]]; do sleep 0.01; done
        [[ -z ${NO_INSTALL:-} ]]
        ;;
    *)
        echo "ran: ${TIDEGATE_EXPECT_COMPILED:-} $*"
        [[ -z ${HANG:-} || $* != *$HANG* ]] || { echo $$ >"$HANGING"; sleep 600; }
        echo "servers: some"
        echo "all passed"
        [[ -z ${FAIL:-} || $* != *$FAIL* ]]
        ;;
esac
"""
PYTHONS = """#!/bin/bash
echo "3.11 unused"
echo "3.12 ${BUILD:-true}"
"""
# Replaces setsid on a machine so busy that it begins when the script has ended. The sixth argument is the directory
# that the script then removes.
LATE_SETSID = """#!/bin/bash
echo $$ >"$WAITING"
while [[ -d $6 ]]; do sleep 0.01; done
exec /usr/bin/setsid "$@"
"""
TITLES = [
    "-- Python 3.12, compiled, library tests",
    "-- Python 3.11, interpreted, library tests",
    "-- Python 3.11, interpreted, integrations with the lowest versions of their frameworks",
    "-- Packages, each in a fresh environment",
    "-- Python 3.11, compiled, every test",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the script, next to programs that replace everything it runs."""
    programs = {"scripts/pythons": PYTHONS, ".venv/bin/python": PYTHON, ".venvs/3.12/bin/python": PYTHON}
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    return tmp_path


def start(tree: Path, **variables: str) -> subprocess.Popen[str]:
    python = {"PYTHON": str(tree / ".venv/bin/python")}
    environment = os.environ | python | {"PYTEST_ARGS": "-n 4", "TMPDIR": str(tree), **variables}
    return subprocess.Popen(
        [tree / "scripts" / "test"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(tree: Path, **variables: str) -> tuple[int, list[str]]:
    with start(tree, **variables) as process:
        output, _ = process.communicate(timeout=60)
    return process.returncode, output.splitlines()


def test_everything_runs_once_and_the_last_lines_are_repeated(tree: Path) -> None:
    code, lines = outcome(tree)
    assert code == 0
    ran = sorted(line.split("pytest")[-1] for line in lines if line.startswith("ran: "))
    assert len(ran) == 5
    assert [line for line in lines if line.startswith("-- ")][-5:] == TITLES
    assert lines[-3:] == [TITLES[-1], "all passed", "servers: some"]
    assert list(tree.glob("tmp.*")) == []


@pytest.mark.parametrize(
    "failing", ["--ignore=tests/package", "0 tests/package", "lowest_versions", "tests/core"]
)
def test_one_run_that_fails_fails_all_and_stops_none(tree: Path, failing: str) -> None:
    code, lines = outcome(tree, FAIL=failing)
    assert code == 1
    assert [line for line in lines if line.startswith("-- ")][-5:] == TITLES


def test_a_build_that_fails_or_is_not_the_expected_one_fails(tree: Path) -> None:
    code, lines = outcome(tree, BUILD="false")
    assert code == 1
    assert "the environment could not be built" in lines
    code, lines = outcome(tree, NO_INSTALL="1")
    assert code == 1
    assert not [line for line in lines if line.startswith("ran: ")]
    code, lines = outcome(tree, COMPILED="0")
    assert code == 1
    assert "scripts/test: wanted compiled=1, found: 0 installed" in lines


def test_nothing_is_left_running_when_it_is_stopped(tree: Path) -> None:
    file = tree / "hanging"
    with start(tree, HANG="0 tests/package", HANGING=str(file)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(TITLES[3]):  # the first run has ended, and the second has not
                break
        wait_until(lambda: file.exists() and file.read_text() != "", timeout_s=30, what="the second run")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130
    pid = int(file.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=30, what="the second run to end")


def test_nothing_is_left_running_when_it_ends_before_the_other_runs_have_begun(tree: Path) -> None:
    program = tree / "programs" / "setsid"
    program.parent.mkdir()
    program.write_text(LATE_SETSID)
    program.chmod(0o755)
    file = tree / "waiting"
    path = f"{program.parent}:{os.environ['PATH']}"
    code, _ = outcome(tree, NO_INSTALL="1", WAITING=str(file), PATH=path)
    assert code == 1
    pid = int(file.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=30, what="the other runs to end")
