"""A pytest plugin with real servers: `pytest_plugins = ["tidegate.testing.fixtures"]` in the top conftest.py.

Servers live as long as the session (under pytest-xdist: as long as the worker, each with servers of its own). A test
that breaks one need not repair it: the fixtures with clean state recover it first.

| fixture | what a test gets |
| --- | --- |
| `fresh_redis`, `fresh_valkey`, `fresh_redis_cluster`, `fresh_redis_sentinel` | the session's, whole and empty |
| `mariadb_url`, `mysql_url`, `postgres_url` | the URL of a new database, dropped afterwards |
| `fault_proxy` | `fault_proxy(port, seed=0)` starts a `FaultProxy` in front of a port |
| `redis_server`, `valkey_server`, `redis_cluster`, `redis_sentinel` | as the last test left it |
| `mariadb_server`, `mysql_server`, `postgres_server` | as the last test left it |

A test that uses any of them (fault_proxy apart) gets the marker `server`, unless it asks by `getfixturevalue` only.

Where MySQL or Valkey is missing, its tests are skipped. The others are packages of every Debian: without one, its
tests fail. At its end the run lists the servers with their versions, and what was not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from tidegate.errors import MissingExtra
from tidegate.testing.proxy import FaultProxy
from tidegate.testing.servers import (
    MariaDBServer,
    MissingBinary,
    MySQLServer,
    PostgresServer,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    ServerProcess,
    ValkeyServer,
)
from tidegate.testing.servers.mysql_family import MySQLFamilyServer
from tidegate.testing.servers.redis_group import RedisGroup

try:
    import pytest
except ImportError as error:
    raise MissingExtra("testing", "tidegate.testing.fixtures") from error

SERVER_FIXTURES = frozenset(
    {
        *("redis_server", "valkey_server", "redis_cluster", "redis_sentinel"),
        *("mariadb_server", "mysql_server", "postgres_server"),
    }
)
NAMES = {
    "redis": "Redis",
    "valkey": "Valkey",
    "redis-cluster": "Redis Cluster",
    "redis-sentinel": "Redis Sentinel",
    "mariadb": "MariaDB",
    "mysql": "MySQL",
    "postgres": "PostgreSQL",
}
MAY_BE_MISSING = (MySQLServer, ValkeyServer)
NOT_CHECKED = "Skipped: not checked on "
# The servers that tests have used, as "kind version". Under pytest-xdist each worker reports its own to the controller.
USED = pytest.StashKey[set[str]]()
WORKER_OUTPUT = "tidegate_servers"

Server = TypeVar("Server", bound=ServerProcess)
Group = TypeVar("Group", bound=RedisGroup)


class StartProxy(Protocol):
    """What the fixture `fault_proxy` is: starts a proxy that ends with the test."""

    def __call__(self, upstream_port: int, *, seed: int = 0) -> FaultProxy: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "server: needs a real server, which the test itself starts")
    config.stash[USED] = set()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and not SERVER_FIXTURES.isdisjoint(item.fixturenames):
            item.add_marker("server")


# ---- the summary of the run


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # pytest-xdist sets it, in workers only
    if output is not None:
        used = session.config.stash[USED]
        output[WORKER_OUTPUT] = sorted(used)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that crashed has no output.
    node.config.stash[USED].update(getattr(node, "workeroutput", {}).get(WORKER_OUTPUT, ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    order = list(NAMES)
    servers = [server.split() for server in config.stash[USED]]
    servers.sort(key=lambda server: order.index(server[0]))
    skipped: dict[str, Counter[str]] = {}  # what is missing -> test file -> number of tests
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason.startswith(NOT_CHECKED):
            files = skipped.setdefault(reason.removeprefix(NOT_CHECKED), Counter())
            files[report.nodeid.partition("::")[0]] += 1
    if not servers and not skipped:
        return
    terminalreporter.section("servers")
    # One line each, with a fixed beginning: scripts/test repeats them at its end.
    shown = ", ".join(f"{NAMES[kind]} {version}" for kind, version in servers)
    terminalreporter.line(f"servers: {shown or 'none'}")
    for missing, files in skipped.items():
        counts = ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        terminalreporter.line(f"not checked: {files.total()} tests on {missing}: {counts}")


def _serve(config: pytest.Config, server: Server) -> Iterator[Server]:
    try:
        server.start()
    except MissingBinary as error:
        if isinstance(server, MAY_BE_MISSING):
            pytest.skip(f"not checked on {NAMES[server.kind]}: {error}")
        raise
    try:
        config.stash[USED].add(f"{server.kind} {server.version}")
        yield server
    finally:
        server.close()


def _serve_group(config: pytest.Config, group: Group) -> Iterator[Group]:
    with group:
        *_, last = group.members
        config.stash[USED].add(f"{last.kind} {last.version}")
        yield group


# ---- fixtures


@pytest.fixture(scope="session")
def redis_server(pytestconfig: pytest.Config) -> Iterator[RedisServer]:
    yield from _serve(pytestconfig, RedisServer())


@pytest.fixture(scope="session")
def valkey_server(pytestconfig: pytest.Config) -> Iterator[ValkeyServer]:
    yield from _serve(pytestconfig, ValkeyServer())


@pytest.fixture(scope="session")
def redis_cluster(pytestconfig: pytest.Config) -> Iterator[RedisCluster]:
    yield from _serve_group(pytestconfig, RedisCluster())


@pytest.fixture(scope="session")
def redis_sentinel(pytestconfig: pytest.Config) -> Iterator[RedisSentinel]:
    yield from _serve_group(pytestconfig, RedisSentinel())


@pytest.fixture(scope="session")
def mariadb_server(pytestconfig: pytest.Config) -> Iterator[MariaDBServer]:
    yield from _serve(pytestconfig, MariaDBServer())


@pytest.fixture(scope="session")
def mysql_server(pytestconfig: pytest.Config) -> Iterator[MySQLServer]:
    yield from _serve(pytestconfig, MySQLServer())


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> Iterator[PostgresServer]:
    yield from _serve(pytestconfig, PostgresServer())


@pytest.fixture
def fresh_redis(redis_server: RedisServer) -> RedisServer:
    redis_server.recover()
    redis_server.flush()
    return redis_server


@pytest.fixture
def fresh_valkey(valkey_server: ValkeyServer) -> ValkeyServer:
    valkey_server.recover()
    valkey_server.flush()
    return valkey_server


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
def mysql_url(mysql_server: MySQLServer) -> Iterator[str]:
    yield from _new_database(mysql_server)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield from _new_database(postgres_server)


def _new_database(server: MySQLFamilyServer | PostgresServer) -> Iterator[str]:
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
