"""migrate, cleanup and ledger, on a SQLite file and on real MariaDB, MySQL and PostgreSQL servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import PROGRAM, Invoke, InvokeJSON, Program
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.urls import open_ledger, open_origin
from tidegate.core.generations import cell_name
from tidegate.core.model import LedgerRow
from tidegate.core.sharing import ImportState
from tidegate.ports import NamespaceRow, OverrideRow
from tidegate.testing.servers import RedisServer

HOUR_MS = 3_600_000


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("mariadb", marks=pytest.mark.server),
        pytest.param("mysql", marks=pytest.mark.server),
        pytest.param("postgres", marks=pytest.mark.server),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["mariadb", "mysql", "postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    """A SQLite ledger cleans itself whenever something is published; these do not."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def publish(url: str, rows: Sequence[LedgerRow], beats: Sequence[str] = ()) -> None:
    async def work() -> None:
        ledger = open_ledger(url)
        await ledger.open(timeout_s=10)
        await ledger.publish(sorted(rows), timeout_s=10)
        for region in beats:
            await ledger.heartbeat(region, timeout_s=10)
        await ledger.close()

    asyncio.run(work())


def row(identifier: str, region: str, count: int, age_hours: int) -> LedgerRow:
    """A row whose cell began `age_hours` ago; from 2 hours on it has expired."""
    sequence = time.time_ns() // 1_000_000 // HOUR_MS - age_hours
    return LedgerRow("acme", "email", identifier, HOUR_MS, sequence, region, count, (sequence + 2) * HOUR_MS)


def test_migrate_shows_its_sql_then_runs_it_once(invoke: Invoke, invoke_json: InvokeJSON, url: str) -> None:
    planned = invoke_json("migrate", "--ledger", url, "--dry-run")
    assert any("ratelimit_window_counts" in statement for statement in planned["statements"])
    # A dry run changed nothing: the same is still to be done.
    assert invoke_json("migrate", "--ledger", url, "--dry-run") == planned
    assert "CREATE TABLE" in invoke("migrate", "--ledger", url, "--dry-run").stdout
    assert invoke_json("migrate", "--ledger", url)["statements"] == planned["statements"]
    assert invoke_json("migrate", "--ledger", url)["statements"] == []
    assert invoke("migrate", "--ledger", url).stdout == "up to date\n"
    assert invoke_json("migrate", "--ledger", url, "--dry-run")["statements"] == []


