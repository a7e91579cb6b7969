"""Compares what a scenario expects with what happened.

A wanted value is an exact value, `{"min": …, "max": …}` or `{"any": […]}`. For an object, only the named fields are
compared; lists are compared item by item, including their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["ABSENT", "Difference", "differences", "matches"]

ABSENT = "no such field"


class Difference(NamedTuple):
    """A value that is not as wanted."""

    path: str
    wanted: object
    got: object

    def __str__(self) -> str:
        return f"{self.path}: wanted {self.wanted!r}, got {self.got!r}"


def differences(path: str, wanted: object, got: object) -> Iterator[Difference]:
    """All values that differ, with their paths."""
    if isinstance(wanted, Mapping):
        if _is_range(wanted) or _is_choice(wanted):
            if not _fits(wanted, got):
                yield Difference(path, dict(wanted), got)
        elif isinstance(got, Mapping):
            for name, value in wanted.items():
                yield from differences(f"{path}.{name}", value, got.get(name, ABSENT))
        else:
            yield Difference(path, dict(wanted), got)
    elif isinstance(wanted, list):
        if not isinstance(got, Sequence) or isinstance(got, str):
            yield Difference(path, wanted, got)
            return
        if len(wanted) != len(got):
            yield Difference(f"{path}.length", len(wanted), len(got))
        for index, (one, other) in enumerate(zip(wanted, got, strict=False)):
            yield from differences(f"{path}[{index}]", one, other)
    elif not _same(wanted, got):
        yield Difference(path, wanted, got)


def matches(wanted: object, got: object) -> bool:
    """Whether nothing differs."""
    return next(differences("", wanted, got), None) is None


def _same(wanted: object, got: object) -> bool:
    # 1 == True in Python, but not in JSON.
    return wanted == got and isinstance(wanted, bool) == isinstance(got, bool)


def _is_range(wanted: Mapping[str, object]) -> bool:
    return bool(wanted) and wanted.keys() <= {"min", "max"}


def _is_choice(wanted: Mapping[str, object]) -> bool:
    return wanted.keys() == {"any"}


def _fits(wanted: Mapping[str, object], got: object) -> bool:
    if _is_choice(wanted):
        choices = wanted["any"]
        return isinstance(choices, list) and any(matches(choice, got) for choice in choices)
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    low, high = wanted.get("min"), wanted.get("max")
    return (not isinstance(low, int | float) or got >= low) and (
        not isinstance(high, int | float) or got <= high
    )
