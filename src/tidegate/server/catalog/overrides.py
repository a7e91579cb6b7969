"""Which override applies to an identifier: the literal one, else the most specific pattern that matches, else none.

Most specific means most literal characters; among equals the pattern that sorts first. Only `*` is special: it
matches any characters, also none, line breaks included; the whole identifier must match.

What a look-up costs is bounded by the number of lengths of indexed texts (512) and by the number of patterns that
cannot be indexed (`SCANNED_MAX`), whatever the identifier: patterns with one `*`, at their beginning or at their end,
are found by their text in a dictionary. All others are tried one by one, in time linear in the identifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final, NamedTuple

# Patterns of one namespace that cannot be indexed. A look-up among so many takes half a millisecond if their texts are
# short, and 5 ms if a client chooses the longest texts that almost match: see `OverrideMatcher.cost`.
SCANNED_MAX: Final = 500
# Texts between two `*` of one pattern.
PARTS_MAX: Final = 4
# The cost of a look-up, in units of about 80 ns: each character of a pattern that is tried (a search in an identifier
# that almost matches takes time in proportion to both lengths), the rest of a try, and each length in an index.
PATTERN_COST: Final = 16
LENGTH_COST: Final = 4


class Override(NamedTuple):
    """One override that is in force."""

    id: str
    identifier: str
    """As it was set: an identifier, or a pattern."""
    limit: int
    duration_ms: int
    shadow: bool = False
    """Counted and reported; denies nothing."""


def specificity(pattern: str) -> tuple[int, str]:
    """Sorts patterns: the one to prefer first."""
    return pattern.count("*") - len(pattern), pattern


def parts_of(pattern: str) -> int:
    """The number of texts between two `*`."""
    return len(_split(pattern)[1]) if "*" in pattern else 0


def is_indexed(pattern: str) -> bool:
    """Whether a look-up finds this pattern without trying it."""
    first, middle, last = _split(pattern)
    return not middle and not (first and last)


def matches(pattern: str, identifier: str) -> bool:
    """Whether `identifier` as a whole matches `pattern`."""
    if "*" not in pattern:
        return pattern == identifier
    return _Pattern(specificity(pattern), *_split(pattern), Override("", pattern, 0, 0)).matches(identifier)


def _split(pattern: str) -> tuple[str, tuple[str, ...], str]:
    """The text before the first `*`, the texts between two, and the text after the last."""
    first, *rest = pattern.split("*")
    return first, tuple(part for part in rest[:-1] if part), rest[-1]


class _Pattern(NamedTuple):
    rank: tuple[int, str]
    first: str
    middle: tuple[str, ...]
    last: str
    override: Override

    def matches(self, text: str) -> bool:
        end = len(text) - len(self.last)
        position = len(self.first)
        if end < position or not text.startswith(self.first) or not text.endswith(self.last):
            return False
        # The leftmost match of each part is enough: anything may come between two parts, so an early match leaves the
        # most text for the next. Hence no backtracking: a regular expression would take polynomial time for `*a*a*a*a`,
        # and a caller who may set an override could stop the server with it.
        for part in self.middle:
            found = text.find(part, position, end)
            if found < 0:
                return False
            position = found + len(part)
        return True


class _Index:
    """Patterns by the text at their beginning, or at their end. Each length of a text costs one look-up."""

    __slots__ = ("_by_text", "_lengths", "_sizes")

    def __init__(self) -> None:
        # Patterns with the same text differ in their number of `*` only: the first in order of preference stays first.
        self._by_text: dict[str, list[_Pattern]] = {}
        self._lengths: dict[int, int] = {}
        self._sizes: tuple[int, ...] = ()

    def add(self, text: str, pattern: _Pattern) -> None:
        held = self._by_text.setdefault(text, [])
        if not held:
            self._count(len(text), 1)
        held.append(pattern)
        held.sort(key=attrgetter("rank"))

    def discard(self, text: str, identifier: str) -> None:
        held = [each for each in self._by_text[text] if each.override.identifier != identifier]
        if held:
            self._by_text[text] = held
        else:
            del self._by_text[text]
            self._count(len(text), -1)

    def _count(self, length: int, change: int) -> None:
        count = self._lengths.get(length, 0) + change
        if count:
            self._lengths[length] = count
        else:
            del self._lengths[length]
        if len(self._lengths) != len(self._sizes):
            # The longest first: it has the most literal characters, so that the first match is the best one.
            self._sizes = tuple(sorted(self._lengths, reverse=True))

    def find(self, identifier: str, *, at_end: bool) -> _Pattern | None:
        by_text, length = self._by_text, len(identifier)
        for size in self._sizes:
            if size <= length:
                found = by_text.get(identifier[length - size :] if at_end else identifier[:size])
                if found is not None:
                    return found[0]
        return None

    @property
    def lengths(self) -> int:
        """How many look-ups one `find` takes."""
        return len(self._sizes)

    def __len__(self) -> int:
        return len(self._by_text)


class OverrideMatcher:
    """The overrides of one namespace, prepared for look-ups."""

    __slots__ = ("_beginnings", "_endings", "_literals", "_scanned", "_scanned_cost", "_sorted")

    def __init__(self, overrides: Iterable[Override] = ()) -> None:
        self._literals: dict[str, Override] = {}
        # `text*`, and `*` alone; `*text`; and all others, by their text.
        self._beginnings = _Index()
        self._endings = _Index()
        self._scanned: dict[str, _Pattern] = {}
        self._scanned_cost = 0
        # The same in order of preference; None after a change.
        self._sorted: list[_Pattern] | None = None
        for override in overrides:
            self.add(override)

    def add(self, override: Override) -> None:
        """Add it, in place of the one with the same text."""
        text = override.identifier
        self.discard(text)
        # A pattern is also an identifier: one may be called `a*`, and its literal match comes first.
        self._literals[text] = override
        if "*" not in text:
            return
        first, middle, last = _split(text)
        pattern = _Pattern(specificity(text), first, middle, last, override)
        if middle or (first and last):
            self._scanned[text] = pattern
            self._scanned_cost += PATTERN_COST + len(text)
            self._sorted = None
        elif last:
            self._endings.add(last, pattern)
        else:
            self._beginnings.add(first, pattern)

    def discard(self, text: str) -> None:
        """Remove the override with this text, if there is one."""
        if self._literals.pop(text, None) is None or "*" not in text:
            return
        first, middle, last = _split(text)
        if middle or (first and last):
            del self._scanned[text]
            self._scanned_cost -= PATTERN_COST + len(text)
            self._sorted = None
        elif last:
            self._endings.discard(last, text)
        else:
            self._beginnings.discard(first, text)

    def __len__(self) -> int:
        return len(self._literals)

    def __iter__(self) -> Iterator[Override]:
        return iter(self._literals.values())

    @property
    def has_patterns(self) -> bool:
        return bool(self._beginnings) or bool(self._endings) or bool(self._scanned)

    @property
    def scanned(self) -> int:
        """Patterns that are not indexed."""
        return len(self._scanned)

    @property
    def cost(self) -> int:
        """What a look-up takes at most, in units of about 80 ns."""
        return self._scanned_cost + LENGTH_COST * (self._beginnings.lengths + self._endings.lengths)

    def get(self, identifier: str) -> Override | None:
        """The override whose stored text is exactly this."""
        return self._literals.get(identifier)

    def find(self, identifier: str) -> Override | None:
        """The override that applies to this identifier."""
        literal = self._literals.get(identifier)
        if literal is not None:
            return literal
        best = self._beginnings.find(identifier, at_end=False)
        ending = self._endings.find(identifier, at_end=True)
        if best is None or (ending is not None and ending.rank < best.rank):
            best = ending
        if self._scanned:
            if self._sorted is None:
                self._sorted = sorted(self._scanned.values(), key=attrgetter("rank"))
            for pattern in self._sorted:
                if best is not None and pattern.rank >= best.rank:
                    break
                if pattern.matches(identifier):
                    best = pattern
                    break
        return None if best is None else best.override
