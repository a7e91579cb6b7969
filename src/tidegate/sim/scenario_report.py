"""The results of scenarios as text and as JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidegate.sim.scenario_runner import Outcome

__all__ = ["document", "lines"]


def _totals(outcomes: Sequence[Outcome]) -> str:
    passed = sum(outcome.ok for outcome in outcomes)
    return f"{passed} passed, {len(outcomes) - passed} failed"


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line per scenario, one per difference, and a last line with the totals."""
    for outcome in outcomes:
        name = outcome.scenario.name
        # The name alone does not say which of several files to look into.
        yield f"ok      {name}" if outcome.ok else f"FAILED  {name} ({outcome.scenario.file})"
        for difference in outcome.differences:
            yield f"          {difference}"
    yield _totals(outcomes)


def document(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The results as JSON data."""
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
