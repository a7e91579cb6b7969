"""Who may use the console, from which sites, and what a browser can learn from it."""

from __future__ import annotations

import json
import re

import pytest

from tests.console.visitor import MARKER, Events, Visitor, sign_in
from tests.server.harness import TidegateServer, Workspace, eventually
from tidegate.server.console.assets import load_assets

READS = (
    "session",
    "snapshot",
    "identifier",
    "search",
    "preview",
    "namespaces",
    "overrides",
    "keys",
    "events",
)
CHANGES = (
    "namespaces.create",
    "namespaces.delete",
    "namespaces.restore",
    "keys.create",
    "keys.expire",
    "keys.revoke",
    "ratelimit.setOverride",
    "ratelimit.getOverride",
    "ratelimit.deleteOverride",
)


def test_the_page_and_its_files_need_no_key_and_hold_no_data(
    server: TidegateServer, workspace: Workspace
) -> None:
    workspace.limit(namespace="private", identifier="somebody")
    for name in load_assets():
        path = "/console" if name == "index.html" else f"/console/static/{name}"
        reply = server.get(path)
        assert reply.status == 200, path
        assert b"somebody" not in reply.body
        assert workspace.id.encode() not in reply.body


def test_every_file_that_the_page_names_is_served_and_none_comes_from_elsewhere(
    server: TidegateServer,
) -> None:
    page = server.get("/console").body.decode()
    for link in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert server.get(f"/{link}").status == 200, link
    for name, asset in load_assets().items():
        text = asset.body.decode()
        for found in re.findall(r"\bhttps?://[^\s\"')]+", text):
            assert found == "http://www.w3.org/2000/svg", f"{name}: {found}"
        for module in re.findall(r'from "(?:\./)?([^"]+)"', text):
            assert module in load_assets(), f"{name} imports {module}"


def test_no_file_of_the_page_can_turn_a_value_into_markup() -> None:
    for name, asset in load_assets().items():
        if name.endswith(".js"):
            found = re.search(
                r"\.(?:innerHTML|outerHTML)\b|insertAdjacentHTML|document\.write|\beval\(|new Function",
                asset.body.decode(),
            )
            assert found is None, f"{name}: {found}"
        if name.endswith(".html"):
            assert not re.search(rb"<script(?! type=\"module\" src=)|<style|\son[a-z]+=|style=", asset.body)


