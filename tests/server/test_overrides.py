from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.server.catalog.overrides import Override, OverrideMatcher, matches, specificity

# Few letters, so that patterns and identifiers meet; every character that a regular expression treats specially.
ALPHABET = "ab*\n.^$+?{}[]()|\\"
texts = st.text(ALPHABET, max_size=8)
patterns = st.text(ALPHABET + "****", min_size=1, max_size=8)


def oracle(pattern: str, identifier: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), identifier) is not None


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
        ("a*", "a\nb", False),
    ],
)
def test_only_the_asterisk_is_special_and_the_whole_identifier_must_match(
    pattern: str, identifier: str, expected: bool
) -> None:
    assert matches(pattern, identifier) is expected


def test_a_pattern_that_makes_regular_expressions_explode_is_matched_in_few_steps() -> None:
    # 250 parts against 512 characters: backtracking would not end in this universe's lifetime.
    pattern = "*a" * 250 + "*b"
    assert not matches(pattern, "a" * 512)
    assert matches(pattern, "a" * 511 + "b")


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
