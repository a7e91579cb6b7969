from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Invoke, InvokeJSON
from tidegate.server.rls.explain import explain
from tidegate.server.rls.rules_file import parse_rules

RULES = """
domain: edge
descriptors:
  - key: tier
    value: gold
    rate_limit: {unit: hour, requests_per_unit: 50, name: golden}
  - key: tier
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: tenant
    descriptors:
      - key: op
        rate_limit: {unit: hour, requests_per_unit: 4}
  - key: path
    value: a/*
    rate_limit: {unit: day, requests_per_unit: 9}
  - key: path
    value: a/b/*
    share_threshold: true
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: free
    rate_limit: {unlimited: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def test_check_says_ok_and_what_there_is(invoke: Invoke, invoke_json: InvokeJSON, file: Path) -> None:
    result = invoke("rules", "check", file)
    assert (result.exit_code, result.stdout) == (0, "edge: 6 rules\nok\n")
    assert invoke_json("rules", "check", file) == {"ok": True, "faults": [], "domains": {"edge": 6}}
    assert invoke("rules", "check", file.parent).exit_code == 0


def test_check_names_every_fault(invoke: Invoke, invoke_json: InvokeJSON, file: Path) -> None:
    file.write_text("domain: edge\ndescriptors:\n- key: a\n  rate_limit: {unit: eon, requests_per_unit: x}\n")
    result = invoke("rules", "check", file)
    assert result.exit_code == 2
    assert "rules.yaml:4: descriptors[0].rate_limit.unit: got 'eon'" in result.stdout
    assert len(result.stdout.splitlines()) == 2
    document = invoke_json("rules", "check", file, exit_code=2)
    assert document["ok"] is False
    assert document["faults"][0]["line"] == 4
    assert invoke("rules", "check", file.parent / "nothing.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            ["tier=gold"],
            "tier=gold: `tier=gold` has exactly this value\nrule: tier=gold: 50 per hour (name: golden)",
        ),
        (
            ["tier=tin"],
            "`tier` is for all values of this key without a descriptor of their own\nrule: tier: 3 per hour",
        ),
        (["tenant=a", "op=w"], "rule: tenant > op: 4 per hour\ncounter: tenant=a&op=w"),
        (
            ["tenant=a"],
            "leads to a descriptor without rate_limit, so the request is allowed; below it are rules for op",
        ),
        (["tenant=a", "x=y"], "no descriptor with key 'x' here; there are: op"),
        (["path=z"], "no descriptor for this value of 'path', and none for all values"),
        (["tier=tin", "x=y"], "nothing is nested here"),
        (["path=a/c"], "`path=a/*` is a wildcard that matches\nrule: path=a/*: 9 per day"),
        (
            ["path=a/b/c"],
            "longest wildcard that matches; all values that match share one counter\nrule: path=a/b/*: 1 per day",
        ),
        (["free=x"], "rule: free: unlimited"),
    ],
)
def test_explain_shows_the_rule_and_why(
    invoke: Invoke, file: Path, entries: list[str], expected: str
) -> None:
    result = invoke("rules", "explain", "--rls-config", file, "--domain", "edge", *entries)
    assert result.exit_code == 0
    assert expected in result.stdout


def test_explain_as_json(invoke_json: InvokeJSON, file: Path) -> None:
    document = invoke_json("rules", "explain", "--rls-config", file, "--domain", "edge", "tier=gold")
    assert document == {
        "domain": "edge",
        "steps": [{"entry": "tier=gold", "matches": "tier=gold", "reason": "has exactly this value"}],
        "rule": {
            "path": "tier=gold",
            "name": "golden",
            "unlimited": False,
            "requests_per_unit": 50,
            "unit": "hour",
            "shadow_mode": False,
            "replaces": [],
        },
        "counter": "tier=gold",
        "reason": "the rule that the last entry leads to",
    }
    assert invoke_json("rules", "explain", "--rls-config", file, "--domain", "x", "tier=gold")["rule"] is None


def test_explain_refuses_what_is_not_an_entry_and_faulty_rules(invoke: Invoke, file: Path) -> None:
    result = invoke("rules", "explain", "--rls-config", file, "--domain", "edge", "tier")
    assert result.exit_code == 2
    assert "write KEY=VALUE" in result.stderr
    file.write_text("domain: [")
    result = invoke("rules", "explain", "--rls-config", file, "--domain", "edge", "tier=gold")
    assert result.exit_code == 2
    assert "not YAML" in result.stderr


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tier", "tenant", "op", "path", "free", "x"]),
            st.sampled_from(["", "gold", "a/b/c", "a/", "z"]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_explained_is_what_applies(entries: list[tuple[str, str]]) -> None:
    rules = parse_rules([("rules.yaml", RULES.encode())])
    found = explain(rules, "edge", entries)
    applied = rules.match("edge", entries)
    assert (found.rule, found.identifier) == (applied.rule, applied.identifier)
    assert found.reason
