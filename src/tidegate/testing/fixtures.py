"""A pytest plugin with real servers: `pytest_plugins = ["tidegate.testing.fixtures"]` in the top conftest.py.

Servers live as long as the session (under pytest-xdist: as long as the worker, each with servers of its own). A test
that hurts one need not repair it: the fixtures that hand out clean state recover it first.

| fixture | what a test gets |
| --- | --- |
| `fresh_redis`, `fresh_redis_cluster`, `fresh_redis_sentinel` | the session's servers, whole and empty |
| `mariadb_url`, `postgres_url` | the URL of a new database, dropped afterwards |
| `fault_proxy` | `fault_proxy(port, seed=0)` starts a `FaultProxy` in front of a port |
| `redis_server`, `redis_cluster`, `redis_sentinel`, `mariadb_server`, `postgres_server` | as the last test left it |

A test that uses any of them (fault_proxy apart) gets the marker `server`, unless it asks by `getfixturevalue` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

from tidegate.errors import MissingExtra
from tidegate.testing.proxy import FaultProxy
from tidegate.testing.servers import MariaDBServer, PostgresServer, RedisCluster, RedisSentinel, RedisServer

try:
    import pytest
except ImportError as error:
    raise MissingExtra("testing", "tidegate.testing.fixtures") from error

SERVER_FIXTURES = frozenset(
    {"redis_server", "redis_cluster", "redis_sentinel", "mariadb_server", "postgres_server"}
)


class StartProxy(Protocol):
    """What the fixture `fault_proxy` is: starts a proxy that ends with the test."""

    def __call__(self, upstream_port: int, *, seed: int = 0) -> FaultProxy: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "server: needs a real server, which the test itself starts")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and not SERVER_FIXTURES.isdisjoint(item.fixturenames):
            item.add_marker("server")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[RedisSentinel]:
    with RedisSentinel() as sentinel:
        yield sentinel


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDBServer]:
    with MariaDBServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def fresh_redis(redis_server: RedisServer) -> RedisServer:
    redis_server.recover()
    redis_server.flush()
    return redis_server


@pytest.fixture
def fresh_redis_cluster(redis_cluster: RedisCluster) -> RedisCluster:
    redis_cluster.recover()
    redis_cluster.flush()
    return redis_cluster


@pytest.fixture
def fresh_redis_sentinel(redis_sentinel: RedisSentinel) -> RedisSentinel:
    redis_sentinel.recover()
    redis_sentinel.flush()
    return redis_sentinel


@pytest.fixture
def mariadb_url(mariadb_server: MariaDBServer) -> Iterator[str]:
    yield from _new_database(mariadb_server)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield from _new_database(postgres_server)


def _new_database(server: MariaDBServer | PostgresServer) -> Iterator[str]:
    server.recover()
    url = server.create_database()
    yield url
    server.recover()  # the test may have left it dead or frozen
    server.drop_database(url)


@pytest.fixture
def fault_proxy() -> Iterator[StartProxy]:
    with ExitStack() as proxies:

        def start(upstream_port: int, *, seed: int = 0) -> FaultProxy:
            return proxies.enter_context(FaultProxy(upstream_port, seed=seed))

        yield start
