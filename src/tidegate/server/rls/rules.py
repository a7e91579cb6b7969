"""Which limit applies to which descriptor.

A rule set has domains; a domain is a tree. Each entry of a descriptor leads one level down: to the branch with its key
and exactly its value, else to the wildcard with the longest matching beginning, else to the branch with its key alone.
The rule applies that the last entry leads to; if an entry matches nothing, there is no rule. One step per
entry, never a step back, so the time is linear in the descriptor, whatever the rules are.

A rule set does not change; only the counts of its rules do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final, NamedTuple

from tidegate.core.header_fields import policy_name, policy_value
from tidegate.core.model import NAME_LENGTH_MAX, Limit, make_limit
from tidegate.server.rls.messages import UINT32_MAX, current_limit, header_to_add

# Counters of the rate limit service: no workspace of the HTTP API has this id.
WORKSPACE: Final = "rls"

_DAY_MS: Final = 86_400_000
# Number in the protocol and duration. Months and years have fixed lengths, as in envoyproxy/ratelimit.
UNITS: Final[dict[str, tuple[int, int]]] = {
    "second": (1, 1_000),
    "minute": (2, 60_000),
    "hour": (3, 3_600_000),
    "day": (4, _DAY_MS),
    "week": (7, 7 * _DAY_MS),
    "month": (5, 30 * _DAY_MS),
    "year": (6, 365 * _DAY_MS),
}
UNIT_NAMES: Final = {number: name for name, (number, _) in UNITS.items()}

# Values with their own counts in the metrics, for rules with detailed_metric. What comes later is counted as "other".
DETAILS_MAX: Final = 1_000
OTHER: Final = "other"

# Escaped in identifiers, so that no two descriptors share a counter by accident; `*` stands for a shared wildcard.
_SPECIAL: Final = re.compile(r"[%&=*]")


def _escape(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


class Detail(Enum):
    """Which values of a descriptor are counted apart."""

    NONE = 0
    MARKED = 1  # those of steps with value_to_metric
    ALL = 2  # detailed_metric


class Rule:
    """One `rate_limit` of a rules file, or the limit that a request brings itself."""

    __slots__ = (
        "allowed", "current_limit", "denied", "detail", "details", "is_shadow", "limit", "name", "path", "policy",
        "policy_bytes", "policy_field", "policy_value", "replaces", "requests_per_unit", "unit",
    )  # fmt: skip

    def __init__(
        self,
        domain: str,
        path: str,
        requests_per_unit: int,
        unit: str,
        *,
        name: str = "",
        is_unlimited: bool = False,
        is_shadow: bool = False,
        detail: Detail = Detail.NONE,
        replaces: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self.name = name
        self.unit = unit
        self.requests_per_unit = requests_per_unit
        self.is_shadow = is_shadow
        self.detail = detail
        self.replaces = replaces
        # None: unlimited.
        self.limit: Limit | None = None
        # As they stand in every answer: the limit itself, and the RateLimit-Policy field.
        self.current_limit = b""
        self.policy = policy_name(name or path)
        self.policy_bytes = self.policy.encode("ascii")
        self.policy_value = ""
        self.policy_field = b""
        if not is_unlimited:
            number, duration_ms = UNITS[unit]
            self.limit = make_limit(requests_per_unit, duration_ms, domain, WORKSPACE)
            self.current_limit = current_limit(requests_per_unit, number, name)
            self.policy_value = policy_value(self.policy, requests_per_unit, duration_ms)
            self.policy_field = header_to_add("ratelimit-policy", self.policy_value)
        # Decisions so far; of a shadow rule, what it would have decided. Written by the service.
        self.allowed = 0
        self.denied = 0
        self.details: dict[str, list[int]] = {}

    def count(self, allowed: bool, values: str) -> None:
        """One decision. `values` are those of the descriptor, for rules that count them apart."""
        if allowed:
            self.allowed += 1
        else:
            self.denied += 1
        if self.detail is not Detail.NONE:
            if values not in self.details and len(self.details) >= DETAILS_MAX:
                values = OTHER
            counts = self.details.setdefault(values, [0, 0])
            counts[0 if allowed else 1] += 1

    def describe(self) -> str:
        """`50 per hour`, `unlimited`, `50 per hour, shadow`."""
        text = "unlimited" if self.limit is None else f"{self.requests_per_unit} per {self.unit}"
        return f"{text}, shadow" if self.is_shadow else text


@dataclass
class Level:
    """One level of the tree: branches by key."""

    keys: dict[str, Branch] = field(default_factory=dict)


@dataclass
class Branch:
    """What follows a key: nodes by exact value, by the beginning of a value, and for any other value."""

    values: dict[str, Step] = field(default_factory=dict)
    # By length, longest first; then by the beginning itself.
    prefixes: dict[int, dict[str, Step]] = field(default_factory=dict)
    default: Step | None = None

    def find(self, value: str) -> Step | None:
        step = self.values.get(value)
        if step is None:
            for length, steps in self.prefixes.items():
                step = steps.get(value[:length])
                if step is not None:
                    return step
            return self.default
        return step

    def steps(self) -> Iterator[Step]:
        """All of them, most specific first."""
        yield from self.values.values()
        for steps in self.prefixes.values():
            yield from steps.values()
        if self.default is not None:
            yield self.default


@dataclass
class Step:
    """Where an entry leads: a rule that applies if it is the last one, and the next level."""

    rule: Rule | None
    level: Level
    text: str
    """As the rules file has it: `key`, `key=value` or `key=value*`."""
    shared: str | None = None
    """The pattern whose values share one counter (share_threshold), or None."""
    shows_value: bool = False
    """value_to_metric: the value is part of the metric."""


class Applied(NamedTuple):
    """The outcome of a match: a rule, and whose counter it judges."""

    rule: Rule | None
    identifier: str
    steps: list[Step]
    """One per entry that led somewhere."""
    values: str
    """How the metrics call it, for rules with detailed_metric or value_to_metric."""


class RuleSet:
    """All domains."""

    __slots__ = ("domains",)

    def __init__(self, domains: dict[str, Level]) -> None:
        self.domains = domains

    def match(self, domain: str, entries: list[tuple[str, str]]) -> Applied:
        """The rule for a descriptor, if there is one."""
        level = self.domains.get(domain)
        steps: list[Step] = []
        if level is None:
            return Applied(None, "", steps, "")
        for key, value in entries:
            branch = level.keys.get(key)
            step = branch.find(value) if branch is not None else None
            if step is None:
                return Applied(None, "", steps, "")
            steps.append(step)
            level = step.level
        rule = steps[-1].rule if steps else None
        if rule is None:
            return Applied(None, "", steps, "")
        values = "" if rule.detail is Detail.NONE else _metric(entries, steps, rule.detail)
        return Applied(rule, identifier_of(entries, steps), steps, values)

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """(domain, rule), in the order of the files."""
        for domain, level in self.domains.items():
            for rule in _rules_of(level):
                yield domain, rule

    def outline(self) -> list[object]:
        """What makes two rule sets the same."""
        return [(domain, _outline(level)) for domain, level in self.domains.items()]

    def take_counts(self, before: RuleSet) -> None:
        """Continue the counts of rules with the same domain and path."""
        counted = {(domain, rule.path): rule for domain, rule in before.rules()}
        for domain, rule in self.rules():
            old = counted.get((domain, rule.path))
            if old is not None:
                rule.allowed, rule.denied, rule.details = old.allowed, old.denied, old.details


def _rules_of(level: Level) -> Iterator[Rule]:
    for branch in level.keys.values():
        for step in branch.steps():
            if step.rule is not None:
                yield step.rule
            yield from _rules_of(step.level)


def _outline(level: Level) -> list[object]:
    found: list[object] = []
    for key, branch in level.keys.items():
        for step in branch.steps():
            rule = step.rule
            what = rule and (rule.describe(), rule.name, rule.replaces, rule.detail)
            found.append((key, step.text, step.shared, step.shows_value, what, _outline(step.level)))
    return found


def identifier_of(entries: list[tuple[str, str]], steps: list[Step]) -> str:
    """Whose counter: `key=value&key=value`. Values under a shared wildcard are one: `key=beginning*`."""
    if len(entries) == 1 and not (steps and steps[0].shared is not None):
        key, value = entries[0]
        identifier = f"{key}={value}"
        # One `=`, and nothing that would have to be escaped.
        if len(_SPECIAL.findall(identifier)) == 1 and len(identifier) <= NAME_LENGTH_MAX:
            return identifier
    parts: list[str] = []
    for index, (key, value) in enumerate(entries):
        shared = steps[index].shared if steps else None
        if _SPECIAL.search(key) is not None:
            key = _escape(key)  # noqa: PLW2901 - the same key, in another spelling
        if shared is not None:
            value = _escape(shared) + "*"  # noqa: PLW2901 - all of them are this one
        elif _SPECIAL.search(value) is not None:
            value = _escape(value)  # noqa: PLW2901 - the same value, in another spelling
        parts.append(f"{key}={value}")
    identifier = parts[0] if len(parts) == 1 else "&".join(parts)
    if len(identifier) > NAME_LENGTH_MAX:
        # No identifier that is spelled out lacks a "=".
        return "blake2b:" + blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return identifier


def _metric(entries: list[tuple[str, str]], steps: list[Step], detail: Detail) -> str:
    shown: list[str] = []
    for (key, value), step in zip(entries, steps, strict=True):
        if step.shared is not None:
            shown.append(f"{key}={step.shared}*")
        else:
            shown.append(f"{key}={value}" if detail is Detail.ALL or step.shows_value else step.text)
    return " > ".join(shown)[:NAME_LENGTH_MAX]


def inline_rule(domain: str, requests_per_unit: int, unit: int) -> Rule | None:
    """The rule for a limit that a request brings itself; None if there is no such unit."""
    name = UNIT_NAMES.get(unit)
    if name is None:
        return None
    return Rule(domain, "inline", min(requests_per_unit, UINT32_MAX), name)
