"""A build-time hint for the compiler, absent at run time: the library has no dependencies.

`@mypyc_attr(acyclic=True)` takes a class out of the cyclic garbage collector: 16 bytes less per object, and a
million subjects cost a full collection nothing. The price is a law: such objects must never form a cycle, so they
name each other by number (a slot, a table) where a reference would close one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_hints: object) -> object:
        """Interpreted: a decorator that changes nothing."""
        return lambda cls: cls
