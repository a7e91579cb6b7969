"""Hints for the compiler, of no effect at run time: the library has no dependencies.

`Text` and `Whole` are a str and an int to the type checker, and any object to the compiled code: it would otherwise
refuse wrong types with errors of its own, and convert True to 1, before our checks could see them.

`@mypyc_attr(acyclic=True)` takes a class out of the cyclic garbage collector: 16 bytes less per object, and a
million subjects cost a full collection nothing. The price is a law: such objects must never form a cycle, so they
name each other by number (a slot, a table) where a reference would close one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

__all__ = ["Text", "Whole", "check_keywords", "mypyc_attr", "set_once"]


class Text(Protocol):
    """A str that is still to be checked."""

    def casefold(self) -> str: ...


class Whole(Protocol):
    """An int that is still to be checked."""

    def bit_length(self) -> int: ...


if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_hints: object) -> object:
        """Interpreted: a decorator that changes nothing."""
        return lambda cls: cls


def set_once(cls: type) -> None:
    """Attributes of `cls` can be set once and never deleted.

    Interpreted, this costs a call for each attribute, so it is for values that are made once and used often. A
    compiled constructor writes its attributes directly and never calls it.
    """

    def set_attribute(self: object, name: str, value: object) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{cls.__name__} is immutable: {name} cannot be set")
        object.__setattr__(self, name, value)

    def delete_attribute(_self: object, name: str) -> None:
        raise AttributeError(f"{cls.__name__} is immutable: {name} cannot be deleted")

    setattr(cls, "__setattr__", set_attribute)  # noqa: B010 - a plain assignment is refused by the type checker
    setattr(cls, "__delattr__", delete_attribute)  # noqa: B010 - the same


def check_keywords(cls: Any, check: Callable[[Mapping[str, object]], None]) -> None:
    """Call `check` with the keyword arguments of every `cls(...)` before its fields are set.

    `__post_init__` would be too late: by then a compiled class has converted the values, or refused them.
    """
    original = cls.__init__

    @functools.wraps(original)
    def initialize(self: object, **keywords: object) -> None:
        check(keywords)
        original(self, **keywords)

    cls.__init__ = initialize
