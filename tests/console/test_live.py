"""What the live view shows, and the bounds on what it costs."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from tests.console.visitor import Events, Visitor
from tests.server.harness import MONTH_MS, TidegateServer, Workspace, eventually
from tidegate.server.console.hub import STREAMS_MAX, STREAMS_PER_KEY_MAX

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202eright to left\u2066",
    "\U0001f600" * 512,
    "line\nbreak\r\ndata: forged\n\nevent: forged",
    "nul\u0000and bell\u0007",
    "مستخدم",
    "' OR 1=1 --",
)


def tick_where(events: Events, condition: Any) -> dict[str, Any]:
    """The first tick that fulfils a condition."""
    while True:
        kind, tick = events.next("tick")
        assert kind == "tick"
        if condition(tick):
            return dict(tick)


def test_a_viewer_sees_decisions_namespaces_identifiers_and_denials(
    visitor: Visitor, workspace: Workspace
) -> None:
    with visitor.events() as events:
        assert events.next()[0] == "history"
        tick_where(events, lambda _: True)
        for _ in range(8):
            workspace.limit(namespace="email.send", identifier="user_123", limit=5)
        tick = tick_where(events, lambda tick: tick["denials"])
    (denial,) = tick["denials"]
    assert (denial["identifier"], denial["count"], denial["rule"]) == ("user_123", 3, "5 per 30 days")
    (namespace,) = tick["namespaces"]
    assert (namespace["name"], namespace["total_allowed"], namespace["total_denied"]) == ("email.send", 5, 3)
    assert [row["identifier"] for row in tick["hot"]] == ["user_123"]
    assert [row["identifier"] for row in tick["denied_most"]] == ["user_123"]
    assert tick["rates"]["allowed"] + tick["rates"]["denied"] > 0
    assert tick["latency_s"]["p99"] > 0
    assert tick["memory"]["subjects"] >= 1
    assert {each["name"] for each in tick["dependencies"]} >= {"catalog", "origin"}
    (node,) = tick["nodes"]
    assert node["pid"] == visitor.server.pid or node["pid"] > 0
    assert node["clock_offset_ms"] is not None


def test_a_followed_identifier_shows_its_cells_and_why_it_was_denied(
    visitor: Visitor, workspace: Workspace
) -> None:
    for _ in range(6):
        workspace.limit(identifier="user_123", limit=4)
    with visitor.events(identifier="user_123", namespace="api") as events:
        _, found = events.next("identifier")
    (subject,) = found["subjects"]
    assert subject["current"]["own"] == subject["effective"] == 4
    assert (subject["quota"], subject["duration_ms"]) == (4, MONTH_MS)
    (denial,) = found["denials"]
    assert denial["why"][0].startswith("user_123 in api was denied at ")
    assert visitor.get("identifier", identifier="user_123").json["subjects"][0]["quota"] == 4


def test_a_followed_identifier_shows_what_is_reserved(visitor: Visitor, workspace: Workspace) -> None:
    counter = {"namespace": "api", "identifier": "user_7", "limit": 100, "duration": MONTH_MS}
    assert workspace.call("reserve", {"limits": [counter | {"cost": 30}]}).data["passed"]
    (subject,) = visitor.get("identifier", identifier="user_7").json["subjects"]
    assert (subject["reserved"], subject["current"]["own"], subject["effective"]) == (30, 0, 30)


def test_what_a_shadow_override_would_have_denied_is_shown_as_such(
    visitor: Visitor, workspace: Workspace
) -> None:
    workspace.limit(identifier="trial_1", limit=9)
    change = {"namespace": "api", "identifier": "trial_*", "limit": 2, "duration": MONTH_MS, "shadow": True}
    assert visitor.post("ratelimit.setOverride", change).status == 200
    answers = [workspace.limit(identifier="trial_1", limit=9).data for _ in range(3)]
    assert [each["success"] for each in answers] == [True, True, True]
    assert [each.get("exceeded", False) for each in answers] == [False, True, True]
    (denial,) = visitor.get("identifier", identifier="trial_1").json["denials"]
    assert denial["count"] == 2
    assert denial["why"][0].startswith(
        "trial_1 in api was over its limit (in shadow mode, so it was allowed) at "
    )


def test_an_override_that_applies_is_shown(visitor: Visitor, workspace: Workspace) -> None:
    workspace.limit(identifier="vip_1", limit=1)
    change = {"namespace": "api", "identifier": "vip_*", "limit": 2, "duration": MONTH_MS}
    assert visitor.post("ratelimit.setOverride", change).status == 200
    assert workspace.limit(identifier="vip_1", limit=1).data["limit"] == 2
    (subject,) = visitor.get("identifier", identifier="vip_1").json["subjects"]
    assert (subject["quota"], subject["quota_from"]) == (2, "override")
    assert subject["override"]["identifier"] == "vip_*"


def test_a_preview_shows_whom_a_pattern_matches_and_what_applies_to_them_already(
    visitor: Visitor, workspace: Workspace
) -> None:
    for identifier in ("vip_1", "vip_2", "other"):
        workspace.limit(identifier=identifier)
    change = {"namespace": "api", "identifier": "vip_2", "limit": 2, "duration": MONTH_MS}
    assert visitor.post("ratelimit.setOverride", change).status == 200
    found = visitor.get("preview", namespace="api", pattern="vip_*").json
    assert (found["matched"], found["looked"], found["is_complete"]) == (2, 3, True)
    assert found["identifiers"] == [
        {"identifier": "vip_1", "applies": None},
        {"identifier": "vip_2", "applies": "vip_2"},
    ]


def test_a_what_if_replays_the_last_minutes_with_another_limit(
    visitor: Visitor, workspace: Workspace
) -> None:
    for _ in range(8):
        workspace.limit(namespace="login", identifier="user_123", limit=5)
    workspace.limit(namespace="login", identifier="quiet", limit=5)
    workspace.limit(namespace="login", identifier="quiet", limit=5, cost=0)
    workspace.limit(namespace="other", identifier="user_123", limit=5)
    found = visitor.get("what-if", namespace="login", limit="2/30d").json
    assert (found["requests"], found["allowed"], found["would_be_allowed"]) == (9, 6, 3)
    assert (found["newly_denied"], found["newly_allowed"], found["agreed"]) == (3, 0, 9)
    assert (found["new_limit"], found["limits"]) == ("2 per 30 days", {"5 per 30 days": 9})
    assert found["callers"][0]["identifier"] == "user_123" and found["callers"][0]["newly_denied"] == 3
    assert found["is_complete"] and found["namespace"] == "login"
    raised = visitor.get("what-if", namespace="login", limit="7 per 30 days").json
    assert (raised["newly_denied"], raised["newly_allowed"]) == (0, 2)


def test_a_what_if_of_a_batch_counts_what_its_own_limit_did(visitor: Visitor, workspace: Workspace) -> None:
    items = [
        {"namespace": "wide", "identifier": "u", "limit": 9, "duration": MONTH_MS},
        {"namespace": "narrow", "identifier": "u", "limit": 1, "duration": MONTH_MS},
    ]
    for _ in range(3):
        assert visitor.server.call("multiLimit", items, workspace.key.secret).status == 200
    narrow = visitor.get("what-if", namespace="narrow", limit="2/30d").json
    assert (narrow["requests"], narrow["allowed"], narrow["would_be_allowed"]) == (3, 1, 2)
    wide = visitor.get("what-if", namespace="wide", limit="9/30d").json
    assert (wide["requests"], wide["agreed"], wide["newly_denied"]) == (1, 1, 0)


def test_a_what_if_without_requests_is_empty_and_a_bad_limit_is_named(
    visitor: Visitor, workspace: Workspace
) -> None:
    workspace.limit(namespace="looked", cost=0)
    empty = visitor.get("what-if", namespace="looked", limit="5/minute").json
    assert (empty["requests"], empty["callers"], empty["moments"]) == (0, [], [])
    for limit in ("", "many", "0/minute", "5/ms"):
        refused = visitor.get("what-if", namespace="looked", limit=limit)
        assert (refused.status, refused.json["error"]["errors"][0]["location"]) == (400, "/properties/limit")
    assert visitor.get("what-if", namespace="unknown", limit="5/minute").status == 404


def test_a_what_if_shows_nothing_of_another_workspace(
    server: TidegateServer, visitor: Visitor, workspace: Workspace
) -> None:
    for each in (server.workspace(), workspace):
        each.limit(namespace="same name", identifier="same identifier")
    assert visitor.get("what-if", namespace="same name", limit="5/minute").json["requests"] == 1


def test_identifiers_are_found_by_a_part_of_them_and_exactly(visitor: Visitor, workspace: Workspace) -> None:
    workspace.limit(identifier="user_123")
    workspace.limit(identifier="USER_9")
    found = visitor.get("search", text="user_").json["found"]
    assert sorted(row["identifier"] for row in found) == ["USER_9", "user_123"]
    assert visitor.get("search", text="user_123").json["found"][0]["identifier"] == "user_123"
    assert visitor.get("search", text="nobody").json == {"found": []}


def test_a_hostile_name_arrives_as_it_is_and_forges_no_event(visitor: Visitor, workspace: Workspace) -> None:
    for identifier in HOSTILE:
        for _ in range(2):
            assert workspace.limit(identifier=identifier, namespace=identifier, limit=1).status == 200
    with visitor.events() as events:
        tick = tick_where(events, lambda tick: len(tick["denials"]) == len(HOSTILE))
        raw = events.response.readline()
    assert {row["identifier"] for row in tick["denials"]} == set(HOSTILE)
    assert raw in (b"\n", b"") or raw.startswith(b"event: ")
    for identifier in HOSTILE:
        found = visitor.get("identifier", identifier=identifier).json
        assert found["subjects"][0]["identifier"] == found["identifier"] == identifier


# Bounds.


def test_streams_are_bounded_for_each_key_and_in_all(server: TidegateServer) -> None:
    open_streams: list[Events] = []
    try:
        statuses = []
        while len(open_streams) <= STREAMS_MAX:
            visitor = Visitor(server, server.workspace().key.secret)
            for _ in range(STREAMS_PER_KEY_MAX + 1):
                open_streams.append(visitor.events())
                statuses.append(open_streams[-1].status)
                if len(open_streams) > STREAMS_MAX:
                    break
        refused = [index for index, status in enumerate(statuses) if status == 503]
        assert STREAMS_PER_KEY_MAX in refused, "the first key has as many as it may"
        assert statuses.count(200) <= STREAMS_MAX
    finally:
        for stream in open_streams:
            stream.close()
    last = Visitor(server, server.workspace().key.secret)

    def is_free() -> bool:
        with last.events() as events:
            return events.status == 200

    eventually(is_free, "streams that were closed make room")


def test_a_viewer_that_does_not_read_costs_a_bounded_number_of_bytes(
    server: TidegateServer, workspace: Workspace
) -> None:
    """The longest names, and a client that never reads: others are served, and the server's memory does not grow."""
    visitor = Visitor(server, workspace.key.secret)
    for number in range(25):
        for _ in range(2):
            workspace.limit(identifier="\U0001f600" * 500 + str(number), limit=1)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    silent.connect((server.host, server.port))
    request = f"GET /console/events HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nCookie: {visitor.cookie}\r\n\r\n"
    with silent:
        silent.sendall(request.encode())
        with visitor.events() as events:
            sizes = [len(json.dumps(events.next("tick")[1])) for _ in range(4)]
            assert max(sizes) < 500_000
            before = tick_where(events, lambda _: True)["memory"]["rss_bytes"]
            for _ in range(3):
                tick_where(events, lambda _: True)
            after = tick_where(events, lambda _: True)["memory"]["rss_bytes"]
    assert after - before < 5_000_000


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("identifier", {}),
        ("identifier", {"identifier": "x" * 513}),
        ("search", {"text": ""}),
        ("preview", {"namespace": "api"}),
        ("overrides", {}),
        ("identifier", {str(number): "x" for number in range(20)}),
    ],
)
def test_an_invalid_query_is_refused_with_the_reason(
    visitor: Visitor, workspace: Workspace, path: str, parameters: dict[str, str]
) -> None:
    workspace.limit()
    reply = visitor.get(path, **parameters)
    assert reply.status == 400
    assert reply.error["errors"][0]["message"]


