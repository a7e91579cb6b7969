from __future__ import annotations

import time
from typing import Any

import pytest

from tests.server.harness import Reply, TidegateServer, Workspace, eventually
from tidegate.server.catalog.keys import new_key

BODY: dict[str, Any] = {"namespace": "api", "identifier": "user", "limit": 10, "duration": 60_000}
OPERATIONS = ["limit", "multiLimit", "setOverride", "getOverride", "listOverrides", "deleteOverride"]


def body_of(operation: str) -> Any:
    if operation == "multiLimit":
        return [BODY]
    names = {
        "limit": BODY,
        "setOverride": ("namespace", "identifier", "limit", "duration"),
        "listOverrides": ("namespace",),
    }.get(operation, ("namespace", "identifier"))
    return {name: BODY[name] for name in names}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_an_authorization_header_the_input_is_invalid(server: TidegateServer, operation: str) -> None:
    reply = server.call(operation, body_of(operation), None)
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")
    assert f"POST request for '/v2/ratelimit.{operation}'" in reply.error["detail"]
    assert len(reply.error["errors"]) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "value", ["tg_abc", "bearer tg_abc", "Basic dXNlcg==", "Bearer", "Bearer  ", "Bearertg_abc", ""]
)
def test_a_header_that_is_not_a_bearer_token_is_malformed(
    server: TidegateServer, operation: str, value: str
) -> None:
    reply = server.call(operation, body_of(operation), None, Authorization=value)
    assert (reply.status, reply.problem) == (400, "unkey/authentication/malformed")
    assert reply.error["errors"] == [], "every 400 has them"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_unknown_key_is_401(server: TidegateServer, operation: str) -> None:
    reply = server.call(operation, body_of(operation), new_key())
    assert (reply.status, reply.problem) == (401, "unkey/authentication/key_not_found")
    assert reply.error["title"] == "Unauthorized"
    assert "errors" not in reply.error
    assert reply.headers["www-authenticate"] == "Bearer"


def test_whitespace_around_the_token_is_trimmed(workspace: Workspace) -> None:
    for value in (f"Bearer {workspace.key.secret}", f"Bearer   {workspace.key.secret}  "):
        assert workspace.server.call("limit", BODY, None, Authorization=value).status == 200


def test_a_key_works_at_once_although_another_process_made_it(server: TidegateServer) -> None:
    # Every other test relies on this; here it is tested by itself.
    workspace = server.workspace()
    assert workspace.limit().status == 200


@pytest.mark.parametrize(
    ("change", "problem", "title"),
    [
        ({"enabled": False}, "unkey/authorization/key_disabled", "Key is disabled"),
        ({"expires_at_ms": 1}, "unkey/authorization/forbidden", "Forbidden"),
    ],
)
def test_a_key_that_is_disabled_or_has_expired_is_403(
    server: TidegateServer, workspace: Workspace, change: dict[str, Any], problem: str, title: str
) -> None:
    key = server.key(workspace.id, **change)
    reply = server.call("limit", BODY, key.secret)
    assert (reply.status, reply.problem, reply.error["title"]) == (403, problem, title)


def test_a_key_expires_while_it_is_in_use(server: TidegateServer, workspace: Workspace) -> None:
    key = server.key(workspace.id, expires_at_ms=time.time_ns() // 1_000_000 + 600)
    assert server.call("limit", BODY, key.secret).status == 200
    eventually(lambda: server.call("limit", BODY, key.secret).status == 403, "the key expires", timeout_s=5)


def test_a_revoked_key_is_unknown_within_seconds(server: TidegateServer, workspace: Workspace) -> None:
    key = server.key(workspace.id)
    assert server.call("limit", BODY, key.secret).status == 200
    server.put_key(key.row._replace(revoked_at_ms=1))
    eventually(lambda: server.call("limit", BODY, key.secret).status == 401, "it is refused", timeout_s=3)


def test_a_disabled_workspace_refuses_all_its_keys_within_seconds(server: TidegateServer) -> None:
    workspace = server.workspace()
    assert workspace.limit().status == 200
    server.put_workspace(workspace.row._replace(enabled=False))
    eventually(lambda: workspace.limit().status == 403, "it is refused", timeout_s=3)
    reply = workspace.limit()
    assert reply.problem == "unkey/authorization/workspace_disabled"
    assert reply.error["title"] == "Workspace is disabled"


# Content types.


def error(server: TidegateServer, accept: str | None) -> Reply:
    headers = {} if accept is None else {"Accept": accept}
    return server.request(
        "POST",
        "/v2/ratelimit.limit",
        b'{"namespace":"a","identifier":"b","limit":1,"duration":1000}',
        headers | {"Authorization": "Bearer x"},
    )


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "application/json"),
        ("application/json", "application/json"),
        ("text/html", "application/json"),
        ("application/problem+json", "application/problem+json"),
        ("application/*", "application/problem+json"),
        ("*/*", "application/problem+json"),
        ("text/html, Application/Problem+JSON; q=0.5", "application/problem+json"),
        ("application/problem+json;q=0", "application/json"),
    ],
)
def test_errors_are_problem_json_when_accept_asks_for_it(
    server: TidegateServer, accept: str | None, expected: str
) -> None:
    reply = error(server, accept)
    assert reply.status == 401
    assert reply.headers["content-type"] == expected
    assert set(reply.json) == {"meta", "error"}, "the envelope is the same"


