"""A whole server: its first start, its signals, its crashes, its workers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.disks import fill
from tests.server.harness import TIMEOUT_S, TidegateServer, eventually
from tidegate.server.process.config import CATALOG_FILE
from tidegate.testing.servers import RedisServer

BODY: dict[str, Any] = {"namespace": "demo", "identifier": "user_1", "limit": 100, "duration": 3_600_000}


def cli(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_first_start_makes_one_key_shows_it_once_and_its_curl_line_works(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with TidegateServer(data_dir=folder) as server:
        assert server.stop() == 0
        announced = server.rest_of_announcement()
        url = server.url
    assert str(folder) in announced
    (key,) = set(re.findall(r"tg_[A-Za-z0-9]{32}", announced))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert key.encode() not in b"".join(path.read_bytes() for path in folder.iterdir()), (
        "only its digest is kept"
    )
    with TidegateServer(data_dir=folder) as server:
        command = re.search(r"curl (?:.*\\\n)*.*", announced)
        assert command is not None
        line = command[0].replace(url, server.url)
        answer = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True)
        assert json.loads(answer.stdout)["data"]["success"] is True
        assert server.stop() == 0
        assert "tg_" not in server.rest_of_announcement(), "the second start shows no key"


def test_first_starts_that_fail_do_not_lose_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for _ in range(2):
            failed = run_cli("serve", "--data-dir", str(folder), "--listen", listen)
            assert (failed.returncode, failed.stdout) == (2, "")
    with TidegateServer(data_dir=folder) as server:
        assert server.stop() == 0
        (key,) = set(re.findall(r"tg_[A-Za-z0-9]{32}", server.rest_of_announcement()))
        server.start()
        assert server.call("limit", BODY, key).status == 200
        assert server.stop() == 0
        assert "tg_" not in server.rest_of_announcement(), "it was shown once"
    states = [
        found["state"] for found in cli("keys", "list", "--data-dir", str(folder), "--all", "--json")["keys"]
    ]
    assert sorted(states) == ["active", "revoked", "revoked"], "keys that were never shown are revoked"


def test_a_key_made_after_a_failed_first_start_is_the_only_one(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run_cli("serve", "--data-dir", str(folder), "--listen", listen).returncode == 2
    made = cli("keys", "create", "--data-dir", str(folder), "--json")
    with TidegateServer(data_dir=folder) as server:
        assert server.stop() == 0
        assert "tg_" not in server.rest_of_announcement()
    active = cli("keys", "list", "--data-dir", str(folder), "--json")["keys"]
    assert [found["id"] for found in active] == [made["id"]]


def test_what_a_server_and_the_keys_command_keep_on_disk_is_for_their_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    with TidegateServer(data_dir=folder) as server:
        assert server.workspace().call("limit", BODY).status == 200
        files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {"tidegate.db", "origin.db"} <= set(files)
    assert set(files.values()) == {0o600}, files
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    cli("keys", "create", "--data-dir", str(other), "--json")
    assert {path.stat().st_mode & 0o777 for path in other.iterdir()} == {0o600}


def test_rows_that_cannot_be_read_stop_no_start_and_make_no_new_key(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = [
        cli("keys", "create", "--data-dir", str(folder), "--workspace", name, "--json") for name in ("a", "b")
    ]
    with closing(sqlite3.connect(folder / CATALOG_FILE)) as other, other:
        other.execute("UPDATE ratelimit_keys SET name = ?", (b"\xff\xfe",))
        other.execute(
            "UPDATE ratelimit_workspaces SET quota = -5, quota_duration_ms = 1000 WHERE id = ?", (b"a",)
        )
    with TidegateServer(data_dir=folder) as server:
        assert [server.call("limit", BODY, each["key"]).status for each in made] == [401, 401]
        ready = server.get("/readyz").body.decode()
        assert (
            "\ndegraded: catalog: rows of the catalog cannot be read and are skipped: 2 of ratelimit_keys"
            in ready
        )
        assert server.stop() == 0
        assert "tg_" not in server.rest_of_announcement()


def test_with_json_the_first_start_prints_one_json_line(tmp_path: Path) -> None:
    with TidegateServer("--json", data_dir=tmp_path / "data") as server:
        announced = json.loads(server.announcement)
        assert announced["url"] == server.url and announced["data_dir"] == str(tmp_path / "data")
        assert server.call("limit", BODY, announced["key"]).status == 200
        answer = subprocess.run(["bash", "-c", announced["curl"]], check=True, capture_output=True, text=True)
        assert json.loads(answer.stdout)["data"]["success"] is True
        assert server.stop() == 0
        assert server.rest_of_announcement() == ""
        assert all(json.loads(line)["level"] for line in server.log.splitlines())
        assert announced["key"] not in server.log


def test_a_key_made_before_the_first_start_is_used_and_none_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = cli(
        "keys", "create", "--data-dir", str(folder), "--workspace", "acme", "--permissions", "all", "--json"
    )
    with TidegateServer(data_dir=folder) as server:
        assert server.call("limit", BODY, made["key"]).status == 200
        second = cli("keys", "create", "--data-dir", str(folder), "--workspace", "acme", "--json")
        assert server.call("limit", BODY, second["key"]).data["remaining"] == 98, "while the server runs"
        assert server.stop() == 0
        assert "tg_" not in server.rest_of_announcement()


def test_a_restart_keeps_counts_namespaces_and_overrides(tmp_path: Path) -> None:
    with TidegateServer(data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        for _ in range(7):
            workspace.call("limit", BODY)
        set_to = {"namespace": "demo", "identifier": "vip", "limit": 5, "duration": 1_000}
        override_id = workspace.call("setOverride", set_to).data["overrideId"]
        assert server.stop() == 0
        server.start()
        assert workspace.call("limit", BODY).data["remaining"] == 92
        found = workspace.call("getOverride", {"namespace": "demo", "identifier": "vip"}).data
        assert found["overrideId"] == override_id


def test_a_crash_loses_no_count_that_is_on_disk(tmp_path: Path) -> None:
    with TidegateServer(data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        many = BODY | {"limit": 1_000_000}
        for _ in range(50):
            assert workspace.call("limit", many).data["success"] is True
        eventually(lambda: server.metrics()["tidegate_origin_dirty_subjects"] == 0, "the counts are on disk")
        for _ in range(20):
            assert workspace.call("limit", many).data["success"] is True
        server.kill()
        server.start()
        kept = 1_000_000 - workspace.call("limit", many | {"cost": 0}).data["remaining"]
        assert 50 <= kept <= 70


def test_sighup_reads_the_log_level_and_the_keys_again(tmp_path: Path) -> None:
    settings = tmp_path / "tidegate.toml"
    settings.write_text('[log]\nlevel = "error"\n')
    with TidegateServer("--config", str(settings), data_dir=tmp_path / "data") as server:
        server.signal(signal.SIGHUP)
        assert server.get("/livez").status == 200
        settings.write_text('[log]\nlevel = "info"\n')
        server.signal(signal.SIGHUP)
        eventually(lambda: "read again" in server.log, "it has read them")
        settings.write_text("not toml at all [")
        server.signal(signal.SIGHUP)
        eventually(lambda: "the old one stays in force" in server.log, "a fault is announced")
        assert server.get("/livez").status == 200


def test_an_address_in_use_is_reported_and_nothing_is_left_behind(
    server: TidegateServer, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tidegate.cli", "serve", "--data-dir", str(tmp_path / "d")),
            *("--listen", f"127.0.0.1:{server.port}"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode != 0
    assert str(server.port) in done.stderr


# Pages.


def test_the_pages_for_operators(server: TidegateServer) -> None:
    assert server.get("/livez").body == b"ok\n"
    ready = server.get("/readyz")
    assert ready.status == 200
    lines = ready.body.decode().splitlines()
    assert lines[0] == "ready: tidegate"
    assert any(line.startswith("ok: catalog: ") for line in lines)
    assert any(line.startswith("ok: origin: ") for line in lines)
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b"# TYPE tidegate_decisions_total counter" in metrics.body


def test_what_identifies_callers_and_users_of_databases_is_shown_to_operators_only() -> None:
    secret = 'tidegate_top_identifier_denials{workspace="'
    with TidegateServer() as server:
        workspace = server.workspace()
        for _ in range(2):
            workspace.limit(identifier="nul\x00", limit=1)
        assert b'identifier="nul\\\\x00"' in server.get("/metrics").body
        refused = server.request("GET", "/metrics")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert server.request("GET", "/metrics", headers={"Authorization": "Bearer x"}).status == 401
        public = server.request("GET", "/readyz").body.decode()
        assert {"ready: tidegate", "ok: catalog", "ok: origin"} <= set(public.splitlines())
    with TidegateServer(env={"TIDEGATE_METRICS_TOKEN": ""}) as open_to_all:
        workspace = open_to_all.workspace()
        for _ in range(2):
            workspace.limit(limit=1)
        page = open_to_all.request("GET", "/metrics")
        assert page.status == 200
        assert b'tidegate_decisions_total{outcome="denied",source="local"} 1' in page.body
        assert secret.encode() not in page.body
        assert workspace.id.encode() not in page.body


def test_the_page_for_people_loads_nothing_from_elsewhere(server: TidegateServer) -> None:
    for path in ("/docs", "/docs/errors"):
        page = server.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert re.findall(r'src=|href="(?!#|(?:\.\./)*[a-z]+(?:[./][a-z]+)*")', page.body.decode()) == []
    text = server.get("/docs").body.decode()
    for path in server.get("/openapi.json").json["paths"]:
        assert path in text
    assert "<script" not in text


def test_requests_and_decisions_are_counted(tmp_path: Path) -> None:
    # Its own server: on a shared one, busier workspaces of other tests may fill the top of the list.
    with TidegateServer(data_dir=tmp_path) as server:
        workspace = server.workspace()
        denied = 'tidegate_decisions_total{outcome="denied",source="local"}'
        counted = 'tidegate_http_requests_total{operation="limit",status="200"}'
        before = server.metrics()
        for _ in range(5):
            workspace.limit(limit=2)
        server.call("limit", BODY, "tg_wrong")
        after = server.metrics()
        assert after[counted] - before.get(counted, 0) == 5
        assert after[denied] - before[denied] == 3
        assert after[f'tidegate_top_workspace_decisions{{workspace="{workspace.id}"}}'] == 5
        top = f'tidegate_top_identifier_denials{{workspace="{workspace.id}",namespace="api",identifier="user_1"}}'
        assert after[top] == 3
        hidden = server.workspace()
        hidden.call("limit", BODY, X_Unkey_Metrics="disabled")
        assert f'tidegate_top_workspace_decisions{{workspace="{hidden.id}"}}' not in server.metrics()


def test_the_metrics_and_health_of_the_server_itself(tmp_path: Path) -> None:
    with TidegateServer(data_dir=tmp_path, env={"TIDEGATE_HTTP_CONNECTIONS_MAX": "3"}) as server:
        found = server.metrics()
        (about,) = [name for name in found if name.startswith("tidegate_build_info{")]
        assert f'version="{tidegate.__version__}"' in about
        assert f'compiled="{str(tidegate.compiled).lower()}"' in about
        assert found["tidegate_workers"] == 1
        assert found["tidegate_http_connections"] == 1, "the one that asks"
        assert found["tidegate_http_connections_evicted_total"] == 0
        on_disk = sum(file.stat().st_size for file in tmp_path.glob("origin.db*") if "shm" not in file.name)
        assert found["tidegate_origin_file_bytes"] == on_disk > 0
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(server.socket())
            eventually(
                lambda: server.metrics()["tidegate_http_connections_evicted_total"] >= 1,
                "an idle connection is closed for the one that asks",
            )


# Workers.


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with TidegateServer("--workers", "3", data_dir=tmp_path_factory.mktemp("crowd")) as server:
        yield server


def test_workers_share_one_port_and_converge_through_the_file(crowd: TidegateServer) -> None:
    workspace = crowd.workspace()
    allowed = 0
    for _ in range(300):
        allowed += workspace.limit(limit=50, duration=3_600_000).data["success"]
    # Each request waited for the previous answer, so that only what was still in flight could be admitted twice.
    assert 50 <= allowed <= 60
    eventually(
        lambda: all(
            workspace.limit(limit=1_000, duration=3_600_000, cost=0).data["remaining"] == 1_000 - allowed
            for _ in range(20)
        ),
        "all workers know the same count",
    )


def test_a_namespace_that_many_use_first_at_once_is_created_once(crowd: TidegateServer) -> None:
    workspace = crowd.workspace()
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: workspace.limit("rush", limit=100, duration=3_600_000), range(40)))
    assert {reply.status for reply in replies} == {200}
    assert len(workspace.namespace_ids("rush")) == 1
    eventually(
        lambda: all(
            workspace.limit("rush", limit=100, duration=3_600_000, cost=0).data["remaining"] == 60
            for _ in range(20)
        ),
        "all 40 are counted in it",
    )


def test_a_change_is_effective_in_every_worker_within_seconds(crowd: TidegateServer) -> None:
    workspace = crowd.workspace()
    workspace.limit("api")
    set_to = {"namespace": "api", "identifier": "vip", "limit": 777, "duration": 60_000}
    workspace.call("setOverride", set_to)

    def everywhere() -> bool:
        return all(workspace.limit(identifier="vip", cost=0).data["limit"] == 777 for _ in range(30))

    eventually(everywhere, "the override applies in all workers", timeout_s=5)


def test_metrics_are_those_of_all_workers_and_survive_the_death_of_one(crowd: TidegateServer) -> None:
    workspace = crowd.workspace()
    counted = 'tidegate_http_requests_total{operation="limit",status="200"}'
    assert crowd.metrics()["tidegate_workers"] == 3
    before = crowd.metrics().get(counted, 0)
    for number in range(60):
        assert workspace.limit(identifier=f"user_{number}").status == 200
    assert {crowd.metrics()[counted] - before for _ in range(10)} == {60}
    (supervisor,) = {crowd.pid}
    workers = children(supervisor)
    assert len(workers) == 3
    os.kill(workers[0], signal.SIGKILL)
    eventually(
        lambda: len(children(supervisor)) == 3 and workers[0] not in children(supervisor),
        "another takes its place",
    )
    eventually(lambda: crowd.metrics()["tidegate_workers"] == 3, "and reports")
    assert crowd.metrics()[counted] - before == 60, "what the dead one had counted stays"
    assert workspace.limit().status == 200


def test_workers_end_with_their_supervisor_stopped_or_killed(tmp_path: Path) -> None:
    with TidegateServer("--workers", "2", data_dir=tmp_path / "data") as server:
        workers = children(server.pid)
        assert server.stop() == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
        server.start()
        workers = children(server.pid)
        assert len(workers) == 2
        server.kill()
        eventually(
            lambda: not any(_is_alive(worker) for worker in workers),
            "workers without a supervisor stop by themselves",
        )


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# With a Redis.


def test_a_crash_of_a_node_with_redis_loses_nothing_older_than_a_round_trip(
    fresh_redis: RedisServer, tmp_path: Path
) -> None:
    with TidegateServer("--origin", fresh_redis.url, "--region", "fra", data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        many = BODY | {"limit": 1_000_000}
        for _ in range(200):
            assert workspace.call("limit", many).data["success"] is True
        eventually(lambda: server.metrics()["tidegate_origin_dirty_subjects"] == 0, "all is acknowledged")
        server.kill()
        server.start()
        assert workspace.call("limit", many | {"cost": 0}).data["remaining"] == 1_000_000 - 200


def test_no_other_process_gets_the_port_of_a_server_that_starts_again() -> None:
    with TidegateServer() as server:
        server.kill()
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", server.port))
        server.start()
        assert server.get("/livez").status == 200


def test_a_redis_that_takes_no_counts_is_degraded_and_logged_once(
    fresh_redis: RedisServer, tmp_path: Path
) -> None:
    with TidegateServer("--origin", fresh_redis.url, "--region", "fra", data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        assert workspace.limit(limit=100).data["remaining"] == 99
        fresh_redis.command("CONFIG", "SET", "maxmemory", "1")
        numbers = itertools.count()

        def is_degraded() -> bool:
            assert workspace.limit(identifier=f"user_{next(numbers)}").data["success"] is True
            return b"\ndegraded: counts: wait in memory: " in server.get("/readyz").body

        eventually(is_degraded, "the node notices")
        for _ in range(20):
            assert is_degraded()
        assert server.log.count("counts for the origin do not arrive") == 1
        fresh_redis.command("CONFIG", "SET", "maxmemory", "0")

        def is_ready() -> bool:
            workspace.limit(identifier=f"user_{next(numbers)}")
            return server.get("/readyz").body.startswith(b"ready")

        eventually(is_ready, "the node recovers")
        assert server.log.count("counts for the origin arrive again") == 1


def test_an_embedded_server_with_a_full_disk_is_degraded_and_says_so_once(small_disk: Path) -> None:
    with TidegateServer(data_dir=small_disk) as server:
        workspace = server.workspace()
        assert workspace.limit(limit=100).data["remaining"] == 99
        filler = fill(small_disk)
        numbers = itertools.count()

        def ask() -> bytes:
            """Many new identifiers, because SQLite uses free space in its files before it needs more of the disk."""
            turn = next(numbers)
            many = [
                BODY | {"namespace": "api", "identifier": f"user_{turn}_{number}"} for number in range(100)
            ]
            for one in workspace.call("multiLimit", many).data["limits"]:
                assert one["passed"] is True
            return server.get("/readyz").body

        def is_degraded() -> bool:
            return b"\ndegraded: counts: wait in memory: " in ask()

        eventually(is_degraded, "the node notices")
        for _ in range(5):
            assert b"the disk is full" in ask()
        assert server.log.count("counts for the origin do not arrive") == 1
        filler.unlink()
        eventually(lambda: ask().startswith(b"ready"), "the node recovers")
        assert server.log.count("counts for the origin arrive again") == 1
        assert workspace.limit(limit=100, cost=0).data["remaining"] == 99


def test_a_second_server_on_the_same_data_directory_does_not_start(tmp_path: Path) -> None:
    with TidegateServer(data_dir=tmp_path / "data") as server:
        command = [sys.executable, "-m", "tidegate.cli", "serve", "--listen", "127.0.0.1:0"]
        second = subprocess.run(
            [*command, "--data-dir", str(server.data_dir)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2
        assert f"{server.data_dir} is used by another server" in second.stderr
        assert server.get("/livez").status == 200
    with TidegateServer(data_dir=tmp_path / "data") as again:
        assert again.get("/livez").status == 200, "the lock ends with the server"


def test_a_dead_redis_is_degraded_and_decisions_continue(fresh_redis: RedisServer, tmp_path: Path) -> None:
    with TidegateServer("--origin", fresh_redis.url, "--region", "fra", data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        assert workspace.limit(limit=100).data["remaining"] == 99
        fresh_redis.kill()
        eventually(lambda: server.get("/readyz").body.startswith(b"degraded"), "the node notices")
        assert server.get("/readyz").status == 200
        for number in range(50):
            assert workspace.limit(identifier=f"user_{number}").data["success"] is True
        fresh_redis.recover()
        numbers = itertools.count()

        def is_ready_again() -> bool:
            # A breaker closes when a call gets through: there must be calls.
            workspace.limit(identifier=f"new_{next(numbers)}")
            return server.get("/readyz").body.startswith(b"ready")

        eventually(is_ready_again, "the node recovers")
