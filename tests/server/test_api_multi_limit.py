from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MONTH_MS, TIMEOUT_S, Reply, TidegateServer, Workspace, eventually

NOON_MS = 4_102_444_830_000


def item(identifier: str = "user", **changes: Any) -> dict[str, Any]:
    return {"namespace": "api", "identifier": identifier, "limit": 10, "duration": MONTH_MS} | changes


def batch(workspace: Workspace, *items: dict[str, Any]) -> Reply:
    return workspace.call("multiLimit", list(items), X_Test_Time=str(NOON_MS))


def test_a_batch_that_fits_consumes_every_item_in_request_order(workspace: Workspace) -> None:
    data = batch(workspace, item("b", cost=2), item("a", limit=5), item("c", namespace="other")).data
    assert data["passed"] is True
    assert [
        (each["namespace"], each["identifier"], each["limit"], each["remaining"], each["passed"])
        for each in data["limits"]
    ] == [("api", "b", 10, 8, True), ("api", "a", 5, 4, True), ("other", "c", 10, 9, True)]
    assert all(
        set(each) == {"namespace", "identifier", "limit", "remaining", "reset", "passed"}
        for each in data["limits"]
    )


def test_one_item_that_does_not_fit_keeps_all_from_consuming(workspace: Workspace) -> None:
    data = batch(workspace, item("a", cost=4), item("b", cost=11), item("c")).data
    assert data["passed"] is False
    assert [each["passed"] for each in data["limits"]] == [True, False, True]
    assert [each["remaining"] for each in data["limits"]] == [10, 0, 10], "what they had without consumption"
    for identifier in "abc":
        assert workspace.limit(identifier=identifier, cost=0, at_ms=NOON_MS).data["remaining"] == 10


def test_the_same_counter_twice_adds_up_in_order(workspace: Workspace) -> None:
    data = batch(workspace, item("a", cost=6), item("a", cost=4)).data
    assert data["passed"] is True
    assert workspace.limit(identifier="a", cost=0, at_ms=NOON_MS).data["remaining"] == 0
    data = batch(workspace, item("b", cost=6), item("b", cost=5)).data
    assert [each["passed"] for each in data["limits"]] == [True, False]
    assert workspace.limit(identifier="b", cost=0, at_ms=NOON_MS).data["remaining"] == 10


def test_the_namespace_is_echoed_as_it_was_sent(workspace: Workspace) -> None:
    workspace.limit("api")
    namespace_id = workspace.namespace_id("api")
    data = batch(workspace, item(namespace=namespace_id), item(namespace="api")).data
    assert [each["namespace"] for each in data["limits"]] == [namespace_id, "api"]


def test_overrides_apply_to_items(workspace: Workspace) -> None:
    workspace.limit("api")
    set_to = {"namespace": "api", "identifier": "vip_*", "limit": 100, "duration": 60_000}
    override_id = workspace.call("setOverride", set_to).data["overrideId"]
    first, second = batch(workspace, item("vip_1"), item("other")).data["limits"]
    assert (first["limit"], first["remaining"], first["overrideId"]) == (100, 99, override_id)
    assert "overrideId" not in second


@pytest.mark.parametrize(
    ("body", "location"),
    [
        ([], "/minItems"),
        ([item()] * 101, "/maxItems"),
        (item(), "/type"),
        ([item(), item(limit=0)], "/items/properties/limit/minimum"),
        ([item(), item(surplus=1)], "/items/additionalProperties"),
        ([item(), 7], "/items/type"),
        ([{}], "/items/required"),
        ("text", "/type"),
        (None, "/type"),
    ],
)
def test_a_violation_of_the_schema_is_a_400(workspace: Workspace, body: Any, location: str) -> None:
    reply = workspace.call("multiLimit", body)
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")
    assert location in [each["location"] for each in reply.error["errors"]]


def test_a_hundred_items_are_allowed(workspace: Workspace) -> None:
    data = batch(workspace, *(item(f"user_{number}") for number in range(100))).data
    assert data["passed"] is True
    assert len(data["limits"]) == 100


def test_unknown_namespaces_are_all_created_or_none_is(server: TidegateServer, workspace: Workspace) -> None:
    poor = server.key(workspace.id, ["ratelimit.*.limit"])
    workspace.limit("known")
    mixed = [item(namespace="known"), item(namespace="new1"), item(namespace="new2")]
    reply = server.call("multiLimit", mixed, poor.secret)
    assert (reply.status, reply.problem) == (403, "unkey/authorization/insufficient_permissions")
    rows = server.with_catalog(lambda catalog: catalog.changes(0, timeout_s=TIMEOUT_S)).namespaces
    assert [row.name for row in rows if row.workspace_id == workspace.id] == ["known"]
    assert batch(workspace, *mixed).data["passed"] is True
    assert workspace.namespace_id("new1") != workspace.namespace_id("new2")


def test_the_permission_is_needed_for_every_namespace_of_the_batch(
    server: TidegateServer, workspace: Workspace
) -> None:
    batch(workspace, item(namespace="one"), item(namespace="two"))
    one, two = workspace.namespace_id("one"), workspace.namespace_id("two")
    half = server.key(workspace.id, [f"ratelimit.{one}.limit"])
    both = server.key(workspace.id, [f"ratelimit.{one}.limit", f"ratelimit.{two}.limit"])
    items = [item(namespace="one"), item(namespace="two")]
    assert server.call("multiLimit", items, half.secret).status == 403
    assert server.call("multiLimit", items[:1], half.secret).status == 200
    assert server.call("multiLimit", items, both.secret).status == 200


def test_one_deleted_namespace_refuses_the_whole_call(server: TidegateServer, workspace: Workspace) -> None:
    batch(workspace, item(namespace="alive"), item(namespace="dead"))
    dead = workspace.namespace_id("dead")
    server.with_catalog(lambda catalog: catalog.delete_namespace(dead, deleted_at_ms=1, timeout_s=TIMEOUT_S))
    items = [item(namespace="alive"), item(namespace="dead"), item(namespace="never.created")]
    eventually(lambda: workspace.limit("dead").status == 410, "the deletion is seen", timeout_s=5)
    refused = batch(workspace, *items)
    assert (refused.status, refused.problem) == (410, "unkey/data/ratelimit_namespace_gone")
    rows = server.with_catalog(lambda catalog: catalog.changes(0, timeout_s=TIMEOUT_S)).namespaces
    assert "never.created" not in [row.name for row in rows if row.workspace_id == workspace.id]
    assert workspace.limit("alive", "user", cost=0, at_ms=NOON_MS).data["remaining"] == 9
