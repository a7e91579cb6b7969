from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.harness import MONTH_MS, TIMEOUT_S, Reply, TidegateServer, Workspace, eventually
from tidegate.core.model import DURATION_MS_MAX
from tidegate.server.catalog.keys import override_urn

INT64_MAX = 2**63 - 1


@pytest.fixture
def ready(workspace: Workspace) -> Workspace:
    """A workspace whose namespace `api` exists."""
    assert workspace.limit("api").status == 200
    return workspace


def set_override(workspace: Workspace, identifier: str, limit: int = 5, duration: int = MONTH_MS) -> Reply:
    body = {"namespace": "api", "identifier": identifier, "limit": limit, "duration": duration}
    return workspace.call("setOverride", body)


def get_override(workspace: Workspace, identifier: str) -> Reply:
    return workspace.call("getOverride", {"namespace": "api", "identifier": identifier})


def delete_override(workspace: Workspace, identifier: str) -> Reply:
    return workspace.call("deleteOverride", {"namespace": "api", "identifier": identifier})


def list_overrides(workspace: Workspace, **fields: Any) -> Reply:
    return workspace.call("listOverrides", {"namespace": "api"} | fields)


def test_an_override_replaces_limit_and_duration_at_once(ready: Workspace) -> None:
    override_id = set_override(ready, "user_7", 100, 120_000).data["overrideId"]
    assert re.fullmatch(r"rlor_[A-Za-z0-9]{9}", override_id)
    data = ready.limit(identifier="user_7", limit=1, cost=2, at_ms=4_102_444_830_000).data
    assert (data["success"], data["limit"], data["remaining"]) == (True, 100, 98)
    assert data["overrideId"] == override_id
    assert data["reset"] % 120_000 == 0
    assert "overrideId" not in ready.limit(identifier="user_8").data


def test_setting_again_updates_and_keeps_the_id(ready: Workspace) -> None:
    first = set_override(ready, "user_7", 100).data["overrideId"]
    assert set_override(ready, "user_7", 200, 1_000).data["overrideId"] == first
    assert get_override(ready, "user_7").data == {
        "overrideId": first,
        "identifier": "user_7",
        "limit": 200,
        "duration": 1_000,
    }


def test_limit_0_blocks_with_200(ready: Workspace) -> None:
    set_override(ready, "spammer", 0)
    data = ready.limit(identifier="spammer", limit=1_000).data
    assert (data["success"], data["limit"], data["remaining"]) == (False, 0, 0)
    assert ready.limit(identifier="spammer", limit=1_000, cost=0).data["success"] is True


def test_an_override_that_was_deleted_is_active_again_when_it_is_set(ready: Workspace) -> None:
    set_override(ready, "user_7", 100)
    assert delete_override(ready, "user_7").data == {}
    assert ready.limit(identifier="user_7").data["limit"] == 10
    set_override(ready, "user_7", 50)
    assert ready.limit(identifier="user_7").data["limit"] == 50
    assert get_override(ready, "user_7").data["limit"] == 50


def test_after_a_delete_the_next_pattern_applies_and_then_the_request(ready: Workspace) -> None:
    set_override(ready, "*", 1)
    set_override(ready, "user_*", 2)
    set_override(ready, "user_7", 3)
    for expected, deleted in ((3, "user_7"), (2, "user_*"), (1, "*")):
        assert ready.limit(identifier="user_7", cost=0).data["limit"] == expected
        assert delete_override(ready, deleted).status == 200
    assert ready.limit(identifier="user_7", cost=0).data["limit"] == 10


def test_the_most_specific_pattern_wins_whatever_the_order(ready: Workspace) -> None:
    for identifier, limit in (("*a*", 1), ("pre*", 2), ("prem*a", 3), ("*", 4), ("premi*", 5)):
        set_override(ready, identifier, limit)
    # premi* and prem*a have five literal characters each: the one that sorts first is "prem*a".
    assert ready.limit(identifier="premium_a", cost=0).data["limit"] == 3
    assert ready.limit(identifier="premium_b", cost=0).data["limit"] == 5
    assert ready.limit(identifier="preparation", cost=0).data["limit"] == 2
    assert ready.limit(identifier="banana", cost=0).data["limit"] == 1
    assert ready.limit(identifier="xyz", cost=0).data["limit"] == 4


