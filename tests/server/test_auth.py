from __future__ import annotations

import re

import pytest

from tidegate.ports import KeyRow, WorkspaceRow
from tidegate.server.catalog.keys import digest_of, hint_of, new_key
from tidegate.server.catalog.view import Callers, CatalogView


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


def test_a_digest_shows_nothing_of_its_key_and_a_hint_little() -> None:
    key = new_key()
    assert len(digest_of(key)) == 32
    assert digest_of(key) != digest_of(key[:-1] + ("a" if key[-1] != "a" else "b"))
    assert key.startswith(hint_of(key))
    assert len(hint_of(key)) == 7


def test_a_caller_is_remembered_by_its_credentials_until_something_changes(view: CatalogView) -> None:
    add_key(view, "tg_k", 2)
    callers = Callers(view)
    assert callers.recall(b"Bearer tg_k") is None
    caller = callers.find(b"Bearer tg_k", b"tg_k")
    assert caller is not None
    assert callers.recall(b"Bearer tg_k") is caller
    assert callers.recall(b"Bearer  tg_k") is None
    assert callers.recall(None) is None
    view.put_workspace(WorkspaceRow("w", "w", True, 5, 1_000, 3))
    assert callers.recall(b"Bearer tg_k") is None
    again = callers.find(b"Bearer tg_k", b"tg_k")
    assert again is not None
    assert (caller.is_metered, again.is_metered) == (False, True)


@pytest.mark.parametrize("what", ["key", "workspace"])
def test_a_disabled_caller_is_found_and_not_remembered(view: CatalogView, what: str) -> None:
    add_key(view, "tg_k", 2, enabled=what != "key")
    view.put_workspace(WorkspaceRow("w", "w", what != "workspace", None, None, 3))
    callers = Callers(view)
    caller = callers.find(b"Bearer tg_k", b"tg_k")
    assert caller is not None
    assert (caller.is_enabled, caller.workspace.is_enabled) == (what != "key", what != "workspace")
    assert callers.recall(b"Bearer tg_k") is None


def test_variants_of_one_header_do_not_fill_the_memory(view: CatalogView) -> None:
    add_key(view, "tg_k", 2)
    callers = Callers(view, found_max=10)
    for spaces in range(100):
        assert callers.find(b"Bearer" + b" " * spaces + b"tg_k", b"tg_k") is not None
        assert len(callers._found) <= 10


def test_an_unknown_key_is_looked_up_once_until_any_key_changes(view: CatalogView) -> None:
    callers = Callers(view)
    assert callers.find(b"Bearer tg_new", b"tg_new") is None
    assert not callers.is_negative_cached(b"tg_new"), "ask the database"
    callers.remember_missing(b"tg_new")
    assert callers.is_negative_cached(b"tg_new")
    add_key(view, "tg_other", 5)
    assert not callers.is_negative_cached(b"tg_new"), "something has changed: ask again"
    add_key(view, "tg_new", 6)
    assert callers.find(b"Bearer tg_new", b"tg_new") is not None


def test_random_keys_do_not_fill_the_memory(view: CatalogView) -> None:
    callers = Callers(view, missing_max=100)
    for number in range(1_000):
        callers.remember_missing(b"tg_%d" % number)
    known = [number for number in range(1_000) if callers.is_negative_cached(b"tg_%d" % number)]
    assert 100 <= len(known) <= 200
    assert known[-1] == 999, "the latest are known"


def test_how_much_of_a_wrong_key_is_right_makes_no_difference(view: CatalogView) -> None:
    # No timing is needed to show it: the digest is looked up, and digests of similar keys have nothing in common.
    key = new_key()
    near = key[:-1] + ("a" if key[-1] != "a" else "b")
    common = sum(a == b for a, b in zip(digest_of(key), digest_of(near), strict=True))
    assert common <= 4
    assert digest_of(key)[:3] != digest_of(near)[:3]
