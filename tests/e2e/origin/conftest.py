from __future__ import annotations

import pytest

from tidegate.testing import RedisServer


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.server) for kind in ("redis", "valkey")])
def server(request: pytest.FixtureRequest) -> RedisServer:
    """A server of each kind, whole and empty."""
    server: RedisServer = request.getfixturevalue(f"fresh_{request.param}")
    return server
