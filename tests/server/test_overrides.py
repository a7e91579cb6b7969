from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.server.catalog.overrides import (
    Override,
    OverrideMatcher,
    _Index,
    _Pattern,
    is_indexed,
    matches,
    specificity,
)

# Few letters, so that patterns often match; and every character that a regular expression treats specially.
ALPHABET = "ab*\n.^$+?{}[]()|\\"
texts = st.text(ALPHABET, max_size=8)
patterns = st.text(ALPHABET + "****", min_size=1, max_size=8)


def oracle(pattern: str, identifier: str) -> bool:
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(expression, identifier, re.DOTALL) is not None


def override(pattern: str) -> Override:
    return Override(f"rlor_{pattern}", pattern, 1, 1_000)


@given(patterns, texts)
@example("*a*a", "a")
@example("a*", "a\nb")
@example("a\n*b", "a\nb")
@example("*\n*", "a\nb")
@example("ab*ba", "aba")
def test_a_pattern_matches_what_the_equivalent_regular_expression_matches(
    pattern: str, identifier: str
) -> None:
    assert matches(pattern, identifier) == oracle(pattern, identifier)


@given(st.lists(patterns, max_size=12, unique=True), texts)
def test_the_override_that_applies_is_the_literal_one_or_else_the_most_specific_match(
    stored: list[str], identifier: str
) -> None:
    found = OverrideMatcher([override(pattern) for pattern in stored]).find(identifier)
    if identifier in stored:
        expected = identifier
    else:
        fitting = [pattern for pattern in stored if "*" in pattern and oracle(pattern, identifier)]
        fitting.sort(key=lambda pattern: (-(len(pattern) - pattern.count("*")), pattern))
        expected = fitting[0] if fitting else ""
    assert (found.identifier if found else "") == expected


@given(st.lists(patterns, max_size=12, unique=True), texts, st.randoms())
def test_the_order_in_which_overrides_were_set_does_not_matter(
    stored: list[str], identifier: str, chance: Random
) -> None:
    shuffled = list(stored)
    chance.shuffle(shuffled)
    first = OverrideMatcher([override(pattern) for pattern in stored]).find(identifier)
    second = OverrideMatcher([override(pattern) for pattern in shuffled]).find(identifier)
    assert first == second


@pytest.mark.parametrize(
    ("pattern", "identifier", "expected"),
    [
        ("*", "", True),
        ("*", "anything at all", True),
        ("premium_*", "premium_", True),
        ("premium_*", "Premium_7", False),
        ("*@example.com", "a@example.com", True),
        ("*@example.com", "a@exampleXcom", False),
        ("a*b*c", "a--b--c", True),
        ("a*b*c", "a--c--b", False),
        ("ab", "ab", True),
        ("ab", "abc", False),
        ("a*", "a\nb", True),
        ("*", "\n", True),
    ],
)
def test_only_the_asterisk_is_special_and_the_whole_identifier_must_match(
    pattern: str, identifier: str, expected: bool
) -> None:
    assert matches(pattern, identifier) is expected


def test_a_pattern_that_makes_regular_expressions_explode_is_matched_in_few_steps() -> None:
    # 250 parts against 512 characters: backtracking would practically never end.
    pattern = "*a" * 250 + "*b"
    assert not matches(pattern, "a" * 512)
    assert matches(pattern, "a" * 511 + "b")


def tried(matcher: OverrideMatcher, identifier: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many patterns a look-up tries."""
    count = 0
    real = _Pattern.matches

    def counted(pattern: _Pattern, text: str) -> bool:
        nonlocal count
        count += 1
        return real(pattern, text)

    monkeypatch.setattr(_Pattern, "matches", counted)
    matcher.find(identifier)
    return count


def test_patterns_with_one_asterisk_at_an_end_are_found_without_trying_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = range(10_000)
    matcher = OverrideMatcher(
        [override(f"tenant_{number}_*") for number in numbers]
        + [override(f"*_{number}") for number in numbers]
    )
    assert tried(matcher, "tenant_77_x", monkeypatch) == 0
    assert tried(matcher, "x_77", monkeypatch) == 0
    found = matcher.find("tenant_77_x"), matcher.find("x_77"), matcher.find("x")
    assert found == (override("tenant_77_*"), override("*_77"), None)


@given(st.lists(patterns, max_size=12), st.lists(patterns, max_size=12), texts)
def test_an_override_that_was_discarded_applies_no_more(
    kept: list[str], dropped: list[str], identifier: str
) -> None:
    matcher = OverrideMatcher([override(pattern) for pattern in [*kept, *dropped]])
    for pattern in dropped:
        matcher.discard(pattern)
    left = OverrideMatcher([override(pattern) for pattern in kept if pattern not in dropped])
    assert matcher.find(identifier) == left.find(identifier)
    assert (len(matcher), matcher.has_patterns) == (len(left), left.has_patterns)
    assert matcher.scanned == sum("*" in each and not is_indexed(each) for each in set(kept) - set(dropped))


def test_loading_patterns_sorts_their_lengths_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = 0
    real = _Index._count

    def counted(index: _Index, length: int, change: int) -> None:
        nonlocal sorts
        before = index._sizes
        real(index, length, change)
        sorts += index._sizes is not before

    monkeypatch.setattr(_Index, "_count", counted)
    matcher = OverrideMatcher(override(f"{number:05}*") for number in range(2_000))
    assert sorts == 1
    for number in range(2_000):
        matcher.discard(f"{number:05}*")
    assert sorts == 2
    assert not matcher.has_patterns


def test_among_equally_specific_patterns_the_one_that_sorts_first_applies() -> None:
    matcher = OverrideMatcher([override("*ab"), override("ab*"), override("a*b")])
    found = matcher.find("ab")
    assert found is not None
    assert found.identifier == min(["*ab", "ab*", "a*b"], key=specificity) == "*ab"


def test_get_finds_the_stored_text_only() -> None:
    matcher = OverrideMatcher([override("premium_*")])
    assert matcher.get("premium_7") is None
    assert matcher.get("premium_*") == override("premium_*")
    assert matcher.find("premium_7") == override("premium_*")
