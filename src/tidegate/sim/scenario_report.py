"""How scenarios went, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidegate.sim.scenario_runner import Outcome

__all__ = ["document", "lines"]


def _closing(outcomes: Sequence[Outcome]) -> str:
    passed = sum(outcome.ok for outcome in outcomes)
    return f"{passed} passed, {len(outcomes) - passed} failed"


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for each scenario, one more for each difference, and a closing line."""
    for outcome in outcomes:
        yield f"{'ok    ' if outcome.ok else 'FAILED'}  {outcome.scenario.name}"
        for difference in outcome.differences:
            yield f"          {difference}"
    yield _closing(outcomes)


def document(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The same as data."""
    passed = sum(outcome.ok for outcome in outcomes)
    return {
        "passed": passed,
        "failed": len(outcomes) - passed,
        "scenarios": [
            {
                "file": outcome.scenario.file,
                "name": outcome.scenario.name,
                "ok": outcome.ok,
                "differences": [
                    {"path": one.path, "wanted": one.wanted, "got": one.got} for one in outcome.differences
                ],
            }
            for outcome in outcomes
        ],
    }
