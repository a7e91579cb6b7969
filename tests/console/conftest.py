from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.visitor import Visitor
from tests.server.harness import TidegateServer, Workspace


@pytest.fixture(scope="module")
def server() -> Iterator[TidegateServer]:
    with TidegateServer() as server:
        yield server


@pytest.fixture
def workspace(server: TidegateServer) -> Workspace:
    return server.workspace()


@pytest.fixture
def visitor(server: TidegateServer, workspace: Workspace) -> Visitor:
    return Visitor(server, workspace.key.secret)
