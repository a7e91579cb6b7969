from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually

INT64_MAX = 2**63 - 1
# A fixed instant in the future: 30 s into a minute.
NOON_MS = 4_102_444_830_000


def test_an_allowed_call_answers_the_envelope_and_consumes(workspace: Workspace) -> None:
    before_ms = time.time_ns() // 1_000_000
    reply = workspace.limit(limit=3, duration=60_000)
    after_ms = time.time_ns() // 1_000_000
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) == {"meta", "data"}
    assert set(reply.json["meta"]) == {"requestId"}
    assert re.fullmatch(r"req_[A-Za-z0-9]{9}", reply.json["meta"]["requestId"])
    data = reply.data
    assert set(data) == {"success", "limit", "remaining", "reset"}, "overrideId is absent, not null"
    assert data["reset"] in {(moment // 60_000 + 1) * 60_000 for moment in (before_ms, after_ms)}
    assert (data["success"], data["limit"], data["remaining"]) == (True, 3, 2)


def test_calls_are_allowed_up_to_the_limit_and_denied_with_200_above(workspace: Workspace) -> None:
    answers = [workspace.limit(limit=3, at_ms=NOON_MS).data for _ in range(5)]
    assert [answer["success"] for answer in answers] == [True, True, True, False, False]
    assert [answer["remaining"] for answer in answers] == [2, 1, 0, 0, 0]


def test_a_denied_call_consumes_nothing_and_reports_no_remaining(workspace: Workspace) -> None:
    assert workspace.limit(limit=10, cost=8, at_ms=NOON_MS).data["remaining"] == 2
    denied = workspace.limit(limit=10, cost=3, at_ms=NOON_MS).data
    assert (denied["success"], denied["remaining"]) == (False, 0)
    assert workspace.limit(limit=10, cost=2, at_ms=NOON_MS).data["remaining"] == 0


def test_cost_0_checks_without_consuming_even_when_nothing_is_left(workspace: Workspace) -> None:
    assert workspace.limit(limit=2, cost=0, at_ms=NOON_MS).data["remaining"] == 2
    workspace.limit(limit=2, cost=2, at_ms=NOON_MS)
    looked = workspace.limit(limit=2, cost=0, at_ms=NOON_MS).data
    assert (looked["success"], looked["remaining"]) == (True, 0)


def test_a_cost_above_the_limit_is_always_denied(workspace: Workspace) -> None:
    denied = workspace.limit(limit=2, cost=3, at_ms=NOON_MS)
    assert denied.data["success"] is False
    assert "retry-after" not in denied.headers, "there is no moment at which it would fit"
    assert workspace.limit(limit=2, cost=2, at_ms=NOON_MS).data["success"] is True


def test_the_limit_is_not_part_of_the_counter_and_the_duration_is(workspace: Workspace) -> None:
    workspace.limit(limit=10, cost=4, at_ms=NOON_MS)
    assert workspace.limit(limit=100, cost=1, at_ms=NOON_MS).data["remaining"] == 95
    assert workspace.limit(limit=10, cost=1, duration=120_000, at_ms=NOON_MS).data["remaining"] == 9


def test_a_namespace_is_the_same_counter_by_id_and_by_name(workspace: Workspace) -> None:
    workspace.limit("by.name", limit=10, cost=3, at_ms=NOON_MS)
    namespace_id = workspace.namespace_id("by.name")
    assert re.fullmatch(r"rlns_[A-Za-z0-9]{9}", namespace_id)
    assert workspace.limit(namespace_id, limit=10, at_ms=NOON_MS).data["remaining"] == 6


def test_the_window_slides_over_two_cells(workspace: Workspace) -> None:
    minute_ms = 60_000
    start_ms = NOON_MS // minute_ms * minute_ms
    full = workspace.limit(limit=10, cost=10, duration=minute_ms, at_ms=start_ms + 59_999)
    assert full.data["success"] is True
    # A quarter into the next minute, three quarters of the ten still count: 7 after rounding down.
    quarter = workspace.limit(limit=10, cost=3, duration=minute_ms, at_ms=start_ms + 75_000).data
    assert (quarter["success"], quarter["remaining"]) == (True, 0)
    assert quarter["reset"] == start_ms + 2 * minute_ms


@pytest.mark.parametrize(
    "name", ["with spaces", "ünï¢ode ☃", "a\x00b", "\n\t", "UPPER", "upper", "x" * 512, "😀" * 512]
)
def test_any_characters_are_names_and_identifiers(workspace: Workspace, name: str) -> None:
    assert workspace.limit(name, name, limit=5, at_ms=NOON_MS).data["remaining"] == 4
    assert workspace.limit(name, name, limit=5, at_ms=NOON_MS).data["remaining"] == 3


def test_names_and_identifiers_are_case_sensitive(workspace: Workspace) -> None:
    for namespace, identifier in (("n", "i"), ("N", "i"), ("n", "I")):
        assert workspace.limit(namespace, identifier, limit=5, at_ms=NOON_MS).data["remaining"] == 4


VALID: dict[str, Any] = {"namespace": "api", "identifier": "user", "limit": 10, "duration": 60_000}


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 1},
        {"limit": INT64_MAX},
        {"duration": 1_000},
        {"duration": 2_592_000_000},
        {"cost": 0},
        {"cost": INT64_MAX},
        {"namespace": "x"},
        {"identifier": "x"},
    ],
)
def test_every_bound_is_allowed(workspace: Workspace, change: dict[str, Any]) -> None:
    assert workspace.call("limit", VALID | change).status == 200


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"limit": 0}, "/properties/limit/minimum"),
        ({"limit": -1}, "/properties/limit/minimum"),
        ({"limit": INT64_MAX + 1}, "/properties/limit/maximum"),
        ({"limit": 10**30}, "/properties/limit/maximum"),
        ({"limit": 1.5}, "/properties/limit/type"),
        ({"limit": "10"}, "/properties/limit/type"),
        ({"limit": True}, "/properties/limit/type"),
        ({"limit": None}, "/properties/limit/type"),
        ({"duration": 999}, "/properties/duration/minimum"),
        ({"duration": 2_592_000_001}, "/properties/duration/maximum"),
        ({"cost": -1}, "/properties/cost/minimum"),
        ({"cost": None}, "/properties/cost/type"),
        ({"namespace": ""}, "/properties/namespace/minLength"),
        ({"namespace": "x" * 513}, "/properties/namespace/maxLength"),
        ({"namespace": 7}, "/properties/namespace/type"),
        ({"identifier": ""}, "/properties/identifier/minLength"),
        ({"identifier": "😀" * 513}, "/properties/identifier/maxLength"),
        ({"async": True}, "/additionalProperties"),
    ],
)
def test_a_violation_of_the_schema_is_a_400_that_names_the_keyword(
    workspace: Workspace, change: dict[str, Any], location: str
) -> None:
    reply = workspace.call("limit", VALID | change, Accept="application/problem+json")
    assert reply.status == 400
    assert reply.problem == "unkey/application/invalid_input"
    assert reply.headers["content-type"] == "application/json", "whatever Accept says"
    error = reply.error
    assert error["title"] == "Bad Request"
    assert error["detail"] == "POST request body for '/v2/ratelimit.limit' failed to validate schema"
    assert location in [each["location"] for each in error["errors"]]
    assert all(each["message"] for each in error["errors"])


