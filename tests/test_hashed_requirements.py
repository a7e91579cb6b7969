"""deploy/requirements.txt: the pinned versions, each with hashes, for everything that the image installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_the_image_installs_is_pinned_and_has_hashes() -> None:
    pinned = set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    text = (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert {line[0] for line in lines} <= pinned, "make constraints"
    for name, *hashes in lines:
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
    named = {line[0].partition("==")[0] for line in lines}
    container = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
    extras = re.search(r'"\.\[([\w,]+)\]"', container)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in extras[1].split(","):
        for requirement in project["optional-dependencies"][extra]:
            wanted = re.split(r"[\[<>=;! ~]", requirement)[0].lower().replace("_", "-")
            assert wanted in named | {"tidegate"}, requirement