def test_streams_end_when_the_server_stops() -> None:
    with TidegateServer() as server:
        visitor = Visitor(server, server.workspace().key.secret)
        with visitor.events() as events:
            events.next("tick")
            assert server.stop() == 0
            while (kind := events.next()[0]) != "":
                assert kind in {"tick", "history"}
        assert "Traceback" not in server.log


def test_the_index_is_a_page_for_browsers_and_json_for_other_clients(server: TidegateServer) -> None:
    page = server.request("GET", "/", headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert b'href="console"' in page.body and b'href="docs"' in page.body
    for accept in ({}, {"Accept": "application/json"}, {"Accept": "*/*"}):
        document = server.request("GET", "/", headers=accept).json
        assert document["name"] == "tidegate"
        for link in document["links"].values():
            assert server.get(f"/{link}").status == 200, link


# Several workers.


def test_a_viewer_sees_all_workers_whichever_it_is_connected_to() -> None:
    with TidegateServer("--workers", "2") as server:
        workspace = server.workspace()
        visitor = Visitor(server, workspace.key.secret)
        for number in range(60):  # a connection each: the kernel spreads them
            workspace.limit(identifier=f"user_{number % 3}", limit=10_000)
        pids: set[str] = set()
        for _ in range(6):
            with visitor.events(identifier="user_1") as events:
                _, tick = events.next("tick")
                _, found = events.next("identifier")
            pids = {str(node["pid"]) for node in tick["nodes"]}
            assert tick["workers"] == len(tick["nodes"]) == 2
            assert tick["totals"]["allowed"] == 60
            assert tick["namespaces"][0]["total_allowed"] == 60
            (subject,) = found["subjects"]
            assert len(subject["views"]) == 2
            assert sum(view["own"] for view in subject["views"]) == 20
        assert visitor.get("preview", namespace="api", pattern="user_*").json["matched"] == 3
        replayed = visitor.get("what-if", namespace="api", limit="15/30d").json
        assert (replayed["requests"], replayed["newly_denied"], replayed["identifiers"]) == (60, 15, 3)
        logged = set(re.findall(r"listening on .* pid=(\d+)$", server.log, re.MULTILINE))
        assert logged == pids, "each line says which worker wrote it"
        assert server.stop() == 0
        assert "Traceback" not in server.log
