"""Which override applies to an identifier: the literal one, else the most specific pattern that matches, else none.

Most specific means most literal characters; among equals the pattern that sorts first. Only `*` is special: it
matches any characters, also none, but never a line break; the whole identifier must match.

Matching takes time linear in the identifier for each pattern, whatever the pattern. Patterns are indexed by their
literal beginning, so that thousands of `tenant_x_*` cost one look-up, not thousands.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

__all__ = ["Override", "OverrideMatcher", "matches", "specificity"]


class Override(NamedTuple):
    """One override that is in force."""

    id: str
    identifier: str
    """As it was set: an identifier, or a pattern."""
    limit: int
    duration_ms: int


def specificity(pattern: str) -> tuple[int, str]:
    """Sorts patterns: the one to prefer first."""
    return pattern.count("*") - len(pattern), pattern


def matches(pattern: str, identifier: str) -> bool:
    """Whether `identifier` as a whole matches `pattern`."""
    return _all_lines_match(_compile(pattern), identifier)


class _Line(NamedTuple):
    """One line of a pattern. `is_literal`: no `*` in it, and `first` is all of it."""

    is_literal: bool
    first: str
    middle: tuple[str, ...]
    last: str

    def matches(self, text: str) -> bool:
        if self.is_literal:
            return text == self.first
        end = len(text) - len(self.last)
        if end < len(self.first) or not text.startswith(self.first) or not text.endswith(self.last):
            return False
        # The leftmost match of each part is enough: anything may come between two parts, so an early match leaves the
        # most text for the next. Hence no backtracking: a regular expression would take polynomial time for `*a*a*a*a`,
        # and a caller who may set an override could stop the server with it.
        position = len(self.first)
        for part in self.middle:
            found = text.find(part, position, end)
            if found < 0:
                return False
            position = found + len(part)
        return True


def _compile(pattern: str) -> tuple[_Line, ...]:
    """Line by line: since `*` matches no line break, each one in the identifier needs one in the pattern."""
    lines = []
    for line in pattern.split("\n"):
        first, *rest = line.split("*")
        middle = tuple(part for part in rest[:-1] if part)
        lines.append(_Line(not rest, first, middle, rest[-1] if rest else ""))
    return tuple(lines)


def _all_lines_match(lines: tuple[_Line, ...], identifier: str) -> bool:
    if len(lines) == 1:
        return lines[0].matches(identifier) and "\n" not in identifier
    texts = identifier.split("\n")
    return len(texts) == len(lines) and all(
        line.matches(text) for line, text in zip(lines, texts, strict=True)
    )


class _Pattern(NamedTuple):
    rank: tuple[int, str]
    lines: tuple[_Line, ...]
    override: Override


class OverrideMatcher:
    """The overrides of one namespace, prepared for look-ups."""

    __slots__ = ("_lengths", "_literals", "_patterns")

    def __init__(self, overrides: Iterable[Override] = ()) -> None:
        self._literals: dict[str, Override] = {}
        # By the text before the first `*`; each list in order of preference.
        self._patterns: dict[str, list[_Pattern]] = {}
        # The lengths of those texts: each length costs one look-up.
        self._lengths: list[int] = []
        for override in overrides:
            self.add(override)

    def add(self, override: Override) -> None:
        """Add it, in place of the one with the same text."""
        text = override.identifier
        self.discard(text)
        # A pattern is also an identifier: one may be called `a*`, and its literal match comes first.
        self._literals[text] = override
        if "*" in text:
            beginning = text.partition("*")[0]
            group = self._patterns.setdefault(beginning, [])
            insort(group, _Pattern(specificity(text), _compile(text), override), key=attrgetter("rank"))
            self._lengths = sorted({len(each) for each in self._patterns})

    def discard(self, text: str) -> None:
        """Remove the override with this text, if there is one."""
        if self._literals.pop(text, None) is not None and "*" in text:
            beginning = text.partition("*")[0]
            group = [pattern for pattern in self._patterns[beginning] if pattern.override.identifier != text]
            if group:
                self._patterns[beginning] = group
            else:
                del self._patterns[beginning]
                self._lengths = sorted({len(each) for each in self._patterns})

    def __len__(self) -> int:
        return len(self._literals)

    def __iter__(self) -> Iterator[Override]:
        return iter(self._literals.values())

    @property
    def has_patterns(self) -> bool:
        return bool(self._patterns)

    def get(self, identifier: str) -> Override | None:
        """The override whose stored text is exactly this."""
        return self._literals.get(identifier)

    def find(self, identifier: str) -> Override | None:
        """The override that applies to this identifier."""
        literal = self._literals.get(identifier)
        if literal is not None or not self._patterns:
            return literal
        best: _Pattern | None = None
        for length in self._lengths:
            if length > len(identifier):
                break
            for pattern in self._patterns.get(identifier[:length], ()):
                if best is not None and pattern.rank >= best.rank:
                    break
                if _all_lines_match(pattern.lines, identifier):
                    best = pattern
                    break
        return None if best is None else best.override
