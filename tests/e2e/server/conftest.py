from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.server.harness import TidegateServer, Workspace


@pytest.fixture(scope="module")
def server() -> Iterator[TidegateServer]:
    """An embedded server for a file of tests; each test has a workspace of its own."""
    with TidegateServer() as server:
        yield server


@pytest.fixture
def workspace(server: TidegateServer) -> Workspace:
    return server.workspace()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Sockets are files, and a shell often allows 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
