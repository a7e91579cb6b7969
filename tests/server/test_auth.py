from __future__ import annotations

import re

import pytest

from tidegate.ports import KeyRow, WorkspaceRow
from tidegate.server.api.problems import KEY_NOT_FOUND, Refusal
from tidegate.server.catalog import keys as auth
from tidegate.server.catalog.keys import Authenticator, digest_of, hint_of, new_key
from tidegate.server.catalog.view import CatalogView
from tidegate.server.messages import Head, Operation


def head(authorization: bytes) -> Head:
    made = Head(Operation("test", lambda _head, _body: (200, b"", b"")))
    made.authorization = authorization
    return made


def add_key(view: CatalogView, key: str, version: int, **changes: object) -> None:
    row = KeyRow("key_" + key, "w", digest_of(key), "", "", (), 1, None, True, None, version)
    view.put_key(row._replace(**changes))  # type: ignore[arg-type] # fields by name


@pytest.fixture
def view() -> CatalogView:
    view = CatalogView()
    view.put_workspace(WorkspaceRow("w", "w", True, None, None, 1))
    return view


def test_keys_are_long_random_and_of_one_alphabet() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"tg_[0-9A-Za-z]{32}", key) for key in keys)
    letters = "".join(key[3:] for key in keys)
    assert len(set(letters)) == 62


def test_a_digest_tells_nothing_of_its_key_and_a_hint_little() -> None:
    key = new_key()
    assert len(digest_of(key)) == 32
    assert digest_of(key) != digest_of(key[:-1] + ("a" if key[-1] != "a" else "b"))
    assert key.startswith(hint_of(key))
    assert len(hint_of(key)) == 7


def test_a_caller_is_remembered_with_the_head_until_something_changes(view: CatalogView) -> None:
    add_key(view, "tg_k", 2)
    authenticator = Authenticator(view)
    request = head(b"Bearer tg_k")
    caller = authenticator.caller(request, 0)
    assert caller is not None
    request.authorization = None  # not even looked at
    assert authenticator.caller(request, 0) is caller
    add_key(view, "tg_k", 3, enabled=False)
    request.authorization = b"Bearer tg_k"
    with pytest.raises(Refusal) as refused:
        authenticator.caller(request, 0)
    assert refused.value.problem.title == "Key is disabled"


def test_an_unknown_key_is_worth_one_question_until_any_key_changes(view: CatalogView) -> None:
    authenticator = Authenticator(view)
    request = head(b"Bearer tg_new")
    assert authenticator.caller(request, 0) is None, "ask the database"
    authenticator.remember_unknown(request)
    with pytest.raises(Refusal) as refused:
        authenticator.caller(request, 0)
    assert refused.value.problem is KEY_NOT_FOUND
    add_key(view, "tg_other", 5)
    assert authenticator.caller(request, 0) is None, "something has changed: ask again"
    add_key(view, "tg_new", 6)
    assert authenticator.caller(request, 0) is not None


def test_sprayed_keys_do_not_fill_the_memory(view: CatalogView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "UNKNOWN_MAX", 100)
    authenticator = Authenticator(view)
    for number in range(1_000):
        authenticator.remember_unknown(head(b"Bearer tg_%d" % number))
    known = [number for number in range(1_000) if authenticator.is_known_unknown(digest_of(f"tg_{number}"))]
    assert 100 <= len(known) <= 200
    assert known[-1] == 999, "the latest are known"


def test_how_much_of_a_wrong_key_is_right_makes_no_difference(view: CatalogView) -> None:
    # No clock is needed to see it: what is looked up is the digest, and digests of near keys have nothing in common.
    key = new_key()
    near = key[:-1] + ("a" if key[-1] != "a" else "b")
    common = sum(a == b for a, b in zip(digest_of(key), digest_of(near), strict=True))
    assert common <= 4
    assert digest_of(key)[:3] != digest_of(near)[:3]
