"""The table of promises: every promise has a check, every check a broken variant, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.core.credit_world import Broken
from tests.sim.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture" / "promises.md"


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without the heads."""
    found = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.lstrip().startswith("|")
    ]
    rules = [number for number, cells in enumerate(found) if set("".join(cells)) <= {"-", ":", " "}]
    return [cells for number, cells in enumerate(found) if number not in rules and number + 1 not in rules]


PROMISES = rows(PAGE.read_text(encoding="utf-8"))


def test_every_promise_of_the_readme_has_a_row() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| It promises |")[2].partition("| It does not promise |")[0]
    promised = [cells[0] for cells in rows("| x |\n" + table.partition("\n")[2])]
    assert len(promised) >= 8
    assert set(promised) <= {cells[0] for cells in PROMISES}


def test_every_invariant_has_a_row() -> None:
    model = (ROOT / "docs" / "architecture" / "consistency-model.md").read_text(encoding="utf-8")
    section = model.partition("## Invariants")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    assert len(numbers) >= 10
    assert {f"Invariant {number}" for number in numbers} <= {cells[0] for cells in PROMISES}


@pytest.mark.parametrize("cells", PROMISES, ids=lambda cells: cells[0])
def test_what_a_row_names_exists(cells: list[str]) -> None:
    promise, checks, variants = cells
    assert promise
    named = re.findall(r"`([^`]+)`", checks)
    assert named, "a promise without a check"
    for name in named:
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"def {re.escape(function)}\(" if function else "def test_", text), name
    broken = re.findall(r"`([^`]+)`", variants)
    assert broken, "a check that nothing proves"
    for name in broken:
        assert name in MUTANTS or name in Broken.__members__, name
