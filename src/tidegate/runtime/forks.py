"""Forks: every limiter of a process is told before one and after one, on both sides of it.

A forked child is a node of its own. It must not inherit half a decision, a lock that nobody will release, or a
connection that somebody else uses.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["FORK_WAIT_S", "INHERITED", "follow_forks"]

# Longest wait of a fork for a decision that another thread is making. Decisions take microseconds.
FORK_WAIT_S: Final = 1.0

# What a forked child got from its parent and must neither use nor end: destructors would speak on the parent's
# sockets and take its event loop for abandoned.
INHERITED: Final[list[object]] = []


class Forking(Protocol):
    """What lives through a fork."""

    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


LIVING: Final[weakref.WeakSet[Forking]] = weakref.WeakSet()


def follow_forks(limiter: Forking) -> None:
    """From now on, tell it."""
    LIVING.add(limiter)


def _before() -> None:
    for limiter in list(LIVING):
        limiter.before_fork()


def _in_parent() -> None:
    for limiter in list(LIVING):
        limiter.after_fork_in_parent()


def _in_child() -> None:
    for limiter in list(LIVING):
        limiter.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
