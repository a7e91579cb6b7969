from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.ports import CatalogChanges, KeyRow, WorkspaceRow
from tidegate.server.catalog.keys import CONSOLE_READ, digest_of
from tidegate.server.catalog.view import CatalogView
from tidegate.server.console.sessions import SESSION_S, Sessions, is_from_elsewhere, load_secret

KEY = KeyRow("key_1", "w", digest_of("tg_secret"), "", "", (CONSOLE_READ,), 1, None, True, None)
WORKSPACE = WorkspaceRow("w", "w", True, None, None)
HOST = {"host": "127.0.0.1:8080"}
NOW_MS = 1_000_000


def made(*, secret: bytes = b"s" * 32, now_ms: int = NOW_MS, key: KeyRow = KEY) -> Sessions:
    view = CatalogView()
    view.apply(CatalogChanges(1, True, [WORKSPACE], [key], [], []))
    return Sessions(secret, view, lambda: now_ms, is_secure=False)


def cookie() -> dict[str, str]:
    sessions = made()
    caller = sessions.caller("key_1")
    assert caller is not None
    line = sessions.create(caller, HOST).decode("ascii")
    assert line.startswith("set-cookie: tidegate_console_8080=key_1.")
    assert "HttpOnly" in line and "SameSite=Strict" in line and line.endswith("\r\n")
    return {**HOST, "cookie": "other=1; " + line.removeprefix("set-cookie: ").partition(";")[0]}


def test_a_cookie_names_its_key_on_every_worker_that_has_the_secret_and_after_a_restart() -> None:
    assert made().find(cookie()) == "key_1"
    assert made(secret=b"t" * 32).find(cookie()) is None


def test_a_session_ends_by_itself() -> None:
    assert made(now_ms=NOW_MS + SESSION_S * 1000 - 1_000).find(cookie()) == "key_1"
    assert made(now_ms=NOW_MS + SESSION_S * 1000).find(cookie()) is None


def test_a_session_ends_when_its_key_is_revoked_disabled_expired_or_changed() -> None:
    for key in (
        KEY._replace(revoked_at_ms=1),
        KEY._replace(enabled=False),
        KEY._replace(expires_at_ms=NOW_MS),
        KEY._replace(permissions=("ratelimit.*.limit",)),
    ):
        assert made(key=key).caller("key_1") is None
    assert made().caller("key_2") is None
    assert made(key=KEY._replace(digest=digest_of("tg_other"))).find(cookie()) is None


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=120))
def test_no_other_text_is_a_session(text: str) -> None:
    assert made().find({**HOST, "cookie": f"tidegate_console_8080={text}"}) is None


@given(st.data())
def test_a_cookie_that_was_changed_anywhere_is_not_a_session(data: st.DataObject) -> None:
    whole = cookie()["cookie"]
    at = data.draw(st.integers(whole.index("=key") + 1, len(whole) - 1))
    changed = data.draw(st.sampled_from("0123456789abcdefXYZ._")).replace(whole[at], "~")
    found = made().find({**HOST, "cookie": whole[:at] + changed + whole[at + 1 :]})
    assert found is None


def test_servers_on_one_machine_do_not_share_a_cookie() -> None:
    assert made().find({**cookie(), "host": "127.0.0.1:9090"}) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"origin": "http://127.0.0.1:8080"}, False),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "null"}, True),
    ],
)
def test_a_browser_says_where_a_request_comes_from(fields: dict[str, str], expected: bool) -> None:
    assert is_from_elsewhere({**HOST, **fields}) is expected


def test_the_secret_is_made_once_for_this_user_only(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    assert load_secret(tmp_path) == secret and len(secret) == 32
    assert [file.name for file in tmp_path.iterdir()] == ["console.secret"]
    assert (tmp_path / "console.secret").stat().st_mode & 0o077 == 0


def test_without_a_place_for_the_secret_sessions_end_with_the_process(tmp_path: Path) -> None:
    assert load_secret(tmp_path / "none") != load_secret(tmp_path / "none")
