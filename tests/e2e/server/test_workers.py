from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server.wire import Client, body, post, used, used_before
from tests.server.harness import TidegateServer, eventually
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.first_start import prepare
from tidegate.server.process.sockets import Sockets
from tidegate.server.process.supervisor import Supervisor
from tidegate.testing.servers.process import child_pids, is_gone


@pytest.fixture(scope="module")
def pair() -> Iterator[TidegateServer]:
    with TidegateServer("--workers", "2") as server:
        yield server


def allowed(server: TidegateServer) -> float:
    return sum(
        value
        for name, value in server.metrics().items()
        if name.startswith('tidegate_decisions_total{outcome="allowed"')
    )


def test_two_workers_without_redis_agree_through_the_file(pair: TidegateServer) -> None:
    key = pair.workspace().key.secret
    for _ in range(60):  # a connection each, so that the kernel spreads them over both
        assert pair.call("limit", body("shared", limit=100), key).data["success"]
    eventually(
        lambda: {used(pair, key, "shared", limit=100) for _ in range(20)} == {60},
        "both workers know of all 60",
    )
    accepted = sum(pair.call("limit", body("shared", limit=100), key).data["success"] for _ in range(200))
    # A worker that gets no answer of the file in time decides from memory: a few more may pass.
    assert 40 <= accepted <= 60
    eventually(
        lambda: (
            not any(pair.call("limit", body("shared", limit=100), key).data["success"] for _ in range(20))
        ),
        "both deny",
    )


def test_metrics_are_those_of_all_workers_whichever_is_asked(pair: TidegateServer) -> None:
    key = pair.workspace().key.secret
    before = allowed(pair)
    for number in range(100):
        assert pair.call("limit", body(f"counted_{number}"), key).data["success"]
    pages = [pair.metrics() for _ in range(10)]
    assert {page["tidegate_workers"] for page in pages} == {2}
    assert {allowed(pair) - before for _ in range(10)} == {100}
    requests = 'tidegate_http_requests_total{operation="limit",status="200"}'
    assert all(page[requests] >= 100 for page in pages), sorted(pages[0])


def test_a_killed_worker_is_replaced_and_what_it_counted_is_kept(pair: TidegateServer) -> None:
    key = pair.workspace().key.secret
    for _ in range(50):
        assert pair.call("limit", body("survivor"), key).data["success"]
    eventually(lambda: pair.metrics()["tidegate_origin_dirty_subjects"] == 0, "the file has all of them")
    before = allowed(pair)
    workers = set(child_pids(pair.pid))
    assert len(workers) == 2
    victim = min(workers)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: is_gone(victim), "it is dead")

    def is_whole_again() -> bool:
        now = set(child_pids(pair.pid))
        return len(now) == 2 and victim not in now and pair.metrics().get("tidegate_workers") == 2

    eventually(lambda: attempt(is_whole_again), "there are two workers again")
    eventually(
        lambda: {used(pair, key, "survivor") for _ in range(20)} == {50},
        "the new one has read what was counted",
    )
    assert allowed(pair) >= before, "counters never fall"


def attempt(condition: object) -> bool:
    """A connection that was waiting for a worker that died is reset: clients retry, and so does this."""
    assert callable(condition)
    try:
        return bool(condition())
    except (ConnectionError, OSError):
        return False


def test_workers_stop_with_their_supervisor_and_flush() -> None:
    with TidegateServer("--workers", "2") as server:
        key = server.workspace().key.secret
        workers = child_pids(server.pid)
        for _ in range(100):
            assert server.call("limit", body("flushed"), key).data["success"]
        assert server.stop() == 0
        assert all(is_gone(pid) for pid in workers)
        server.start()
        assert used_before(server, key, "flushed") == 100


def test_workers_do_not_outlive_a_supervisor_that_was_killed() -> None:
    with TidegateServer("--workers", "2") as server:
        workers = child_pids(server.pid)
        assert len(workers) == 2
        server.kill()
        eventually(lambda: all(is_gone(pid) for pid in workers), "the workers are gone too")


def test_sighup_reaches_every_worker() -> None:
    with TidegateServer("--workers", "2") as server:
        key = server.workspace().key.secret
        server.signal(signal.SIGHUP)
        with Client(server) as client:
            assert client.ask(post(key, body("after"))).data["success"]
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_a_worker_that_replaces_another_logs_at_the_level_that_sighup_set(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('[log]\nlevel = "warning"\n')
    with TidegateServer("--workers", "2", "--config", str(file), data_dir=tmp_path / "data") as server:
        assert "listening on" not in server.log
        file.write_text('[log]\nlevel = "info"\n')
        server.signal(signal.SIGHUP)
        os.kill(min(child_pids(server.pid)), signal.SIGKILL)
        eventually(lambda: "starting another" in server.log, "its end is noticed")
        eventually(lambda: "listening on" in server.log, "the new one says that it listens")


class StoppedWhileStarting(Supervisor):
    """The signal comes while a worker is being created, before it is in the list."""

    async def _start(self, bound: Sockets) -> Any:
        self._stopping.set()
        for _ in range(10):  # turns of the loop in which the workers in the list get the signal
            await asyncio.sleep(0)
        return await super()._start(bound)


async def test_a_worker_that_is_started_while_the_supervisor_stops_is_stopped_too(tmp_path: Path) -> None:
    config = ServerConfig(listen="127.0.0.1:0", data_dir=str(tmp_path), workers=2)
    await prepare(config)  # otherwise it would exit by itself, because the schema is missing
    assert await StoppedWhileStarting(config).run() == 0


async def test_workers_that_can_never_start_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidegate.server.process.supervisor.RESTART_FIRST_S", 0.001)
    monkeypatch.setattr("tidegate.server.process.supervisor.sys.executable", "/bin/false")
    config = ServerConfig(listen="127.0.0.1:0", data_dir=str(tmp_path), workers=2)
    assert await Supervisor(config).run() == 1
    assert "the server stops" in caplog.text