# The quota of a workspace.


def test_the_quota_of_a_workspace_limits_the_calls_of_all_its_keys(server: TidegateServer) -> None:
    workspace = server.workspace(quota=5, quota_duration_ms=3_600_000)
    other = server.key(workspace.id)
    replies = [workspace.limit("a"), server.call("limit", BODY, other.secret), workspace.limit("a", cost=0)]
    assert [reply.headers["ratelimit-limit"] for reply in replies] == ["5"] * 3
    assert [reply.headers["ratelimit-remaining"] for reply in replies] == ["4", "3", "2"]
    assert all(1 <= int(reply.headers["ratelimit-reset"]) <= 3_600 for reply in replies)
    missing = workspace.call("getOverride", {"namespace": "a", "identifier": "x"})
    assert (missing.status, missing.headers["ratelimit-remaining"]) == (404, "1"), "on every answer"
    workspace.call("multiLimit", [BODY])
    for _ in range(2):
        refused = workspace.limit("a")
        assert (refused.status, refused.problem) == (429, "user/too_many_requests/workspace_rate_limited")
        assert refused.error["title"] == "Too Many Requests"
        assert refused.headers["content-type"] == "application/problem+json", "although Accept says otherwise"
        assert refused.headers["ratelimit-remaining"] == "0"
        assert int(refused.headers["retry-after"]) >= 1


def test_a_batch_uses_as_much_of_the_quota_as_it_has_items(server: TidegateServer) -> None:
    workspace = server.workspace(quota=5, quota_duration_ms=3_600_000)
    items = [{"namespace": "api", "identifier": f"u{n}", "limit": 9, "duration": 60_000} for n in range(3)]
    first = workspace.call("multiLimit", items)
    assert (first.status, first.headers["ratelimit-remaining"]) == (200, "2")
    assert workspace.call("multiLimit", items).status == 429
    assert workspace.call("multiLimit", items[:2]).status == 200
    assert workspace.limit().status == 429


def test_the_end_of_a_reservation_uses_as_much_of_the_quota_as_it_has_limits(server: TidegateServer) -> None:
    workspace = server.workspace(quota=100, quota_duration_ms=3_600_000)
    item = {"namespace": "api", "limit": 100, "duration": 3_600_000}
    body = {"limits": [{**item, "identifier": f"id_{n}"} for n in range(20)]}
    reserved = workspace.call("reserve", body)
    assert reserved.headers["ratelimit-remaining"] == "80"
    ended = workspace.call("release", {"reservationId": reserved.data["reservationId"]})
    assert ended.headers["ratelimit-remaining"] == "60"


def test_a_refused_call_checks_nothing_and_an_invalid_one_uses_no_quota(server: TidegateServer) -> None:
    workspace = server.workspace(quota=2, quota_duration_ms=3_600_000)
    assert workspace.limit(limit=0).status == 400
    assert workspace.limit("a", "user", limit=10).data["remaining"] == 9
    assert workspace.limit("a", "user", limit=10).data["remaining"] == 8
    assert workspace.limit("a", "user", limit=10).status == 429
    assert workspace.limit("never.created").status == 429, "the quota comes before the namespace"


def test_a_workspace_without_a_quota_has_no_quota_headers(workspace: Workspace) -> None:
    assert "ratelimit-limit" not in workspace.limit().headers


def test_a_quota_may_be_set_and_lifted_while_it_runs(server: TidegateServer) -> None:
    workspace = server.workspace()
    server.put_workspace(workspace.row._replace(quota=0, quota_duration_ms=1_000))
    eventually(lambda: workspace.limit().status == 429, "the quota is in force", timeout_s=3)
    assert "retry-after" not in workspace.limit().headers, "0 calls never fit"
    server.put_workspace(workspace.row)
    eventually(lambda: workspace.limit().status == 200, "the quota is lifted", timeout_s=3)