@pytest.mark.parametrize("special", [".", "^", "$", "+", "?", "{", "}", "[", "]", "(", ")", "|", "\\"])
def test_only_the_asterisk_is_special(ready: Workspace, special: str) -> None:
    set_override(ready, f"a{special}*", 77)
    assert ready.limit(identifier=f"a{special}b", cost=0).data["limit"] == 77
    assert ready.limit(identifier="ab", cost=0).data["limit"] == 10


def test_the_asterisk_matches_line_breaks_so_that_a_block_of_all_blocks_all(ready: Workspace) -> None:
    set_override(ready, "*", 0)
    for identifier in ("axb", "a\nb", "\n", "\r\n\u2028"):
        assert ready.limit(identifier=identifier, cost=0).data["limit"] == 0


def test_get_finds_the_literal_first_and_then_the_pattern_that_would_apply(ready: Workspace) -> None:
    pattern = set_override(ready, "premium_*", 100).data["overrideId"]
    found = get_override(ready, "premium_7").data
    assert (found["overrideId"], found["identifier"]) == (pattern, "premium_*")
    literal = set_override(ready, "premium_7", 5).data["overrideId"]
    assert get_override(ready, "premium_7").data["overrideId"] == literal
    assert set(get_override(ready, "premium_7").data) == {"overrideId", "identifier", "limit", "duration"}


def test_get_without_a_match_is_404(ready: Workspace) -> None:
    reply = get_override(ready, "nobody")
    assert (reply.status, reply.problem) == (404, "unkey/data/ratelimit_override_not_found")
    assert reply.error["title"] == "Not Found"


def test_get_without_the_permission_looks_exactly_like_no_override(
    server: TidegateServer, ready: Workspace
) -> None:
    set_override(ready, "secret", 1)
    poor = server.key(ready.id, ["ratelimit.*.limit"])

    def ask(identifier: str) -> bytes:
        reply = server.call("getOverride", {"namespace": "api", "identifier": identifier}, poor.secret)
        assert reply.status == 404
        return re.sub(rb"req_[A-Za-z0-9]+", b"req_", reply.body)

    assert ask("secret") == ask("nobody")


def test_a_grant_on_one_override_reads_this_one_and_nothing_else(
    server: TidegateServer, ready: Workspace
) -> None:
    namespace_id = ready.namespace_id("api")
    override_id = set_override(ready, "premium_*", 9).data["overrideId"]
    set_override(ready, "other", 1)
    key = server.key(ready.id, [override_urn(namespace_id, override_id)]).secret

    def status(operation: str, identifier: str, **fields: int) -> int:
        body = {"namespace": "api", "identifier": identifier} | fields
        return server.call(operation, body, key).status

    found = server.call("getOverride", {"namespace": "api", "identifier": "premium_7"}, key)
    assert found.data["overrideId"] == override_id
    assert status("getOverride", "other") == 404
    assert status("deleteOverride", "premium_*") == 403
    assert status("setOverride", "premium_*", limit=1, duration=1_000) == 403
    assert status("limit", "premium_7", limit=1, duration=1_000) == 403
    assert server.call("listOverrides", {"namespace": "api"}, key).status == 403
    elsewhere = server.key(ready.id, [override_urn("rlns_other1234", override_id)]).secret
    body = {"namespace": "api", "identifier": "premium_7"}
    assert server.call("getOverride", body, elsewhere).status == 404


def test_a_grant_for_one_override_reads_that_one_only(server: TidegateServer, ready: Workspace) -> None:
    mine = set_override(ready, "mine").data["overrideId"]
    set_override(ready, "theirs")
    grant = f"urn:tidegate:ratelimit:{ready.namespace_id('api')}:override:{mine}"
    key = server.key(ready.id, [grant])
    assert server.call("getOverride", {"namespace": "api", "identifier": "mine"}, key.secret).status == 200
    assert server.call("getOverride", {"namespace": "api", "identifier": "theirs"}, key.secret).status == 404


def test_delete_matches_the_stored_text_only_and_once(ready: Workspace) -> None:
    set_override(ready, "premium_*", 100)
    reply = delete_override(ready, "premium_7")
    assert (reply.status, reply.problem) == (404, "unkey/data/ratelimit_override_not_found")
    assert delete_override(ready, "premium_*").data == {}
    assert delete_override(ready, "premium_*").status == 404


