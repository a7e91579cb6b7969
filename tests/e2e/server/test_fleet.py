from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.server.wire import Client, body, post, used, used_before
from tests.running_server import URL, RunningServer
from tests.server.harness import MONTH_MS, TidegateServer, Workspace, eventually
from tidegate.adapters.migrations import migrate
from tidegate.server.catalog.sync import POLL_INTERVAL_S, POLL_JITTER
from tidegate.testing import RedisServer
from tidegate.testing.servers.mysql_family import MySQLFamilyServer

pytestmark = [pytest.mark.server, pytest.mark.slow]


class Fleet(NamedTuple):
    """Two nodes in fra, one in iad, one database."""

    database: MySQLFamilyServer | RunningServer
    fra_1: TidegateServer
    fra_2: TidegateServer
    iad: TidegateServer


STORES = [("running", "redis")] if URL else [("mariadb", "redis"), ("mysql", "valkey")]


@pytest.fixture(scope="module", params=STORES, ids="-".join)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    kind, origin = request.param
    database: MySQLFamilyServer | RunningServer = request.getfixturevalue(f"{kind}_server")
    # Skips if there is none. Each region has one of its own.
    new_origin: type[RedisServer] = type(request.getfixturevalue(f"{origin}_server"))
    database.recover()
    ledger = database.create_database()
    asyncio.run(migrate(ledger))
    with ExitStack() as stack:
        stack.callback(database.drop_database, ledger)
        redis = {region: stack.enter_context(new_origin()) for region in ("fra", "iad")}

        def node(region: str) -> TidegateServer:
            arguments = ("--region", region, "--origin", redis[region].url, "--ledger", ledger)
            return stack.enter_context(TidegateServer(*arguments))

        yield Fleet(database, node("fra"), node("fra"), node("iad"))


@pytest.fixture
def workspace(fleet: Fleet) -> Workspace:
    """All servers of the fleet run, whatever the previous test left behind."""
    fleet.database.recover()
    for node in fleet[1:]:
        if node.process is None or node.process.poll() is not None:
            node.start()
    return fleet.fra_1.workspace()


def has_used(node: TidegateServer, key: str, identifier: str, count: int) -> bool:
    return used(node, key, identifier, limit=count) == count


def has_limit(node: TidegateServer, key: str, identifier: str, limit: int) -> bool:
    return bool(node.call("limit", body(identifier, limit=10), key).data["limit"] == limit)


def test_nodes_of_a_region_share_counts_and_so_do_regions(fleet: Fleet, workspace: Workspace) -> None:
    key = workspace.key.secret
    call = body("traveller", limit=40)
    for _ in range(20):
        assert fleet.fra_1.call("limit", call, key).data["success"]
        assert fleet.fra_2.call("limit", call, key).data["success"]
    for node in (fleet.fra_1, fleet.fra_2, fleet.iad):
        eventually(partial(has_used, node, key, "traveller", 40), f"{node.arguments[1]} knows of all 40")
    for node in fleet[1:]:
        assert not node.call("limit", call, key).data["success"]


def test_a_region_learns_of_the_other_while_both_are_used(fleet: Fleet, workspace: Workspace) -> None:
    key = workspace.key.secret
    accepted = 0
    nodes = (fleet.fra_1, fleet.iad)

    def spend() -> bool:
        nonlocal accepted
        results = [node.call("limit", body("both", limit=200), key).data["success"] for node in nodes]
        accepted += sum(results)
        return not any(results)

    eventually(spend, "both regions deny")
    # Anticipation may deny a little early; without knowledge of the other region, twice the limit would pass.
    assert 150 <= accepted < 400
    eventually(lambda: {used(each, key, "both") for each in nodes} == {accepted}, "both know the whole")


def counter(identifier: str, limit: int = 100) -> dict[str, Any]:
    return {"namespace": "api", "identifier": identifier, "limit": limit, "duration": MONTH_MS}


