from __future__ import annotations

import itertools
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.harness import MONTH_MS, Hosted, Reply, TidegateServer, Workspace
from tidegate import Limit
from tidegate.server.api.reservations import _decoded

NOT_FOUND = "unkey/data/ratelimit_reservation_not_found"


def item(identifier: str = "ann", cost: int = 60, **changes: Any) -> dict[str, Any]:
    return {
        "namespace": "llm",
        "identifier": identifier,
        "limit": 100,
        "duration": MONTH_MS,
        "cost": cost,
    } | changes


def reserve(workspace: Workspace, *items: dict[str, Any], **options: Any) -> Any:
    return workspace.call("reserve", {"limits": list(items), **options}).data


def settle(workspace: Workspace, reservation_id: str, *costs: int) -> Reply:
    return workspace.call("settle", {"reservationId": reservation_id, "costs": list(costs)})


def remaining(workspace: Workspace, identifier: str = "ann", **changes: Any) -> int:
    return int(workspace.call("limit", item(identifier, 0, **changes)).data["remaining"])


def test_a_reservation_counts_until_it_is_settled_and_then_what_was_used(workspace: Workspace) -> None:
    data = reserve(workspace, item())
    assert data["passed"] is True and data["limits"][0]["remaining"] == 40
    assert workspace.call("limit", item(cost=41)).data["success"] is False
    assert settle(workspace, data["reservationId"], 25).data == {"repeated": False}
    assert remaining(workspace) == 75


def test_a_repeated_settle_counts_nothing(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item())["reservationId"]
    assert [settle(workspace, reservation_id, 25).data["repeated"] for _ in range(3)] == [False, True, True]
    assert workspace.call("release", {"reservationId": reservation_id}).data == {"repeated": True}
    assert remaining(workspace) == 75


def test_what_is_released_counts_nothing(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item())["reservationId"]
    assert workspace.call("release", {"reservationId": reservation_id}).data == {"repeated": False}
    assert remaining(workspace) == 100


def test_usage_says_what_is_reserved(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item(cost=30))["reservationId"]
    counter = {key: value for key, value in item().items() if key != "cost"}
    shown = workspace.call("usage", counter).data
    assert (shown["reserved"], shown["regional"], shown["used"], shown["remaining"]) == (30, 0, 30, 70)
    settle(workspace, reservation_id, 10)
    shown = workspace.call("usage", counter).data
    assert (shown["reserved"], shown["regional"], shown["used"], shown["remaining"]) == (0, 10, 10, 90)


def test_settling_higher_counts_beyond_the_limit(workspace: Workspace) -> None:
    settle(workspace, reserve(workspace, item(cost=10))["reservationId"], 130)
    usage = workspace.call("usage", {key: value for key, value in item().items() if key != "cost"}).data
    assert (usage["used"], usage["remaining"]) == (130, 0)


def test_several_limits_are_all_or_nothing_and_settled_separately(workspace: Workspace) -> None:
    day = item(namespace="llm.day", limit=50, cost=40)
    data = reserve(workspace, item(cost=40), day)
    assert settle(workspace, data["reservationId"], 30, 20).data == {"repeated": False}
    refused = reserve(workspace, item(cost=40), day)
    assert (refused["passed"], [each["passed"] for each in refused["limits"]]) == (False, [True, False])
    assert "reservationId" not in refused
    assert remaining(workspace) == 70
    data = reserve(workspace, item(cost=10), day | {"cost": 10})
    settle(workspace, data["reservationId"], 5)
    assert (remaining(workspace), remaining(workspace, namespace="llm.day", limit=50)) == (65, 25)


