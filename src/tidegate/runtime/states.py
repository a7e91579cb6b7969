"""Life cycles as tables: an Enum of states, and for each the states that may follow.

A change that the table does not allow is a fault of ours and is raised at once, before anything acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["StateMachine"]

S = TypeVar("S", bound=Enum)


class StateMachine(Generic[S]):
    """One object's state."""

    def __init__(self, initial: S, transitions: Mapping[S, AbstractSet[S]]) -> None:
        self.state: S = initial
        self._transitions = transitions

    def move(self, state: S) -> None:
        """Change to `state`, which must be allowed to follow the present one."""
        if state not in self._transitions[self.state]:
            raise RuntimeError(f"{type(state).__name__} cannot change from {self.state.name} to {state.name}")
        self.state = state
