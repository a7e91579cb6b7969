from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import TidegateServer, Workspace


@pytest.fixture(scope="session")
def server() -> Iterator[TidegateServer]:
    """One server for all tests that need nothing special of it; each test has workspaces of its own."""
    with TidegateServer("--test-mode") as server:
        yield server


@pytest.fixture
def workspace(server: TidegateServer) -> Workspace:
    return server.workspace()