def test_usage_names_other_regions_on_every_node_with_the_age_of_their_counts(
    fleet: Fleet, workspace: Workspace
) -> None:
    key = workspace.key.secret
    call = counter("known")
    assert fleet.fra_1.call("limit", call | {"cost": 60}, key).data["success"]
    assert fleet.fra_2.call("limit", call, key).data["success"]

    def regions(node: TidegateServer) -> dict[str, Any]:
        return {each["region"]: each for each in node.call("usage", call, key).data["regions"]}

    eventually(lambda: "fra" in regions(fleet.iad), "iad names the region")
    first = regions(fleet.iad)["fra"]
    assert (first["count"] >= 60, first["age"] >= 0) == (True, True)
    assert fleet.iad.call("limit", call | {"cost": 5}, key).data["success"]
    for node in (fleet.fra_1, fleet.fra_2):

        def knows_iad(node: TidegateServer = node) -> bool:
            return bool(regions(node).get("iad", {}).get("count") == 5)

        eventually(knows_iad, "fra names the region")
        data = node.call("usage", call, key).data
        assert (data["regional"], data["foreign"], data["used"], data["remaining"]) == (61, 5, 66, 34)


def test_a_reservation_is_settled_on_another_node_and_once_although_its_own_was_killed(
    fleet: Fleet, workspace: Workspace
) -> None:
    key = workspace.key.secret
    taken = fleet.fra_1.call("reserve", {"limits": [counter("work") | {"cost": 60}]}, key).data
    fleet.fra_1.kill()
    shown = fleet.fra_2.call("usage", counter("work"), key).data
    assert (shown["reserved"], shown["used"], shown["remaining"]) == (60, 60, 40)
    assert not fleet.fra_2.call("limit", counter("work") | {"cost": 41}, key).data["success"]
    end = {"reservationId": taken["reservationId"], "costs": [25]}
    assert fleet.fra_2.call("settle", end, key).data == {"repeated": False}
    fleet.fra_1.start()
    assert fleet.fra_1.call("settle", end, key).data == {"repeated": True}
    for node in (fleet.fra_1, fleet.fra_2):
        shown = node.call("usage", counter("work"), key).data
        assert (shown["reserved"], shown["used"], shown["remaining"]) == (0, 25, 75)


def test_a_reset_on_one_node_begins_the_counter_again_in_every_region(
    fleet: Fleet, workspace: Workspace
) -> None:
    key = workspace.key.secret
    assert fleet.fra_1.call("limit", counter("again") | {"cost": 100}, key).data["success"]
    for node in fleet[1:]:
        eventually(partial(is_left, node, key, "again", 0), f"{node.arguments[1]} knows of all 100")
    assert fleet.iad.call("reset", counter("again"), key).data == {"duration": MONTH_MS, "confirmed": True}
    for node in fleet[1:]:
        eventually(partial(is_left, node, key, "again", 100), f"{node.arguments[1]} has applied the reset")


def is_left(node: TidegateServer, key: str, identifier: str, count: int) -> bool:
    return bool(node.call("usage", counter(identifier), key).data["remaining"] == count)


def test_an_override_and_a_new_key_reach_the_other_nodes_by_the_next_poll(
    fleet: Fleet, workspace: Workspace
) -> None:
    assert POLL_INTERVAL_S * (1 + POLL_JITTER) < 2.0
    key = workspace.key.secret
    for node in fleet[1:]:
        assert node.call("limit", body("vip", limit=10), key).data["limit"] == 10
    change = {"namespace": "api", "identifier": "vip", "limit": 77, "duration": 60_000}
    assert fleet.fra_1.call("setOverride", change, key).status == 200
    assert fleet.fra_1.call("limit", body("vip", limit=10), key).data["limit"] == 77, (
        "at once where it was made"
    )
    for node in (fleet.fra_2, fleet.iad):
        eventually(partial(has_limit, node, key, "vip", 77), "the override is known", 10.0)
    gone = {"namespace": "api", "identifier": "vip"}
    assert fleet.iad.call("deleteOverride", gone, key).status == 200
    eventually(partial(has_limit, fleet.fra_1, key, "vip", 10), "the deletion is known", 10.0)
    made = fleet.fra_1.key(workspace.id)
    assert fleet.iad.call("limit", body("fresh"), made.secret).status == 200, "a key made a moment ago works"