@pytest.mark.parametrize("field", ["namespace", "identifier", "limit", "duration"])
def test_a_missing_field_is_a_400(workspace: Workspace, field: str) -> None:
    reply = workspace.call("limit", {name: value for name, value in VALID.items() if name != field})
    assert reply.status == 400
    (error,) = reply.error["errors"]
    assert error["location"] == "/required"
    assert field in error["message"]


def test_an_invalid_body_is_reported_before_a_bad_key(server: TidegateServer) -> None:
    reply = server.call("limit", {"namespace": ""}, "tg_wrong")
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")


def test_an_unknown_namespace_is_not_created_without_the_permission(
    server: TidegateServer, workspace: Workspace
) -> None:
    key = server.key(workspace.id, ["ratelimit.*.limit", "ratelimit.rlns_123456789.create_namespace"])
    reply = server.call("limit", VALID | {"namespace": "unborn"}, key.secret)
    assert (reply.status, reply.problem) == (403, "unkey/authorization/insufficient_permissions")
    assert reply.error["title"] == "Insufficient Permissions"
    assert "Missing" in reply.error["detail"]
    assert "ratelimit.*.create_namespace" in reply.error["detail"]
    names = server.with_catalog(lambda catalog: catalog.changes(0, timeout_s=TIMEOUT_S)).namespaces
    assert not [row for row in names if row.workspace_id == workspace.id]


