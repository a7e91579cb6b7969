from __future__ import annotations

import pytest

from tidegate.testing import PostgresServer, RedisServer
from tidegate.testing.fixtures import StartProxy


def test_a_test_that_uses_a_server_is_marked_by_itself(
    request: pytest.FixtureRequest, fresh_redis: RedisServer
) -> None:
    assert fresh_redis.is_running
    assert request.node.get_closest_marker("server") is not None


def test_a_test_without_a_server_is_not_marked(
    request: pytest.FixtureRequest, fault_proxy: StartProxy
) -> None:
    assert request.node.get_closest_marker("server") is None


@pytest.mark.parametrize("turn", ["first", "second"])
def test_fresh_redis_is_empty_whatever_the_test_before_left_behind(
    fresh_redis: RedisServer, turn: str
) -> None:
    assert fresh_redis.command("DBSIZE") == 0
    fresh_redis.command("SET", "key", turn)
    fresh_redis.freeze()


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_database_is_new_whatever_the_test_before_left_behind(
    postgres_server: PostgresServer, postgres_url: str, turn: str
) -> None:
    name = postgres_url.rpartition("/")[2]
    assert postgres_server.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name) == []
    postgres_server.sql("CREATE TABLE t (a INT)", name)
    postgres_server.kill()
