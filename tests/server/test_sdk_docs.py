"""The snippets of the page about the published SDKs run as they are, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import TidegateServer, Workspace
from tests.server.test_sdk_npm import packages

__all__ = ["packages"]

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "sdks.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    found = re.findall(rf"^```{language} sdk\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    return found


def run(command: list[str], directory: Path, server: TidegateServer, workspace: Workspace) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | {"URL": server.url, "KEY": workspace.key.secret},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_snippets_run(tmp_path: Path, server: TidegateServer, workspace: Workspace) -> None:
    said = run([sys.executable, "-c", "\n".join(snippets("python"))], tmp_path, server, workspace)
    assert re.fullmatch(r"True 99 \d{13}\nTrue\n", said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_javascript_snippets_run(
    number: int, packages: Path, server: TidegateServer, workspace: Workspace
) -> None:
    (packages / f"snippet-{number}.mjs").write_text(snippets("js")[number], encoding="utf-8")
    said = run(["node", f"snippet-{number}.mjs"], packages, server, workspace)
    assert said.startswith("true 99")


def test_the_page_names_the_versions_that_are_tested() -> None:
    package = (Path(__file__).parent / "npm" / "package.json").read_text(encoding="utf-8")
    for name in ("@unkey/api", "@unkey/ratelimit"):
        found = re.search(rf'"{name}": "([^"]+)"', package)
        assert found is not None
        assert f"`{name}` {found[1]}" in PAGE
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert f"`unkey.py` {constraints.partition('unkey-py==')[2].split()[0]}" in PAGE
