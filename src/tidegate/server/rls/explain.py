"""Why a rule applies to a descriptor, or why none does: step by step, in words."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.server.rls.rules import Level, Rule, RuleSet, Step

_KEYS_SHOWN_MAX = 10


@dataclass(frozen=True)
class ExplainedStep:
    """One entry of the descriptor."""

    entry: str
    matches: str | None
    """The descriptor of the rules file that it leads to, or None."""
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The outcome and the way to it."""

    domain: str
    steps: list[ExplainedStep]
    rule: Rule | None
    identifier: str
    """Whose counter the rule judges."""
    reason: str


def explain(rules: RuleSet, domain: str, entries: list[tuple[str, str]]) -> Explanation:
    """The same as `RuleSet.match`, with a reason for every step."""
    level = rules.domains.get(domain)
    if level is None:
        known = ", ".join(sorted(rules.domains)) or "none"
        return Explanation(domain, [], None, "", f"there is no domain {domain!r}; there are: {known}")
    found = rules.match(domain, entries)
    steps: list[ExplainedStep] = []
    for index, (key, value) in enumerate(entries):
        entry = f"{key}={value}"
        if index >= len(found.steps):
            steps.append(ExplainedStep(entry, None, _why_not(level, key)))
            reason = f"{entry} matches no rule, so the request is allowed"
            return Explanation(domain, steps, None, "", reason)
        step = found.steps[index]
        steps.append(ExplainedStep(entry, step.text, _why(level, key, value, step)))
        level = step.level
    if found.rule is not None:
        return Explanation(
            domain, steps, found.rule, found.identifier, "the rule that the last entry leads to"
        )
    deeper = _keys(level)
    reason = "the last entry leads to a descriptor without rate_limit, so the request is allowed"
    if deeper:
        reason += f"; below it are rules for {deeper}"
    return Explanation(domain, steps, None, "", reason)


def _why(level: Level, key: str, value: str, step: Step) -> str:
    branch = level.keys[key]
    if branch.values.get(value) is step:
        return "has exactly this value"
    if step is not branch.default:
        others = sum(value.startswith(prefix) for prefixes in branch.prefixes.values() for prefix in prefixes)
        shared = "; all values that match share one counter" if step.shared is not None else ""
        return (
            "is the longest wildcard that matches" if others > 1 else "is a wildcard that matches"
        ) + shared
    if branch.values or branch.prefixes:
        return "is for all values of this key without a descriptor of their own"
    return "is for all values of this key"


def _why_not(level: Level, key: str) -> str:
    if not level.keys:
        return "nothing is nested here"
    if key in level.keys:
        return f"no descriptor for this value of {key!r}, and none for all values"
    return f"no descriptor with key {key!r} here; there are: {_keys(level)}"


def _keys(level: Level) -> str:
    keys = list(level.keys)
    more = f" and {len(keys) - _KEYS_SHOWN_MAX} more" if len(keys) > _KEYS_SHOWN_MAX else ""
    return ", ".join(keys[:_KEYS_SHOWN_MAX]) + more
