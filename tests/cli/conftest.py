"""The command line, called in this process (`invoke`) and as the real program (`tidegate`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result

from tidegate.cli.root import root

PROGRAM = [sys.executable, "-m", "tidegate.cli"]


class Invoke(Protocol):
    def __call__(
        self, *arguments: str | Path, stdin: str | None = None, env: dict[str, str] | None = None
    ) -> Result: ...


class InvokeJSON(Protocol):
    def __call__(self, *arguments: str | Path, exit_code: int = 0, stdin: str | None = None) -> Any: ...


class Program(Protocol):
    def __call__(
        self, *arguments: str | Path, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("TIDEGATE_"):
            monkeypatch.delenv(name)
    # Programs are started in another directory: where Python finds the package must not depend on it.
    if "PYTHONPATH" in os.environ:
        parts = os.environ["PYTHONPATH"].split(os.pathsep)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(part).resolve()) for part in parts if part))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def invoke() -> Invoke:
    def call(*arguments: str | Path, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(root, [str(argument) for argument in arguments], input=stdin, env=env)

    return call


@pytest.fixture
def invoke_json(invoke: Invoke) -> InvokeJSON:
    """Calls with --json, checks the exit code, and gives the document on stdout (or stderr, for an error)."""

    def call(*arguments: str | Path, exit_code: int = 0, stdin: str | None = None) -> Any:
        result = invoke(*arguments, "--json", stdin=stdin)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout or result.stderr)

    return call


@pytest.fixture
def tidegate(tmp_path: Path) -> Program:
    def call(
        *arguments: str | Path, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            input=stdin,
            timeout=60,
        )

    return call