def test_pages_are_in_the_order_of_ids_and_their_cursor_leads_on(ready: Workspace) -> None:
    ids = sorted(set_override(ready, f"user_{number}").data["overrideId"] for number in range(25))
    first = list_overrides(ready)
    assert [each["overrideId"] for each in first.data] == ids[:10], "10 without a limit"
    assert first.json["pagination"] == {"hasMore": True, "cursor": first.json["pagination"]["cursor"]}
    second = list_overrides(ready, cursor=first.json["pagination"]["cursor"], limit=10)
    assert [each["overrideId"] for each in second.data] == ids[10:20]
    third = list_overrides(ready, cursor=second.json["pagination"]["cursor"], limit=5)
    assert [each["overrideId"] for each in third.data] == ids[20:]
    assert third.json["pagination"] == {"hasMore": False}, "exactly as many as asked for, and no cursor"
    assert len(list_overrides(ready, limit=100).data) == 25
    assert set(first.data[0]) == {"overrideId", "identifier", "limit", "duration"}


def test_an_empty_namespace_lists_nothing(ready: Workspace) -> None:
    reply = list_overrides(ready)
    assert reply.data == []
    assert reply.json["pagination"] == {"hasMore": False}


@pytest.mark.parametrize("operation", ["setOverride", "getOverride", "listOverrides", "deleteOverride"])
def test_an_unknown_namespace_is_404_and_not_created(workspace: Workspace, operation: str) -> None:
    body = {"namespace": "nowhere", "identifier": "x", "limit": 5, "duration": 1_000}
    wanted = {
        "setOverride": ("namespace", "identifier", "limit", "duration"),
        "listOverrides": ("namespace",),
    }.get(operation, ("namespace", "identifier"))
    reply = workspace.call(operation, {name: body[name] for name in wanted})
    assert (reply.status, reply.problem) == (404, "unkey/data/ratelimit_namespace_not_found")
    rows = workspace.server.with_catalog(lambda catalog: catalog.changes(0, timeout_s=TIMEOUT_S))
    assert not [row for row in rows.namespaces if row.workspace_id == workspace.id]


@pytest.mark.parametrize(
    ("operation", "permission", "missing"),
    [
        ("setOverride", "set_override", 403),
        ("getOverride", "read_override", 404),
        ("listOverrides", "read_override", 403),
        ("deleteOverride", "delete_override", 403),
    ],
)
def test_each_operation_needs_its_permission_for_all_or_for_this_namespace(
    server: TidegateServer, ready: Workspace, operation: str, permission: str, missing: int
) -> None:
    namespace_id = ready.namespace_id("api")
    others = {"set_override", "read_override", "delete_override", "limit", "list_overrides"} - {permission}
    body: dict[str, Any] = {"namespace": "api"}
    if operation != "listOverrides":
        body["identifier"] = "x"
    if operation == "setOverride":
        body |= {"limit": 1, "duration": 1_000}

    def status(*permissions: str) -> int:
        if operation != "setOverride":
            set_override(ready, "x")
        return server.call(operation, body, server.key(ready.id, permissions).secret).status

    assert status(*(f"ratelimit.*.{name}" for name in others)) == missing
    assert status(f"ratelimit.rlns_other1234.{permission}") == missing
    assert status(f"ratelimit.*.{permission}") == 200
    assert status(f"ratelimit.{namespace_id}.{permission}") == 200


def test_a_403_lists_the_permissions_that_would_do(server: TidegateServer, ready: Workspace) -> None:
    key = server.key(ready.id, [])
    reply = server.call("listOverrides", {"namespace": "api"}, key.secret)
    assert reply.problem == "unkey/authorization/insufficient_permissions"
    detail = reply.error["detail"]
    assert "Missing" in detail
    assert "ratelimit.*.read_override" in detail
    assert f"ratelimit.{ready.namespace_id('api')}.read_override" in detail


def test_delete_checks_namespace_then_permission_then_override(
    server: TidegateServer, ready: Workspace
) -> None:
    poor = server.key(ready.id, []).secret
    nowhere = {"namespace": "nowhere", "identifier": "x"}
    missing = {"namespace": "api", "identifier": "missing"}
    assert server.call("deleteOverride", nowhere, poor).status == 404
    assert server.call("deleteOverride", missing, poor).status == 403
    assert ready.call("deleteOverride", missing).problem == "unkey/data/ratelimit_override_not_found"


