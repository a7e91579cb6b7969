"""The published npm SDKs, unchanged, against a running server. They are installed when the test runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import TidegateServer, Workspace

SCRIPTS = Path(__file__).parent / "npm"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip(
            "not checked on Node, the published clients @unkey/api and @unkey/ratelimit: not installed"
        )
    folder = tmp_path_factory.mktemp("npm")
    for file in SCRIPTS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    return folder


def run(packages: Path, script: str, **variables: str) -> Any:
    done = subprocess.run(
        ["node", script],
        cwd=packages,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_unkey_api_works_unchanged(packages: Path, server: TidegateServer, workspace: Workspace) -> None:
    poor = server.workspace(quota=1, quota_duration_ms=3_600_000)
    seen = run(packages, "api.mjs", URL=server.url, KEY=workspace.key.secret, POOR_KEY=poor.key.secret)
    assert seen == {
        "limit": [[True, 2, 1, "absent"], [True, 2, 0, "absent"], [False, 2, 0, "absent"]],
        "reset": 0,
        "multi": [False, [["email", "a", 2, True], ["email", "b", 0, False]]],
        "override": [True, "vip_*", 50, 2_592_000_000],
        "limited": True,
        "pages": [2, 13],
        "deleted": 0,
        "errors": {
            "notFound": ["NotFoundErrorResponse", 404, "unkey/data/ratelimit_override_not_found"],
            "invalid": ["BadRequestErrorResponse", 400, "unkey/application/invalid_input"],
            "unauthorized": ["UnauthorizedErrorResponse", 401, "unkey/authentication/key_not_found"],
            "quota": ["TooManyRequestsErrorResponse", 429, "user/too_many_requests/workspace_rate_limited"],
        },
    }


@pytest.mark.slow
def test_unkey_ratelimit_works_unchanged(
    packages: Path, server: TidegateServer, workspace: Workspace
) -> None:
    seen = run(packages, "ratelimit.mjs", URL=server.url, KEY=workspace.key.secret)
    assert seen == {
        "limit": [[True, 2, 1], [True, 2, 0], [False, 2, 0], [False, 2, 0]],
        "cost": 0,
        "override": [True, 9],
        "overridden": 9,
        "listed": [1],
        "gone": "NotFoundErrorResponse",
        "fallback": True,
    }
