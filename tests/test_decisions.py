"""The architecture decision records have one form, and the index lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted((DOCS / "adr").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_has_a_status_and_five_parts_and_is_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    number = page.name[:4]
    title, blank, status = text.split("\n")[:3]
    assert title.startswith(f"# {number}: ")
    assert blank == ""
    link = r"\[(\d{4})\]\((\1-[\w-]+\.md)\)"
    later = re.fullmatch(rf"Status: (?:accepted|(?:accepted; changed|replaced) by {link})\.", status)
    assert later is not None
    assert later[2] is None or page.with_name(later[2]) in PAGES
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Context",
        "Decision",
        "Consequences",
        "Rejected options",
    ]
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"| [{number}](adr/{page.name}) | {title.removeprefix(f'# {number}: ')} |" in index


def test_no_number_is_used_twice() -> None:
    numbers = [page.name[:4] for page in PAGES]
    assert len(set(numbers)) == len(numbers)
