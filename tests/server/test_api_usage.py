from __future__ import annotations

from typing import Any

from tests.server.harness import Workspace

NOON_MS = 4_102_444_800_000
COUNTER = {"namespace": "api", "identifier": "user", "limit": 10, "duration": 60_000}


def usage(workspace: Workspace, at_ms: int = NOON_MS, **changes: Any) -> Any:
    return workspace.call("usage", COUNTER | changes, X_Test_Time=str(at_ms))


def test_usage_says_what_counts_and_consumes_nothing(workspace: Workspace) -> None:
    workspace.call("limit", COUNTER | {"cost": 8}, X_Test_Time=str(NOON_MS))
    workspace.call("limit", COUNTER, X_Test_Time=str(NOON_MS + 90_000))
    expected = {"limit": 10, "duration": 60_000, "used": 5, "remaining": 5, "reset": NOON_MS + 120_000}
    parts = {"own": 1, "regional": 1, "foreign": 0, "carried": 4, "reserved": 0, "regions": []}
    for _ in range(2):
        data = usage(workspace, NOON_MS + 90_000).data
        assert {name: data[name] for name in (*expected, *parts)} == expected | parts


def test_usage_judges_by_the_override_that_applies(workspace: Workspace) -> None:
    workspace.limit("api")
    rule = {"namespace": "api", "identifier": "user", "limit": 3, "duration": 60_000}
    override_id = workspace.call("setOverride", rule).data["overrideId"]
    data = usage(workspace).data
    assert (data["limit"], data["overrideId"]) == (3, override_id)


def test_usage_creates_no_namespace(workspace: Workspace) -> None:
    assert usage(workspace, namespace="never used").problem == "unkey/data/ratelimit_namespace_not_found"


def test_usage_needs_the_permission_to_limit(workspace: Workspace) -> None:
    workspace.limit("api")
    allowed = f"ratelimit.{workspace.namespace_id('api')}.limit"
    for permission, status in ("ratelimit.*.read_override", 403), (allowed, 200):
        key = workspace.server.key(workspace.id, [permission])
        assert workspace.server.call("usage", COUNTER, key.secret).status == status


def test_usage_takes_no_cost(workspace: Workspace) -> None:
    error = usage(workspace, cost=1).error
    assert "'cost' is unknown" in error["errors"][0]["message"]
