from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.server.rls.gateways import code_block
from tidegate.server.rls.rules import UNITS, Applied, Detail, RuleSet
from tidegate.server.rls.rules_file import FILE_BYTES_MAX, RulesError, load_rules, parse_rules

EDGE = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 5}
  - key: tier
    value: gold
    rate_limit: {unit: hour, requests_per_unit: 50, name: golden}
  - key: tier
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: tenant
    descriptors:
      - key: op
        rate_limit: {unit: week, requests_per_unit: 4}
      - key: op
        value: read
  - key: path
    value: files/*
    share_threshold: true
    rate_limit: {unit: MONTH, requests_per_unit: 7}
  - key: path
    value: files/private/*
    rate_limit: {unit: year, requests_per_unit: 1}
    shadow_mode: true
  - key: port
    value: 8080
    rate_limit: {unlimited: true}
"""


def rules(text: bytes = EDGE) -> RuleSet:
    return parse_rules([("edge.yaml", text)])


def applied(*entries: tuple[str, str], domain: str = "edge", text: bytes = EDGE) -> Applied:
    return rules(text).match(domain, list(entries))


def faults(text: bytes) -> list[str]:
    with pytest.raises(RulesError) as error:
        rules(text)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize(
    ("entries", "description"),
    [
        ([("user", "u1")], "5 per hour"),
        ([("tier", "gold")], "50 per hour"),
        ([("tier", "tin")], "3 per hour"),
        ([("tier", "")], "3 per hour"),
        ([("tenant", "a")], None),
        ([("tenant", "a"), ("op", "write")], "4 per week"),
        ([("tenant", "a"), ("op", "read")], None),
        ([("op", "write")], None),
        ([("user", "u1"), ("op", "write")], None),
        ([("path", "files/a")], "7 per month"),
        ([("path", "files/")], "7 per month"),
        ([("path", "file")], None),
        ([("path", "files/private/a")], "1 per year, shadow"),
        ([("port", "8080")], "unlimited"),
        ([], None),
    ],
)
def test_the_most_specific_rule_applies(entries: list[tuple[str, str]], description: str | None) -> None:
    rule = applied(*entries).rule
    assert (rule and rule.describe()) == description


def test_an_unknown_domain_has_no_rules() -> None:
    assert applied(("user", "u1"), domain="other").rule is None


def test_values_have_their_own_counters_unless_a_wildcard_shares_its_threshold() -> None:
    assert applied(("user", "u1")).identifier == "user=u1"
    assert applied(("tenant", "a"), ("op", "write")).identifier == "tenant=a&op=write"
    assert (
        applied(("path", "files/a")).identifier == applied(("path", "files/b")).identifier == "path=files/*"
    )
    assert applied(("path", "files/private/a")).identifier != applied(("path", "files/private/b")).identifier


names = st.text("ab%&=*", min_size=1, max_size=3)


@given(
    st.lists(st.tuples(names, names), min_size=1, max_size=3),
    st.lists(st.tuples(names, names), min_size=1, max_size=3),
)
def test_two_descriptors_never_share_an_identifier(
    one: list[tuple[str, str]], two: list[tuple[str, str]]
) -> None:
    from tidegate.server.rls.rules import identifier_of

    assert (identifier_of(one, []) == identifier_of(two, [])) == (one == two)


def test_an_identifier_that_is_too_long_is_digested() -> None:
    one, two = applied(("user", "u" * 600)).identifier, applied(("user", "u" * 601)).identifier
    assert one != two
    assert max(len(one), len(two)) <= 512


# Compared with a naive matcher: sort the alternatives of each level, take the first.

values = st.sampled_from(["", "a", "ab", "abc", "b", "a*", "ab*", "*"])
keys = st.sampled_from(["k", "l"])


def levels(depth: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    descriptor = st.fixed_dictionaries(
        {"key": keys, "value": values, "quota": st.none() | st.integers(1, 9)},
        optional={} if depth == 0 else {"descriptors": levels(depth - 1)},
    )
    return st.lists(descriptor, max_size=5, unique_by=lambda one: (one["key"], one["value"]))


def as_yaml(level: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for one in level:
        out: dict[str, Any] = {"key": one["key"], "descriptors": as_yaml(one.get("descriptors", []))}
        if one["value"]:
            out["value"] = one["value"]
        if one["quota"]:
            out["rate_limit"] = {"unit": "hour", "requests_per_unit": one["quota"]}
        found.append(out)
    return found


def naive(level: list[dict[str, Any]], entries: list[tuple[str, str]]) -> int | None:
    (key, value), *rest = entries
    candidates = []
    for one in level:
        pattern = one["value"]
        if one["key"] != key:
            continue
        if pattern == value and not pattern.endswith("*") and pattern:
            candidates.append((1000, one))
        elif pattern.endswith("*") and value.startswith(pattern[:-1]):
            candidates.append((len(pattern), one))
        elif not pattern:
            candidates.append((0, one))
    if not candidates:
        return None
    best = max(candidates, key=lambda one: one[0])[1]
    if not rest:
        quota: int | None = best["quota"]
        return quota
    return naive(best.get("descriptors", []), rest)


@given(
    levels(2),
    st.lists(
        st.tuples(keys, st.sampled_from(["", "a", "ab", "abc", "abcd", "b", "c"])), min_size=1, max_size=3
    ),
)
def test_the_matcher_agrees_with_a_naive_one(
    level: list[dict[str, Any]], entries: list[tuple[str, str]]
) -> None:
    text = yaml.safe_dump({"domain": "d", "descriptors": as_yaml(level)}).encode()
    # safe_dump quotes what needs it and uses aliases only for shared objects, of which there are none.
    rule = parse_rules([("d.yaml", text)]).match("d", entries).rule
    assert (rule and rule.requests_per_unit) == naive(level, entries)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "f.yaml: the file is empty"),
        (b"domain: [", "not YAML"),
        (b"- a", "f.yaml:1: got a list, expected a mapping with domain, descriptors"),
        (b"descriptors: []", "domain: got '', expected a name"),
        (b"domain: d\nrules: []", "f.yaml:2: unknown key 'rules', expected one of domain, descriptors"),
        (b"domain: d\ndomain: e", "f.yaml:2: domain: is defined twice"),
        (b"domain: d\ndescriptors: {key: a}", "descriptors: got a mapping, expected a list"),
        (b"domain: d\ndescriptors: [a]", "descriptors[0]: got 'a', expected a mapping"),
        (b"domain: d\ndescriptors: [{value: a}]", "descriptors[0].key: expected 1 to 512 characters"),
        (
            b"domain: d\ndescriptors: [{key: 'a*'}]",
            "descriptors[0].key: got 'a*': a wildcard is possible in `value` only",
        ),
        (b"domain: d\ndescriptors: [{key: a}, {key: a}]", "descriptors[1]: 'a' is defined twice"),
        (b"domain: d\ndescriptors: [{key: a, quota_mode: true}]", "quota mode is not supported"),
        (
            b"domain: d\ndescriptors: [{key: a, shadow_mode: true}]",
            "shadow_mode: has no effect without rate_limit",
        ),
        (
            b"domain: d\ndescriptors: [{key: a, value: b, share_threshold: true}]",
            "needs a `value` that ends in *, got 'b'",
        ),
        (b"domain: d\ndescriptors: [{key: a, shadow_mode: maybe}]", "got 'maybe', expected true or false"),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: fortnight, requests_per_unit: 1}}]",
            "f.yaml:2: descriptors[0].rate_limit.unit: got 'fortnight', expected one of second, minute",
        ),
        (b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day}}]", "requests_per_unit: is missing"),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: -1}}]",
            "requests_per_unit: got '-1', expected a number from 0 to 4294967295",
        ),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 4294967296}}]",
            "expected a number from 0",
        ),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1, burst: 5}}]",
            "unknown key 'burst', expected one of unit, requests_per_unit, unlimited, name, replaces",
        ),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, unlimited: true}}]",
            "rate_limit.unit: cannot be combined with unlimited",
        ),
        (
            b"domain: d\ndescriptors: [{key: a, rate_limit: {unlimited: true, name: n, replaces: [{name: n}]}}]",
            "replaces[0].name: got the rule itself",
        ),
        (b"domain: d\nx: &a [1]\ndescriptors: *a", "f.yaml:3: the alias *a: aliases are not supported"),
        (b"a: " + b"[" * 500 + b"]" * 500, "nested deeper than"),
        (b"domain: " + b"d" * 600, "expected a name of 1 to 512 characters"),
        (b"#" * (FILE_BYTES_MAX + 1), "larger than"),
        (b"domain: \x00", "not YAML"),
        (b"domain: \xff\xfe\xff", "not YAML"),
    ],
)
def test_a_fault_is_named_with_file_line_path_and_value(text: bytes, expected: str) -> None:
    with pytest.raises(RulesError) as error:
        parse_rules([("f.yaml", text)])
    assert any(expected in str(fault) for fault in error.value.faults), str(error.value)


def test_all_faults_are_named_at_once() -> None:
    text = b"domain: d\ndescriptors:\n- {key: a, rate_limit: {unit: x, requests_per_unit: y}}\n- {value: z}\n"
    assert len(faults(text)) == 3


@given(st.binary(max_size=200) | st.text("[]{}:-&*!|>'\"#%@, \nab", max_size=100).map(str.encode))
def test_any_bytes_are_rules_or_a_clear_error(text: bytes) -> None:
    with contextlib.suppress(RulesError):
        parse_rules([("f.yaml", text)])


def test_a_directory_is_all_its_files_and_no_domain_twice(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_bytes(b"domain: b")
    (tmp_path / "a.yaml").write_bytes(EDGE)
    (tmp_path / ".hidden.yaml").write_bytes(b"nonsense: true")
    (tmp_path / "notes.txt").write_bytes(b"no rules")
    assert list(load_rules(tmp_path).domains) == ["edge", "b"]
    (tmp_path / "c.yaml").write_bytes(EDGE)
    with pytest.raises(RulesError, match=r"c.yaml:2: domain: 'edge' is defined twice"):
        load_rules(tmp_path)


def test_an_empty_directory_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="no files that end in"):
        load_rules(tmp_path)
    with pytest.raises(RulesError, match="cannot be read: No such file"):
        load_rules(tmp_path / "rules.yaml")


def test_the_page_about_moving_shows_a_file_with_all_keys() -> None:
    rules = parse_rules(
        [("all-keys.yaml", code_block("from-envoyproxy-ratelimit.md", "# all-keys.yaml").encode())]
    )
    found = {rule.path: rule for _, rule in rules.rules()}
    assert {path: rule.describe() for path, rule in found.items()} == {
        "message_type=marketing > to_number": "5 per day",
        "to_number": "100 per day",
        "sender=internal": "unlimited",
        "path=/files/*": "1000 per minute",
        "premium": "50 per day",
        "new_rule": "10 per hour, shadow",
    }
    assert (found["to_number"].detail, found["premium"].detail) == (Detail.ALL, Detail.MARKED)
    assert found["premium"].replaces == {found["message_type=marketing > to_number"].name}


def test_units_have_fixed_durations() -> None:
    days = {name: duration_ms // 86_400_000 for name, (_, duration_ms) in UNITS.items()}
    assert (days["day"], days["week"], days["month"], days["year"]) == (1, 7, 30, 365)
