"""Random calls with a time of their own, compared with a direct implementation of the arithmetic on the API page.

Covers combinations of windows, costs, shared counters, batches, patterns and changing overrides. The model has no cells
that age, no caches and no fast paths.
"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import pytest

from tests.server.harness import Workspace

START_MS = 4_102_444_830_000  # in 2100: nothing of it ages while the test runs
IDENTIFIERS = ["u", "ua", "ub", "pre_a", "pre_b", "x"]
PATTERNS = ["u", "ub", "u*", "*", "pre_*", "*_a", "x*", "*a*"]
DURATIONS_MS = [1_000, 7_001, 60_000]
STEPS = 400

Cell = tuple[str, int, int]


class Rule(NamedTuple):
    limit: int
    duration_ms: int
    override_id: str | None


class Model:
    """What has been accepted, and which overrides are set."""

    def __init__(self) -> None:
        self.counts: dict[Cell, int] = {}
        self.overrides: dict[str, Rule] = {}

    def rule(self, call: dict[str, Any]) -> Rule:
        identifier = call["identifier"]
        if identifier in self.overrides:
            return self.overrides[identifier]
        matching = [pattern for pattern in self.overrides if _matches(pattern, identifier)]
        if matching:
            return self.overrides[min(matching, key=lambda text: (text.count("*") - len(text), text))]
        return Rule(call["limit"], call["duration"], None)

    def used(self, identifier: str, duration_ms: int, now_ms: int, pending: dict[Cell, int]) -> int:
        sequence = now_ms // duration_ms
        current, previous = (
            self.counts.get(cell, 0) + pending.get(cell, 0)
            for cell in ((identifier, duration_ms, sequence), (identifier, duration_ms, sequence - 1))
        )
        elapsed_ms = now_ms - sequence * duration_ms
        return current + previous * (duration_ms - elapsed_ms) // duration_ms

    def batch(self, calls: list[dict[str, Any]], now_ms: int) -> dict[str, Any]:
        """The `data` of a multiLimit."""
        rules = [self.rule(call) for call in calls]
        pending: dict[Cell, int] = {}
        fits, left = [], []
        for call, rule in zip(calls, rules, strict=True):
            cost = call.get("cost", 1)
            used = self.used(call["identifier"], rule.duration_ms, now_ms, pending) + cost
            fits.append(used <= rule.limit)
            left.append(rule.limit - used)
            if fits[-1]:
                cell = (call["identifier"], rule.duration_ms, now_ms // rule.duration_ms)
                pending[cell] = pending.get(cell, 0) + cost
        if all(fits):  # and once more on the final state, so that the order of items does not matter
            fits = [
                self.used(call["identifier"], rule.duration_ms, now_ms, pending) <= rule.limit
                for call, rule in zip(calls, rules, strict=True)
            ]
        if passed := all(fits):
            for cell, cost in pending.items():
                self.counts[cell] = self.counts.get(cell, 0) + cost
        else:
            left = [
                rule.limit - self.used(call["identifier"], rule.duration_ms, now_ms, {}) if fit else 0
                for call, rule, fit in zip(calls, rules, fits, strict=True)
            ]
        limits = [
            {
                "namespace": call["namespace"],
                "identifier": call["identifier"],
                "limit": rule.limit,
                "remaining": remaining,
                "reset": (now_ms // rule.duration_ms + 1) * rule.duration_ms,
                "passed": fit,
            }
            | ({} if rule.override_id is None else {"overrideId": rule.override_id})
            for call, rule, fit, remaining in zip(calls, rules, fits, left, strict=True)
        ]
        return {"passed": passed, "limits": limits}

    def limit(self, call: dict[str, Any], now_ms: int) -> dict[str, Any]:
        (item,) = self.batch([call], now_ms)["limits"]
        del item["namespace"], item["identifier"]
        return {"success": item.pop("passed"), **item}


def _matches(pattern: str, identifier: str) -> bool:
    literals = map(re.escape, pattern.split("*"))
    return "*" in pattern and re.fullmatch(".*".join(literals), identifier) is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_calls_answer_what_the_page_computes(workspace: Workspace, seed: int) -> None:
    draw = random.Random(seed)
    model = Model()
    now_ms = START_MS

    def call() -> dict[str, Any]:
        body = {
            "namespace": draw.choice(names),
            "identifier": draw.choice(IDENTIFIERS),
            "limit": draw.choice([1, 3, 7, 10, 100]),
            "duration": draw.choice(DURATIONS_MS),
        }
        return body if draw.random() < 0.3 else body | {"cost": draw.choice([0, 1, 1, 2, 3, 5, 11, 50])}

    workspace.limit("api", "first")
    names = ["api", workspace.namespace_id("api")]
    for step in range(STEPS):
        now_ms += draw.choice([0, 0, 1, 13, 250, 999, 1_000, 3_000, 30_000])
        said = f"seed {seed}, step {step}, {now_ms}"
        match draw.choices(["limit", "multiLimit", "set", "delete"], [55, 30, 10, 5])[0]:
            case "limit":
                body = call()
                got = workspace.call("limit", body, X_Test_Time=str(now_ms)).data
                assert got == model.limit(body, now_ms), (said, body)
            case "multiLimit":
                bodies = [call() for _ in range(draw.choice([1, 2, 2, 3, 5]))]
                got = workspace.call("multiLimit", bodies, X_Test_Time=str(now_ms)).data
                assert got == model.batch(bodies, now_ms), (said, bodies)
            case "set":
                pattern = draw.choice(PATTERNS)
                limit, duration_ms = draw.choice([0, 1, 5, 20, 200]), draw.choice(DURATIONS_MS)
                place = {"namespace": draw.choice(names), "identifier": pattern}
                got = workspace.call("setOverride", place | {"limit": limit, "duration": duration_ms}).data
                model.overrides[pattern] = Rule(limit, duration_ms, got["overrideId"])
            case "delete" if model.overrides:
                pattern = draw.choice(sorted(model.overrides))
                place = {"namespace": draw.choice(names), "identifier": pattern}
                assert workspace.call("deleteOverride", place).data == {}
                del model.overrides[pattern]