def test_migrate_in_several_processes_at_once_runs_in_one_of_them(url: str) -> None:
    command = [*PROGRAM, "migrate", "--ledger", url, "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    done = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(bool(answer["statements"]) for answer in done) == [False, False, True]


def test_a_missing_schema_is_an_error_that_names_the_migrate_command(invoke: Invoke, url: str) -> None:
    for command in ("ledger", "cleanup"):
        result = invoke(command, "--ledger", url)
        assert result.exit_code == 2
        assert "tidegate migrate --ledger" in result.stderr


def test_ledger_shows_regions_rows_lag_and_the_hottest_cells(
    invoke: Invoke, invoke_json: InvokeJSON, url: str
) -> None:
    invoke("migrate", "--ledger", url)
    rows = [
        row("alice", "fra", 70, 0),
        row("bob 🎈", "fra", 900, 0),
        row("alice", "iad", 30, 0),
        row("old", "fra", 5, 9),
    ]
    publish(url, rows, beats=["fra", "syd"])
    shown = invoke_json("ledger", "--ledger", url, "--hottest", "2")
    by_region = {region["region"]: region for region in shown["regions"]}
    assert {name: region["rows"] for name, region in by_region.items()} == {"fra": 2, "iad": 1, "syd": 0}
    assert by_region["iad"]["lag_ms"] is None
    assert 0 <= by_region["fra"]["lag_ms"] < 60_000
    assert shown["rows"] == 3
    assert [(cell["identifier"], cell["regional"]) for cell in shown["hottest"]] == [
        ("bob 🎈", 900),
        ("alice", 70),
    ]
    text = invoke("ledger", "--ledger", url).stdout
    assert "bob 🎈" in text
    assert "never" in text
    assert re.search(r"^ +900  email +bob 🎈 +acme +fra +1 h, ends in \d+ (min|s)", text, re.MULTILINE)


def test_ledger_shows_the_window_of_a_counter_that_was_reset(
    invoke: Invoke, invoke_json: InvokeJSON, url: str
) -> None:
    invoke("migrate", "--ledger", url)
    before = row("alice", "fra", 70, 0)
    reset_at_ms = time.time_ns() // 1_000_000 - 90_000
    # The current window may already be the one after the reset.
    after = before._replace(sequence=cell_name(before.sequence, reset_at_ms, HOUR_MS), regional=3)
    publish(url, [before, after])
    shown = invoke_json("ledger", "--ledger", url)["hottest"]
    assert [(each["regional"], each["sequence"], each["reset_at_ms"]) for each in shown] == [
        (70, before.sequence, None),
        (3, before.sequence, reset_at_ms),
    ]
    text = invoke("ledger", "--ledger", url).stdout
    assert re.search(r"^ +70 .* 1 h, ends in [^,]+$", text, re.MULTILINE)
    assert re.search(r"^ +3 .* 1 h, ends in [^,]+, reset [^,]+ ago$", text, re.MULTILINE)


def test_ledger_shows_the_names_of_namespaces_that_a_server_counts_by_id(
    invoke: Invoke, invoke_json: InvokeJSON, url: str
) -> None:
    invoke("migrate", "--ledger", url)
    invoke_json("keys", "create", "--ledger", url, "--workspace", "acme")

    async def create() -> None:
        catalog = open_catalog(url)
        row = NamespaceRow("rlns_1", "acme", "email.send", 1, None)
        await catalog.create_namespace(row, timeout_s=10)
        await catalog.close()

    asyncio.run(create())
    publish(url, [row("alice", "fra", 70, 0)._replace(namespace="rlns_1"), row("bob", "fra", 60, 0)])
    shown = invoke_json("ledger", "--ledger", url)["hottest"]
    assert [(each["namespace"], each["namespace_name"]) for each in shown] == [
        ("rlns_1", "email.send"),
        ("email", "email"),
    ]
    assert "email.send" in invoke("ledger", "--ledger", url).stdout


@pytest.mark.server
@pytest.mark.server
def test_ledger_shows_which_node_imports_for_the_region_of_a_redis(
    invoke: Invoke, invoke_json: InvokeJSON, tmp_path: Path, fresh_redis: RedisServer
) -> None:
    asked = ("ledger", "--ledger", f"sqlite:///{tmp_path}/ledger.db", "--origin", fresh_redis.url)
    invoke_json("migrate", "--ledger", f"sqlite:///{tmp_path}/ledger.db")
    assert invoke_json(*asked)["importer"] == {"node": None, "for_ms": None, "behind_ms": None}
    assert "no node imports for the region of this Redis; last import: never" in invoke(*asked).output

    async def take() -> None:
        origin = open_origin(fresh_redis.url)
        taken = await origin.lease("node-7", life_ms=600_000, timeout_s=10)
        state = ImportState("here", imported_at_ms=taken.time_ms, since_ms=taken.since_ms)
        await origin.lease("node-7", life_ms=600_000, state=state, timeout_s=10)
        await origin.close()

    asyncio.run(take())
    importer = invoke_json(*asked)["importer"]
    assert importer["node"] == "node-7"
    assert 0 <= importer["behind_ms"] <= importer["for_ms"]
    assert "node-7 imports, for " in invoke(*asked).output
    assert invoke_json(*asked)["importer"]["node"] == "node-7", "asking takes nothing over"


def test_cleanup_deletes_expired_rows_and_prints_how_many(
    invoke: Invoke, invoke_json: InvokeJSON, server_url: str
) -> None:
    url = server_url
    invoke("migrate", "--ledger", url)
    publish(url, [row("live", "fra", 1, 0)])
    publish(url, [row(f"old-{number}", "fra", 1, 3) for number in range(50)])
    assert invoke_json("ledger", "--ledger", url)["expired_rows"] == 50
    assert invoke_json("cleanup", "--ledger", url, "--older-than", "30d")["deleted"] == 0
    assert invoke_json("cleanup", "--ledger", url)["deleted"] == 50
    assert invoke("cleanup", "--ledger", url).stdout.startswith("deleted 0 rows")
    shown = invoke_json("ledger", "--ledger", url)
    assert (shown["rows"], shown["expired_rows"]) == (1, 0)


def test_cleanup_purges_what_was_deleted_or_revoked_long_ago(
    invoke: Invoke, invoke_json: InvokeJSON, url: str
) -> None:
    invoke("migrate", "--ledger", url)
    old, new, live = (invoke_json("keys", "create", "--ledger", url)["id"] for _ in range(3))
    mark_deleted(url, old, days=31)
    mark_deleted(url, new, days=29)

    def left() -> tuple[set[str], list[str]]:
        keys = invoke_json("keys", "list", "--all", "--ledger", url)["keys"]
        return {key["id"] for key in keys}, overrides_left(url)

    assert invoke_json("cleanup", "--ledger", url, "--purge-after", "40d")["purged"] == 0
    assert left() == ({old, new, live}, sorted([old, new]))
    assert invoke_json("cleanup", "--ledger", url)["purged"] == 2
    assert left() == ({new, live}, [new])
    assert "purged 0 overrides and keys" in invoke("cleanup", "--ledger", url).stdout
    assert invoke_json("cleanup", "--ledger", url, "--purge-after", "1d")["purged"] == 2
    assert left() == ({live}, [])


def mark_deleted(url: str, key_id: str, *, days: int) -> None:
    """Revoke a key, and set and delete an override of the same name, as if `days` ago."""
    moment_ms = time.time_ns() // 1_000_000 - days * 24 * HOUR_MS

    async def work() -> None:
        catalog = open_catalog(url)
        await catalog.open(timeout_s=10)
        keys = (await catalog.changes(0, timeout_s=10)).keys
        for held in [row for row in keys if row.id == key_id]:
            await catalog.put_key(held._replace(revoked_at_ms=moment_ms), timeout_s=10)
        # The newest change must be of a key that is not revoked: it is what the catalog keeps.
        alive = [row for row in keys if row.id != key_id and row.revoked_at_ms is None]
        await catalog.put_key(alive[0], timeout_s=10)
        await catalog.set_override(
            OverrideRow("rlor_" + key_id, "rlns_x", key_id, 1, 1_000, None), timeout_s=10
        )
        await catalog.delete_override("rlns_x", key_id, deleted_at_ms=moment_ms, timeout_s=10)
        await catalog.close()

    asyncio.run(work())


def overrides_left(url: str) -> list[str]:
    async def work() -> list[str]:
        catalog = open_catalog(url)
        await catalog.open(timeout_s=10)
        rows = (await catalog.changes(0, timeout_s=10)).overrides
        await catalog.close()
        return sorted(row.identifier for row in rows)

    return asyncio.run(work())


def test_cleanup_every_repeats_until_it_is_stopped(invoke: Invoke, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    invoke("migrate", "--ledger", url)
    process = subprocess.Popen(
        [*PROGRAM, "cleanup", "--ledger", url, "--every", "1s", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    rounds = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert rounds[1]["cutoff_ms"] > rounds[0]["cutoff_ms"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_cleanup_every_survives_a_ledger_that_is_down(more: list[str]) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "cleanup", "--ledger", "mysql://u:S3cretHunter2@127.0.0.1:1/db", "--every", "1s", *more],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert all("next run in 1 s" in line and "S3cretHunter2" not in line for line in lines)
    if more:
        assert all(json.loads(line)["error"]["type"] for line in lines)


def test_cleanup_every_ends_on_an_error_that_a_retry_cannot_fix(tidegate: Program, tmp_path: Path) -> None:
    done = tidegate("cleanup", "--ledger", f"sqlite:///{tmp_path}/none.db", "--every", "1s")
    assert done.returncode == 2
    assert "tidegate migrate" in done.stderr


def test_a_pause_below_one_second_is_an_error(invoke: Invoke, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    invoke("migrate", "--ledger", url)
    result = invoke("cleanup", "--ledger", url, "--every", "10ms")
    assert result.exit_code == 2
    assert "--every: 10 ms is too short: use at least 1s" in result.stderr


@pytest.mark.parametrize("command", ["migrate", "cleanup", "ledger"])
def test_a_ledger_that_is_down_is_an_error_without_its_password(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--ledger", "postgres://u:S3cretHunter2@127.0.0.1:1/db", "--timeout", "5")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "S3cretHunter2" not in result.output


@pytest.mark.parametrize("command", ["migrate", "cleanup", "ledger"])
def test_the_ledger_may_come_from_the_environment_or_a_file(
    invoke: Invoke, command: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    invoke("migrate", "--ledger", url)
    (tmp_path / "c.toml").write_text(f'ledger = "{url}"\nworkers = "not our business"\n')
    (tmp_path / "secret").write_text(url)
    assert invoke(command, env={"TIDEGATE_LEDGER": url}).exit_code == 0
    assert invoke(command, env={"TIDEGATE_LEDGER_FILE": str(tmp_path / "secret")}).exit_code == 0
    assert invoke(command, "--config", "c.toml").exit_code == 0
    missing = invoke(command)
    assert missing.exit_code == 2
    assert "--ledger" in missing.stderr
