from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.testing import PostgresServer, RedisServer
from tidegate.testing.fixtures import NOT_CHECKED, StartProxy

ROOT = Path(__file__).parents[1]


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


def test_every_test_that_is_skipped_while_it_runs_is_listed_at_the_end() -> None:
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip":
                message = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
                assert f"Skipped: {message}".startswith(NOT_CHECKED), f"{file}:{node.lineno}"


RUN = """
def test_one(redis_server): pass
def test_two(mysql_server): raise AssertionError("never begins")
def test_three(mysql_url): raise AssertionError("never begins")
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_run_lists_its_servers_and_what_it_could_not_check(
    fresh_redis: RedisServer, tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tidegate.testing.fixtures"]')
    (tmp_path / "test_run.py").write_text(RUN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *workers, "--rootdir", tmp_path, "-c", os.devnull, tmp_path],
        env=os.environ | {"XDG_CACHE_HOME": os.fspath(tmp_path)},  # a directory without MySQL
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    lines = done.stdout.splitlines()
    assert f"servers: Redis {fresh_redis.version}" in lines
    (missing,) = [line for line in lines if line.startswith("not checked: ")]
    assert missing.startswith("not checked: 2 tests on MySQL: mysqld is not installed")
    assert missing.endswith(": test_run.py (2)")


@pytest.mark.parametrize("program", ["redis-server", "mariadbd"])
def test_a_server_that_every_debian_has_is_never_a_reason_to_skip(tmp_path: Path, program: str) -> None:
    fixture = {"redis-server": "redis_server", "mariadbd": "mariadb_server"}[program]
    (tmp_path / "conftest.py").write_text(
        'pytest_plugins = ["tidegate.testing.fixtures"]\n'
        "from tidegate.testing.servers import process\n"
        "process.EXTRA_BINARY_PLACES = ()\n"
    )
    (tmp_path / "test_run.py").write_text(f"def test_it({fixture}): pass")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, "-c", os.devnull, tmp_path],
        env=os.environ | {"PATH": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "MissingBinary" in done.stdout