def test_limit_needs_its_permission_for_all_namespaces_or_for_this_one_by_id(
    server: TidegateServer, workspace: Workspace
) -> None:
    workspace.limit("here")
    here = workspace.namespace_id("here")
    workspace.limit("there")
    scoped = server.key(workspace.id, [f"ratelimit.{here}.limit"])
    assert server.call("limit", VALID | {"namespace": "here"}, scoped.secret).status == 200
    assert server.call("limit", VALID | {"namespace": here}, scoped.secret).status == 200
    denied = server.call("limit", VALID | {"namespace": "there"}, scoped.secret)
    assert (denied.status, denied.problem) == (403, "unkey/authorization/insufficient_permissions")
    by_name = server.key(workspace.id, ["ratelimit.here.limit", "ratelimit.*", "*", "ratelimit.*.*"])
    assert server.call("limit", VALID | {"namespace": "here"}, by_name.secret).status == 403


def test_a_deleted_namespace_is_gone_before_permissions_are_checked(
    server: TidegateServer, workspace: Workspace
) -> None:
    workspace.limit("old")
    namespace_id = workspace.namespace_id("old")
    nothing = server.key(workspace.id, ["ratelimit.*.read_override"])
    server.with_catalog(
        lambda catalog: catalog.delete_namespace(namespace_id, deleted_at_ms=1, timeout_s=TIMEOUT_S)
    )
    eventually(lambda: workspace.limit("old").status == 410, "the deletion is seen", timeout_s=5)
    for name in ("old", namespace_id):
        reply = server.call("limit", VALID | {"namespace": name}, nothing.secret)
        assert (reply.status, reply.problem) == (410, "unkey/data/ratelimit_namespace_gone")
        assert reply.error["title"] == "Resource Gone"
    server.with_catalog(
        lambda catalog: catalog.delete_namespace(namespace_id, deleted_at_ms=None, timeout_s=TIMEOUT_S)
    )
    eventually(lambda: workspace.limit("old").status == 200, "the restoration is seen", timeout_s=5)


def test_workspaces_are_isolated(server: TidegateServer) -> None:
    one, two = server.workspace(), server.workspace()
    one.limit("shared", limit=10, cost=9, at_ms=NOON_MS)
    assert two.limit("shared", limit=10, cost=1, at_ms=NOON_MS).data["remaining"] == 9
    foreign = one.namespace_id("shared")
    stranger = server.key(two.id, ["ratelimit.*.limit"])
    assert server.call("limit", VALID | {"namespace": foreign}, stranger.secret).status == 403
    assert two.call("getOverride", {"namespace": foreign, "identifier": "x"}).status == 404


def test_the_ratelimit_fields_describe_the_limit_that_was_checked(workspace: Workspace) -> None:
    allowed = workspace.limit("email.send", limit=2, duration=90_500, at_ms=NOON_MS)
    assert allowed.headers["ratelimit-policy"] == '"email.send";q=2;w=91'
    match = re.fullmatch(r'"email\.send";r=1;t=(\d+)', allowed.headers["ratelimit"])
    assert match is not None
    assert int(match[1]) == -(-(allowed.data["reset"] - NOON_MS) // 1000)
    assert "retry-after" not in allowed.headers
    workspace.limit("email.send", limit=2, duration=90_500, at_ms=NOON_MS)
    denied = workspace.limit("email.send", limit=2, duration=90_500, at_ms=NOON_MS)
    match = re.fullmatch(r'"email\.send";r=0;t=(\d+)', denied.headers["ratelimit"])
    assert match is not None
    assert denied.headers["retry-after"] == match[1]
    waited_ms = NOON_MS + int(match[1]) * 1000
    assert workspace.limit("email.send", limit=2, duration=90_500, at_ms=waited_ms).data["success"] is True


@pytest.mark.parametrize(
    ("name", "shown"),
    [('quo"te\\', r'"quo\"te\\"'), ("ünï", '"rlns_[A-Za-z0-9]{9}"'), ("x" * 65, '"rlns_[A-Za-z0-9]{9}"')],
)
def test_a_policy_is_named_as_a_structured_string(workspace: Workspace, name: str, shown: str) -> None:
    policy = workspace.limit(name).headers["ratelimit-policy"].partition(";")[0]
    assert policy == shown or re.fullmatch(shown, policy)


def test_huge_quotas_stay_within_what_a_header_may_carry(workspace: Workspace) -> None:
    reply = workspace.limit("huge", limit=INT64_MAX)
    assert ";q=999999999999999;" in reply.headers["ratelimit-policy"]
    assert ";r=999999999999999;" in reply.headers["ratelimit"]
    assert reply.data["limit"] == INT64_MAX
    assert reply.data["remaining"] == INT64_MAX - 1


def test_an_invalid_test_time_is_a_400(workspace: Workspace) -> None:
    reply = workspace.call("limit", VALID, X_Test_Time="yesterday")
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")
