"""Forks: what must act before and after one, on both sides of it, registers here.

A forked child is a node of its own. It must not inherit half a decision, a lock that will never be released, or a
connection that its parent uses. One registry, so that the order is one: in the order of registration.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["FORK_WAIT_S", "INHERITED", "follow_forks"]

T = TypeVar("T")

# Longest wait of a fork for work that is under way. Decisions take microseconds, writes to a file milliseconds; what
# hangs must not hang the fork as well.
FORK_WAIT_S: Final = 1.0

# What a forked child got from its parent and must neither use nor destroy: destructors would write to the parent's
# sockets and files, and take its event loop for abandoned.
INHERITED: Final[list[object]] = []


class Hooks(NamedTuple):
    """Functions that get the object that was registered."""

    before: Callable[[Any], object]
    in_parent: Callable[[Any], object]
    in_child: Callable[[Any], object]


def _nothing(_owner: object) -> None:
    """A hook that is not needed."""


# A dict keeps the order in which the objects were registered; they are not kept alive by it.
_FOLLOWING: Final[weakref.WeakKeyDictionary[Any, Hooks]] = weakref.WeakKeyDictionary()


def follow_forks(
    owner: T,
    *,
    before: Callable[[T], object] = _nothing,
    in_parent: Callable[[T], object] = _nothing,
    in_child: Callable[[T], object] = _nothing,
) -> None:
    """Call these with `owner` at every fork of this process, for as long as it lives."""
    _FOLLOWING[owner] = Hooks(before, in_parent, in_child)


def _before() -> None:
    for owner, hooks in list(_FOLLOWING.items()):
        hooks.before(owner)


def _in_parent() -> None:
    for owner, hooks in list(_FOLLOWING.items()):
        hooks.in_parent(owner)


def _in_child() -> None:
    for owner, hooks in list(_FOLLOWING.items()):
        hooks.in_child(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