def test_a_deleted_namespace_is_404_for_all_but_list(server: TidegateServer, ready: Workspace) -> None:
    set_override(ready, "x")
    namespace_id = ready.namespace_id("api")
    server.with_catalog(
        lambda catalog: catalog.delete_namespace(namespace_id, deleted_at_ms=1, timeout_s=TIMEOUT_S)
    )
    eventually(lambda: get_override(ready, "x").status == 404, "the deletion is seen", timeout_s=5)
    for reply in (set_override(ready, "y"), get_override(ready, "x"), delete_override(ready, "x")):
        assert (reply.status, reply.problem) == (404, "unkey/data/ratelimit_namespace_not_found")
    assert len(list_overrides(ready).data) == 1


@pytest.mark.parametrize(
    ("operation", "body", "location"),
    [
        ("setOverride", {"limit": -1}, "/properties/limit/minimum"),
        ("setOverride", {"duration": 999}, "/properties/duration/minimum"),
        ("setOverride", {"duration": INT64_MAX + 1}, "/properties/duration/maximum"),
        ("setOverride", {"identifier": ""}, "/properties/identifier/minLength"),
        ("setOverride", {"identifier": "x" * 513}, "/properties/identifier/maxLength"),
        ("setOverride", {"cost": 1}, "/additionalProperties"),
    ],
)
def test_bounds_of_set(ready: Workspace, operation: str, body: dict[str, Any], location: str) -> None:
    valid = {"namespace": "api", "identifier": "x", "limit": 5, "duration": 1_000}
    reply = ready.call(operation, valid | body)
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")
    assert location in [each["location"] for each in reply.error["errors"]]


@pytest.mark.parametrize("fields", [{"limit": 0}, {"limit": 101}, {"cursor": 7}, {"limit": "1"}, {"more": 1}])
def test_bounds_of_list(ready: Workspace, fields: dict[str, Any]) -> None:
    assert list_overrides(ready, **fields).status == 400


@pytest.mark.parametrize("duration", [1_000, 2_592_000_001, DURATION_MS_MAX])
def test_an_override_may_last_longer_than_a_request_may_ask_for(ready: Workspace, duration: int) -> None:
    set_override(ready, "long", 2, duration)
    answers = [ready.limit(identifier="long") for _ in range(3)]
    assert [answer.data["success"] for answer in answers] == [True, True, False]
    assert answers[0].data["reset"] % duration == 0
    # The node still works: its counts reach the origin.
    assert ready.limit(identifier="someone else").data["success"] is True
    eventually(
        lambda: ready.server.metrics()["tidegate_origin_dirty_subjects"] == 0, "all counts are replayed"
    )


def test_an_override_in_shadow_mode_reports_and_denies_nothing(ready: Workspace) -> None:
    rule = {"namespace": "api", "identifier": "user_7", "limit": 2, "duration": 60_000, "shadow": True}
    override_id = ready.call("setOverride", rule).data["overrideId"]
    before = ready.server.metrics()["tidegate_shadow_exceeded_total"]
    answers = [ready.limit(identifier="user_7") for _ in range(4)]
    assert [reply.data["success"] for reply in answers] == [True] * 4
    assert [reply.data.get("exceeded") for reply in answers] == [None, None, True, True]
    assert all(reply.data["overrideId"] == override_id for reply in answers)
    assert all("retry-after" not in {name.lower() for name in reply.headers} for reply in answers)
    item = {"namespace": "api", "identifier": "user_7", "limit": 9, "duration": 60_000}
    batch = ready.call("multiLimit", [item, item | {"identifier": "user_8"}]).data
    assert batch["passed"] is True
    assert [each.get("exceeded") for each in batch["limits"]] == [True, None]
    eventually(
        lambda: ready.server.metrics()["tidegate_shadow_exceeded_total"] == before + 3,
        "the metric counts them",
    )
    shown = get_override(ready, "user_7").data
    assert shown["shadow"] is True
    del rule["shadow"]
    ready.call("setOverride", rule)
    assert "shadow" not in get_override(ready, "user_7").data
    assert ready.limit(identifier="user_7").data["success"] is False


def test_shadow_must_be_true_or_false(ready: Workspace) -> None:
    rule = {"namespace": "api", "identifier": "x", "limit": 2, "duration": 60_000, "shadow": "yes"}
    assert ready.call("setOverride", rule).error["errors"][0]["message"] == "'shadow' must be of type boolean"