@pytest.mark.parametrize(
    "path", ["/console", "/console/static/app.js", "/console/session", "/console/events"]
)
def test_the_content_security_policy_allows_our_own_files_only(
    server: TidegateServer, visitor: Visitor, path: str
) -> None:
    if path == "/console/events":
        with visitor.events() as events:
            fields = {name.lower(): value for name, value in events.response.getheaders()}
    else:
        fields = dict(server.request("GET", path, headers={"Cookie": visitor.cookie}).headers)
    policy = dict(
        part.strip().partition(" ")[::2] for part in fields["content-security-policy"].split(";") if part
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in fields["content-security-policy"]
    assert fields["x-content-type-options"] == "nosniff"
    assert fields["referrer-policy"] == "no-referrer"
    assert fields["cache-control"] == "no-store"


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(visitor: Visitor) -> None:
    name, *attributes = visitor.set_cookie.split("; ")
    assert name.startswith(f"tidegate_console_{visitor.server.port}=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert visitor.get("session").json["workspace"] == visitor.session["workspace"]


@pytest.mark.parametrize("path", READS)
def test_nothing_can_be_read_without_a_session(server: TidegateServer, path: str) -> None:
    for headers in ({}, {"Cookie": f"tidegate_console_{server.port}=key_1.99999999999.{'0' * 64}"}):
        assert server.request("GET", f"/console/{path}", headers=headers).status == 401


@pytest.mark.parametrize("path", CHANGES)
def test_nothing_can_be_changed_without_a_session(server: TidegateServer, path: str) -> None:
    assert server.request("POST", f"/console/{path}", b"{}", MARKER).status == 401


@pytest.mark.parametrize("key", ["tg_unknown", "", "tg_ü", "x" * 10_000])
def test_a_wrong_key_starts_no_session(server: TidegateServer, key: str) -> None:
    reply = sign_in(server, key)
    assert reply.status in (400, 401)
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("body", [b"", b"[]", b'{"key": 1}', b'{"key": "a", "more": 1}', b"\xff"])
def test_a_sign_in_that_cannot_be_read_is_refused(server: TidegateServer, body: bytes) -> None:
    assert server.request("POST", "/console/session", body, MARKER).status == 400


def test_a_key_without_the_permission_may_not_sign_in(server: TidegateServer, workspace: Workspace) -> None:
    key = server.key(workspace.id, ["ratelimit.*.limit", "ratelimit.*.create_namespace"])
    reply = sign_in(server, key.secret)
    assert (reply.status, reply.problem) == (403, "unkey/authorization/insufficient_permissions")
    assert "console.read" in reply.error["detail"]


# Requests of other sites.

ELSEWHERE = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
)


@pytest.mark.parametrize("headers", ELSEWHERE)
@pytest.mark.parametrize("path", CHANGES)
def test_another_site_can_change_nothing_with_the_cookie(
    visitor: Visitor, path: str, headers: dict[str, str]
) -> None:
    assert visitor.ask("POST", path, {}, {**MARKER, **headers}).status == 403


@pytest.mark.parametrize("path", CHANGES)
def test_a_form_cannot_change_anything_with_the_cookie(visitor: Visitor, path: str) -> None:
    """A form cannot send the header, and for a script that sends it the browser asks the server first (preflight)."""
    form = {"Content-Type": "text/plain"}
    assert visitor.ask("POST", path, {}, form).status == 403
    asked = visitor.ask("OPTIONS", path, None, {"Access-Control-Request-Method": "POST"})
    assert asked.status == 405
    assert not any(name.startswith("access-control") for name in asked.headers)


@pytest.mark.parametrize("headers", [*ELSEWHERE, {}])
def test_another_site_can_neither_sign_in_nor_out(
    server: TidegateServer, visitor: Visitor, workspace: Workspace, headers: dict[str, str]
) -> None:
    marked = {**MARKER, **headers} if headers else {}
    assert sign_in(server, workspace.key.secret, marked).status == 403
    assert visitor.ask("DELETE", "session", None, marked).status == 403


@pytest.mark.parametrize("headers", ELSEWHERE)
@pytest.mark.parametrize("path", READS)
def test_another_site_cannot_read_or_open_streams(
    visitor: Visitor, path: str, headers: dict[str, str]
) -> None:
    assert visitor.ask("GET", path, None, headers).status == 403


def test_signing_out_removes_the_cookie(visitor: Visitor) -> None:
    reply = visitor.ask("DELETE", "session")
    assert reply.status == 200
    assert "Max-Age=0" in reply.headers["set-cookie"]


def test_a_key_in_the_header_reads_as_a_session_does(server: TidegateServer, workspace: Workspace) -> None:
    headers = {"Authorization": f"Bearer {workspace.key.secret}"}
    assert server.request("GET", "/console/session", headers=headers).status == 200
    with Events(server, "/console/events", headers) as events:
        assert events.status == 200
    assert server.request("GET", "/console/session", headers={"Authorization": "Bearer x"}).status == 401


def test_a_revoked_key_ends_its_sessions_and_their_streams(
    server: TidegateServer, workspace: Workspace
) -> None:
    key = server.key(workspace.id)
    visitor = Visitor(server, key.secret)
    with visitor.events() as events:
        assert events.next("tick")[0] == "tick"
        server.put_key(key.row._replace(revoked_at_ms=1))
        kind = "tick"
        while kind == "tick":
            kind, _ = events.next("tick", "signed-out")
        assert kind == "signed-out"
        assert events.next() == ("", None)
    assert visitor.get("session").status == 401


# Permissions of what can be changed.


def test_a_read_only_key_reads_everything_and_changes_nothing(
    server: TidegateServer, workspace: Workspace
) -> None:
    workspace.limit()
    reader = Visitor(server, server.key(workspace.id, ["console.read"]).secret)
    assert reader.session["can"] == dict.fromkeys(reader.session["can"], False)
    asked = {
        "identifier": {"identifier": "user_1"},
        "search": {"text": "user"},
        "preview": {"namespace": "api", "pattern": "*"},
        "overrides": {"namespace": "api"},
    }
    for path in READS[:-1]:
        assert reader.get(path, **asked.get(path, {})).status == 200, path
    bodies: dict[str, object] = {
        "namespaces.create": {"namespace": "more"},
        "namespaces.delete": {"namespace": "api"},
        "namespaces.restore": {"namespace": "api"},
        "keys.create": {"permissions": "console.read"},
        "keys.expire": {"id": workspace.key.row.id},
        "keys.revoke": {"id": workspace.key.row.id},
        "ratelimit.setOverride": {"namespace": "api", "identifier": "x", "limit": 1, "duration": 1000},
        "ratelimit.deleteOverride": {"namespace": "api", "identifier": "x"},
    }
    for path, body in bodies.items():
        reply = reader.post(path, body)
        assert (reply.status, reply.problem) == (403, "unkey/authorization/insufficient_permissions"), path


def test_a_key_can_give_no_more_than_it_has(server: TidegateServer, workspace: Workspace) -> None:
    grants = ["console.read", "console.manage", "ratelimit.*.limit", "ratelimit.rlns_1.read_override"]
    manager = Visitor(server, server.key(workspace.id, grants).secret)
    given = (
        "console.read",
        "ratelimit.*.limit",
        "ratelimit.rlns_9.limit",
        "ratelimit.rlns_1.read_override",
        "urn:tidegate:ratelimit:rlns_1:override:rlor_1",
    )
    for permission in given:
        made = manager.post("keys.create", {"permissions": permission})
        assert made.status == 200, (permission, made)
        assert made.json["permissions"] == [permission]
    for permission in (
        "all",
        "ratelimit.*.set_override",
        "ratelimit.*.read_override",
        "ratelimit.rlns_2.read_override",
        "urn:tidegate:ratelimit:rlns_2:override:rlor_1",
        "console.everything",
    ):
        assert manager.post("keys.create", {"permissions": permission}).status == 403, permission


def test_a_session_sees_and_changes_only_its_own_workspace(server: TidegateServer, visitor: Visitor) -> None:
    other = server.workspace()
    for _ in range(3):
        other.limit(namespace="theirs", identifier="their user", limit=1)
    with visitor.events() as events:
        _, tick = events.next("tick")
    shown = json.dumps([tick, visitor.get("namespaces").json, visitor.get("keys").json])
    assert "their" not in shown and other.id not in shown
    found = visitor.get("identifier", identifier="their user").json
    assert found["subjects"] == found["denials"] == []
    assert visitor.get("search", text="their").json == {"found": []}
    theirs = other.namespace_id("theirs")
    for path in ("overrides", "preview", "identifier"):
        reply = visitor.get(path, namespace=theirs, pattern="*", identifier="their user")
        assert reply.status == 404, path
    assert visitor.post("namespaces.delete", {"namespace": theirs}).status == 404
    assert visitor.post("keys.revoke", {"id": other.key.row.id}).status == 400
    assert other.limit(namespace="theirs", identifier="another").status == 200


def test_the_console_can_be_turned_off(workspace: Workspace) -> None:
    with TidegateServer("--console-enabled", "off") as server:
        assert server.get("/console").status == 404
        assert "console" not in server.get("/").json["links"]
        assert not (server.data_dir / "console.secret").exists()


def test_a_session_outlives_a_restart() -> None:
    with TidegateServer() as server:
        workspace = server.workspace()
        visitor = Visitor(server, workspace.key.secret)
        assert server.stop() == 0
        server.start()
        eventually(lambda: visitor.get("session").status == 200, "the session is still valid")
