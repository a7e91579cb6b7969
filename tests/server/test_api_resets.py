from __future__ import annotations

import itertools
import time
from typing import Any

import httpx
import pytest

from tests.server.harness import Hosted, Workspace, eventually
from tidegate import Limit
from tidegate.core.resets import Reset

COUNTER = {"namespace": "api", "identifier": "user", "limit": 3, "duration": 86_400_000}


def use_up(workspace: Workspace, **changes: Any) -> None:
    while workspace.call("limit", COUNTER | changes).data["success"]:
        pass


def test_reset_begins_a_counter_again(workspace: Workspace) -> None:
    use_up(workspace)
    answer = workspace.call("reset", COUNTER)
    assert answer.data == {"duration": 86_400_000, "confirmed": True}
    assert workspace.call("limit", COUNTER).data["remaining"] == 2


def test_reset_concerns_one_identifier_under_one_limit(workspace: Workspace) -> None:
    others: list[dict[str, Any]] = [{"identifier": "another"}, {"duration": 60_000}, {"namespace": "mail"}]
    for changes in ({}, *others):
        use_up(workspace, **changes)
    workspace.call("reset", COUNTER)
    for changes in others:
        assert not workspace.call("limit", COUNTER | changes).data["success"]


def test_reset_finds_the_counter_of_the_override_that_applies(workspace: Workspace) -> None:
    workspace.limit("api")
    rule = {"namespace": "api", "identifier": "user", "limit": 2, "duration": 3_600_000}
    workspace.call("setOverride", rule)
    use_up(workspace)
    assert workspace.call("reset", COUNTER).data["duration"] == 3_600_000
    assert workspace.call("limit", COUNTER).data["remaining"] == 1


def test_reset_creates_no_namespace(workspace: Workspace) -> None:
    answer = workspace.call("reset", COUNTER | {"namespace": "never used"})
    assert answer.problem == "unkey/data/ratelimit_namespace_not_found"


def test_reset_needs_its_own_permission(workspace: Workspace) -> None:
    use_up(workspace)
    granted = f"ratelimit.{workspace.namespace_id('api')}.reset"
    for permission, status in ("ratelimit.*.limit", 403), ("ratelimit.*.set_override", 403), (granted, 200):
        key = workspace.server.key(workspace.id, [permission])
        assert workspace.server.call("reset", COUNTER, key.secret).status == status
        left = workspace.call("usage", COUNTER).data["remaining"]
        assert left == (3 if status == 200 else 0)


def test_a_reset_without_a_key_or_in_another_workspace_is_refused(workspace: Workspace) -> None:
    use_up(workspace)
    for key in (None, "tg_" + "x" * 32):
        answer = workspace.server.call("reset", COUNTER, key)
        assert answer.status == (400 if key is None else 401)
    other = workspace.server.workspace()
    other.limit("api")
    assert other.call("reset", COUNTER).status == 200
    assert not workspace.call("limit", COUNTER).data["success"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"identifier": ""}, "identifier"),
        ({"duration": 1}, "duration"),
        ({"cost": 1}, "cost"),
        ({"limit": "3"}, "limit"),
    ],
)
def test_a_bad_body_is_refused_and_nothing_is_reset(
    workspace: Workspace, changes: dict[str, Any], field: str
) -> None:
    use_up(workspace)
    answer = workspace.call("reset", COUNTER | changes)
    assert answer.status == 400
    assert f"'{field}'" in answer.error["errors"][0]["message"]
    assert not workspace.call("limit", COUNTER).data["success"]


def test_the_log_says_who_reset_what_and_holds_no_key(workspace: Workspace) -> None:
    workspace.limit("api")
    key = workspace.server.key(workspace.id, ["ratelimit.*.reset"])
    assert workspace.server.call("reset", COUNTER | {"identifier": "user\n1"}, key.secret).status == 200
    wanted = f"key {key.row.id} of workspace {workspace.id} has reset 'user\\n1' in namespace 'api'"
    eventually(lambda: any(wanted in line for line in messages(workspace)), "the reset is in the log")
    assert key.secret not in workspace.server.log


def messages(workspace: Workspace) -> list[str]:
    """The log, without the escapes of its JSON."""
    return [line.replace("\\\\", "\\") for line in workspace.server.log.splitlines()]


async def test_a_tenant_that_resets_all_it_can_gets_an_error_and_others_still_reset(hosted: Hosted) -> None:
    headers = {"Authorization": f"Bearer {hosted.key}"}
    transport = httpx.ASGITransport(hosted.app)
    async with hosted.app, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v2/ratelimit.limit", json=COUNTER, headers=headers)
        service = hosted.app._service
        assert service is not None
        resets = service._limiter._parts.engine.resets
        now_ms = int(time.time() * 1000)
        # By HTTP alone the attack takes some thousand calls.
        for number in itertools.count():
            reset = Reset("w", "n", f"{number:0512}", 86_400_000, now_ms)
            if not resets.has_room(reset):
                break
            resets.apply(reset, now_ms)
        refused = await client.post(
            "/v2/ratelimit.reset", json=COUNTER | {"identifier": "y" * 512}, headers=headers
        )
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert refused.json()["error"]["type"].endswith("user/too_many_requests/resets")
        other = Limit(9, duration_ms=60_000, namespace="x", workspace="other")
        assert await service._limiter.reset(other, "ann")
