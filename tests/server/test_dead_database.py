"""A dead database never stops decisions: what is known stays in force, even after a restart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.harness import TIMEOUT_S, TidegateServer, eventually
from tidegate.adapters.migrations import migrate
from tidegate.server.catalog.keys import namespace_id
from tidegate.testing.servers import MariaDBServer

SNAPSHOT = "catalog.snapshot"


@pytest.fixture
def ledger(mariadb_url: str) -> str:
    asyncio.run(migrate(mariadb_url))
    return mariadb_url


def fleet_node(ledger: str, folder: Path, *more: str) -> TidegateServer:
    return TidegateServer("--ledger", ledger, "--region", "fra", *more, data_dir=folder)


def is_degraded(server: TidegateServer) -> bool:
    """The state of the catalog (keys, namespaces, overrides); the limiter may report its ledger as down earlier."""
    return b"\ndegraded: catalog" in server.get("/readyz").body


def test_known_keys_namespaces_and_overrides_outlive_the_database(
    ledger: str, mariadb_server: MariaDBServer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    with fleet_node(ledger, folder) as server:
        workspace = server.workspace()
        assert workspace.limit("api", limit=100).status == 200
        set_to = {"namespace": "api", "identifier": "vip_*", "limit": 777, "duration": 60_000}
        override_id = workspace.call("setOverride", set_to).data["overrideId"]
        eventually((folder / SNAPSHOT).exists, "the snapshot is written")
        snapshot = folder / SNAPSHOT
        assert snapshot.stat().st_mode & 0o777 == 0o600
        eventually(lambda: override_id.encode() in snapshot.read_bytes(), "the snapshot has the override")
        assert workspace.key.secret.encode() not in snapshot.read_bytes()

        mariadb_server.kill()
        eventually(lambda: is_degraded(server), "the node notices")
        assert server.get("/readyz").status == 200, "degraded is not dead"
        assert workspace.limit("api", limit=100).status == 200
        assert workspace.limit("api", "vip_1").data["overrideId"] == override_id
        assert workspace.call("listOverrides", {"namespace": "api"}).status == 200
        failed = workspace.call("setOverride", set_to)
        assert (failed.status, failed.problem) == (500, "unkey/application/service_unavailable")
        assert server.call("limit", {**set_to, "identifier": "x"}, "tg_wrong").status == 401

        # A restart while the database is still down.
        assert server.stop() == 0
        server.start()
        assert server.get("/readyz").status == 200
        assert workspace.limit("api", "vip_1").data["overrideId"] == override_id
        # A new namespace is counted under the id that it will have.
        assert workspace.limit("born.in.the.dark", limit=10).data["remaining"] == 9

        mariadb_server.recover()
        eventually(lambda: server.get("/readyz").body.startswith(b"ready"), "the node recovers")
        expected = [namespace_id(workspace.id, "born.in.the.dark")]
        eventually(
            lambda: workspace.namespace_ids("born.in.the.dark") == expected, "the namespace is written"
        )
        assert workspace.limit("born.in.the.dark", limit=10).data["remaining"] == 8
        assert workspace.call("setOverride", set_to).data["overrideId"] == override_id


def test_a_snapshot_that_is_too_old_or_damaged_is_not_used(
    ledger: str, mariadb_server: MariaDBServer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    with fleet_node(ledger, folder) as server:
        workspace = server.workspace()
        workspace.limit("api")
        eventually((folder / SNAPSHOT).exists, "the snapshot is written")
        assert server.stop() == 0
    mariadb_server.kill()
    with fleet_node(ledger, folder, "--snapshot-age-max-s", "0") as server:
        assert server.get("/readyz").status == 503, "no key is known"
        reply = server.call(
            "limit",
            {"namespace": "a", "identifier": "b", "limit": 1, "duration": 1_000},
            workspace.key.secret,
        )
        assert (reply.status, reply.problem) == (500, "unkey/application/service_unavailable")
        assert "cannot be used" in server.log
    (folder / SNAPSHOT).write_bytes((folder / SNAPSHOT).read_bytes()[:-20])
    with fleet_node(ledger, folder) as server:
        assert server.get("/readyz").status == 503
        assert server.get("/livez").status == 200
        assert "damaged" in server.log
        mariadb_server.recover()
        eventually(lambda: server.get("/readyz").status == 200, "it is ready once the database answers")
        assert (
            server.call(
                "limit",
                {"namespace": "api", "identifier": "b", "limit": 1, "duration": 1_000},
                workspace.key.secret,
            ).status
            == 200
        )


def test_a_frozen_database_does_not_slow_down_decisions(
    ledger: str, mariadb_server: MariaDBServer, tmp_path: Path
) -> None:
    with fleet_node(ledger, tmp_path / "data") as server:
        workspace = server.workspace()
        workspace.limit("api", limit=10_000)
        mariadb_server.freeze()
        try:
            started = time.monotonic()
            for number in range(300):
                assert workspace.limit("api", f"user_{number % 10}", limit=10_000).status == 200
            # A single statement may wait for seconds; 300 requests that waited would take minutes.
            assert time.monotonic() - started < TIMEOUT_S
            eventually(lambda: is_degraded(server), "the node notices")
            assert workspace.limit("api", "user_1", limit=10_000).status == 200
        finally:
            mariadb_server.thaw()
        eventually(lambda: server.get("/readyz").body.startswith(b"ready"), "the node recovers")


def test_a_shared_database_without_schema_is_a_clear_error_at_the_start(
    mariadb_url: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "tidegate.cli",
                "serve",
                "--data-dir",
                str(tmp_path),
                "--listen",
                "127.0.0.1:0",
            ),
            *("--ledger", mariadb_url, "--region", "fra"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode != 0
    assert "tidegate migrate" in done.stderr
