from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import HOSTED_BODY_BYTES_MAX, Hosted, TidegateServer, Workspace
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.ports import KeyRow, WorkspaceRow
from tidegate.server.asgi import create_app
from tidegate.server.catalog.keys import ALL, digest_of, new_key


@pytest.fixture(scope="session")
def server() -> Iterator[TidegateServer]:
    """One server for all tests that need no special settings; each test has its own workspaces."""
    with TidegateServer("--test-mode") as server:
        yield server


@pytest.fixture
def workspace(server: TidegateServer) -> Workspace:
    return server.workspace()


@pytest.fixture
async def hosted(tmp_path: Path) -> Hosted:
    """An application that is not started yet, and a key for it."""
    url = f"sqlite:///{tmp_path}/tidegate.db"
    await migrate(url, timeout_s=10.0)
    catalog = open_catalog(url)
    key = new_key()
    await catalog.open(timeout_s=10.0)
    await catalog.put_workspace(WorkspaceRow("w", "w", True, None, None), timeout_s=10.0)
    row = KeyRow("key_1", "w", digest_of(key), "", "", ALL, 1, None, True, None)
    await catalog.put_key(row, timeout_s=10.0)
    await catalog.close()
    app = create_app(data_dir=str(tmp_path), http={"body_bytes_max": HOSTED_BODY_BYTES_MAX})
    return Hosted(app, key)