def test_a_revoked_key_is_refused_on_every_node(fleet: Fleet, workspace: Workspace) -> None:
    key = fleet.fra_1.key(workspace.id)
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(node)) for node in fleet[1:]]
        request = post(key.secret, body("revoked soon"))
        assert all(client.ask(request).status == 200 for client in clients)
        fleet.fra_1.put_key(key.row._replace(revoked_at_ms=1))
        eventually(lambda: all(client.ask(request).status == 401 for client in clients), "refused", 10.0)


def snapshot_of(server: TidegateServer) -> bytes:
    path = server.data_dir / "catalog.snapshot"
    return path.read_bytes() if path.exists() else b""


def test_a_dead_database_stops_no_decision_not_even_after_a_restart(
    fleet: Fleet, workspace: Workspace
) -> None:
    node, key = fleet.fra_1, workspace.key.secret
    assert node.call("limit", body("known"), key).status == 200
    change = {"namespace": "api", "identifier": "vip_*", "limit": 5, "duration": 3_600_000}
    override = node.call("setOverride", change, key).data["overrideId"]
    eventually(lambda: override.encode() in snapshot_of(node), "the snapshot has the override")
    fleet.database.kill()
    try:
        for _ in range(3):
            assert node.call("limit", body("known"), key).data["success"]
        data = node.call("limit", body("vip_1"), key).data
        assert (data["limit"], data["overrideId"]) == (5, override)
        refused = node.call("setOverride", change | {"limit": 6}, key)
        assert (refused.status, refused.problem) == (500, "unkey/application/service_unavailable")
        eventually(lambda: b"degraded: catalog" in node.get("/readyz").body, "it says so")
        assert node.get("/readyz").status == 200, "degraded is not dead"
        assert node.call("limit", body("new", namespace="made while it is down"), key).data["success"]

        assert node.stop() == 0
        node.start()
        assert node.call("limit", body("known"), key).data["success"]
        assert node.call("limit", body("vip_1"), key).data["overrideId"] == override
        assert node.call("limit", body("known"), "tg_unknown").status == 401
        assert used_before(node, key, "known") >= 4, "counts came back from the origin"
        assert key.encode() not in snapshot_of(node)
        assert Path(node.data_dir / "catalog.snapshot").stat().st_mode & 0o077 == 0
    finally:
        fleet.database.recover()
    eventually(lambda: node.get("/readyz").body.startswith(b"ready"), "it recovers by itself")
    assert node.call("setOverride", change | {"limit": 6}, key).status == 200


def test_a_namespace_made_while_the_database_was_away_is_written_when_it_is_back(
    fleet: Fleet, workspace: Workspace
) -> None:
    key = workspace.key.secret
    # It may still back off after the outage of the previous test, and not look up new keys.
    eventually(lambda: fleet.iad.call("limit", body("known"), key).status == 200, "the key is known")
    fleet.database.kill()
    try:
        eventually(lambda: b"degraded: catalog" in fleet.iad.get("/readyz").body, "the database is missed")
        assert fleet.iad.call("limit", body("early", namespace="pending"), key).data["success"]
    finally:
        fleet.database.recover()

    def is_there() -> bool:
        query = {"namespace": "pending"}
        return fleet.fra_2.call("listOverrides", query, key).status == 200

    eventually(is_there, "the other node finds the namespace")


def test_a_node_with_another_region_name_for_the_same_origin_refuses_to_start(
    fleet: Fleet, tmp_path: Path
) -> None:
    arguments = list(fleet.iad.arguments)
    arguments[arguments.index("--region") + 1] = "elsewhere"
    command = [sys.executable, "-m", "tidegate.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--data-dir", str(tmp_path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "iad" in ended.stderr and "elsewhere" in ended.stderr