def test_a_reservation_survives_a_restart_and_is_settled_once(tmp_path: Path) -> None:
    with TidegateServer("--test-mode", data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        reservation_id = reserve(workspace, item())["reservationId"]
        server.start()
        assert settle(workspace, reservation_id, 25).data == {"repeated": False}
        server.start()
        assert settle(workspace, reservation_id, 25).data == {"repeated": True}
        assert remaining(workspace) == 75


def test_a_reservation_lasts_for_its_shortest_window_unless_it_says_otherwise(workspace: Workspace) -> None:
    before_ms = time.time_ns() // 1_000_000
    default = reserve(workspace, item(cost=1), item(namespace="hour", duration=3_600_000, cost=1))
    longer = reserve(workspace, item(cost=1), life=7_200_000)
    after_ms = time.time_ns() // 1_000_000 + 1
    assert before_ms + 3_600_000 <= default["expires"] <= after_ms + 3_600_000
    assert before_ms + 7_200_000 <= longer["expires"] <= after_ms + 7_200_000


def test_a_reservation_of_another_workspace_is_not_found(
    server: TidegateServer, workspace: Workspace
) -> None:
    reservation_id = reserve(workspace, item())["reservationId"]
    assert settle(server.workspace(), reservation_id, 5).status == 404
    assert remaining(workspace) == 40


def test_a_key_without_the_permission_settles_nothing(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item())["reservationId"]
    key = workspace.server.key(workspace.id, ["ratelimit.*.read_override"])
    body = {"reservationId": reservation_id, "costs": [5]}
    assert workspace.server.call("settle", body, key.secret).status == 403
    assert workspace.server.call("reserve", {"limits": [item()]}, key.secret).status == 403
    assert remaining(workspace) == 40


def forged(name: str, *counters: list[Any]) -> str:
    return "rlrs_" + urlsafe_b64encode(msgspec.msgpack.encode([name, list(counters)])).decode().rstrip("=")


def test_an_id_that_was_made_up_ends_nothing(workspace: Workspace) -> None:
    reserve(workspace, item())
    counter = [workspace.namespace_id("llm"), "ann", MONTH_MS, 100, False]
    assert settle(workspace, forged("node+99", counter), 5).problem == NOT_FOUND
    for name in ("node", "", "+1", "node+x", "a+1+2"):
        assert settle(workspace, forged(name, counter), 5).problem == NOT_FOUND
    for wrong in ([counter[0], "", MONTH_MS, 100, False], [counter[0], "ann", 1, 100, False]):
        assert settle(workspace, forged("node+1", wrong), 5).problem == NOT_FOUND
    assert settle(workspace, forged("node+1"), 5).problem == NOT_FOUND
    assert settle(workspace, forged("node+1", *[counter] * 21), 5).problem == NOT_FOUND
    assert settle(workspace, "rlrs_a", 1, 2, 3).problem == NOT_FOUND
    for text in ("", "rlrs_", "something", "rlrs_a b", "x rlrs_ab"):
        refused = settle(workspace, text, 5)
        assert refused.status == 400
        assert [one["location"] for one in refused.json["error"]["errors"]] == [
            "/properties/reservationId/pattern"
        ]
    unknown = {"reservationId": "rlrs_a", "costs": [1]}
    assert workspace.server.call("settle", unknown, "tg_unknown_key").status == 401
    assert remaining(workspace) == 40


def name_of(reservation_id: str) -> str:
    packed = reservation_id.removeprefix("rlrs_").encode()
    return str(msgspec.msgpack.decode(urlsafe_b64decode(packed + b"=" * (-len(packed) % 4)))[0])


def test_an_id_with_the_name_of_a_reservation_of_another_workspace_ends_nothing(
    server: TidegateServer, workspace: Workspace
) -> None:
    """The names of a node are consecutive numbers: a tenant that has one can guess those of others."""
    hostile = server.workspace()
    reserve(hostile, item("eve", 1))
    counter = [hostile.namespace_id("llm"), "eve", MONTH_MS, 100, False]
    reservation_id = reserve(workspace, item())["reservationId"]
    assert settle(hostile, forged(name_of(reservation_id), counter), 5).problem == NOT_FOUND
    assert remaining(workspace) == 40
    assert remaining(hostile, "eve") == 99
    assert settle(workspace, reservation_id, 25).data == {"repeated": False}


def test_an_id_with_the_name_of_a_reservation_for_other_counters_ends_nothing(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item(), item("bob"))["reservationId"]
    counter = [workspace.namespace_id("llm"), "carl", MONTH_MS, 100, False]
    assert settle(workspace, forged(name_of(reservation_id), counter), 5).problem == NOT_FOUND
    assert [remaining(workspace, who) for who in ("ann", "bob", "carl")] == [40, 40, 100]


async def test_a_tenant_that_reserves_all_it_can_gets_an_error_and_others_still_reserve(
    hosted: Hosted,
) -> None:
    headers = {"Authorization": f"Bearer {hosted.key}"}
    transport = httpx.ASGITransport(hosted.app)
    async with hosted.app, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"limits": [item()]}
        kept = (await client.post("/v2/ratelimit.reserve", json=body, headers=headers)).json()
        service = hosted.app._service
        assert service is not None
        held = service._limiter._parts.engine.reservations
        items = [(Limit(9, duration_ms=60_000, namespace="x", workspace="w"), "x" * 512, 1)] * 20
        until_ms = kept["data"]["expires"]
        for number in itertools.count():
            if not held.has_room(items):
                break
            held.add(f"node+{number}", items, until_ms)
        # Room for less than a large batch is left. The attack by HTTP alone takes a thousand calls like this one.
        while held.has_room(items[:1]):
            held.add(f"small+{len(held._live)}", items[:1], until_ms)
        refused = await client.post("/v2/ratelimit.reserve", json=body, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"].endswith("user/too_many_requests/reservations")
        assert "settle or release" in refused.json()["error"]["detail"]
        allowed = await client.post("/v2/ratelimit.limit", json=item(cost=1), headers=headers)
        assert allowed.json()["data"]["success"] is True
        assert held.has_room([(Limit(9, duration_ms=60_000, namespace="x", workspace="other"), "bob", 1)])
        done = {"reservationId": kept["data"]["reservationId"], "costs": [5]}
        settled = await client.post("/v2/ratelimit.settle", json=done, headers=headers)
        assert settled.json()["data"] == {"repeated": False}


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_other_text_is_never_a_valid_id(text: str) -> None:
    for candidate in (text, "rlrs_" + text):
        assert _decoded(candidate) is None


@pytest.mark.parametrize(
    "body",
    [
        {"limits": []},
        {"limits": [item()] * 21},
        {"limits": [item()], "life": 999},
        {"limits": [item()], "life": 86_400_001},
        {"limits": [item() | {"cost": -1}]},
        {"limits": [item()], "more": 1},
        [item()],
    ],
)
def test_a_wrong_reserve_is_a_400(workspace: Workspace, body: Any) -> None:
    assert workspace.call("reserve", body).problem == "unkey/application/invalid_input"


def test_the_number_of_costs_must_fit(workspace: Workspace) -> None:
    reservation_id = reserve(workspace, item(), item("bob"))["reservationId"]
    assert settle(workspace, reservation_id, 1, 2, 3).status == 400
    assert settle(workspace, reservation_id, 1, 2).status == 200
