"""The pictures and tables of the documentation match their data, and the data is what the simulator measures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import pictures
from tidegate.sim.accuracy import cases, measure

FILES = {path.name: (path, content) for path, content in pictures.pictures()}


@pytest.mark.parametrize("name", FILES)
def test_the_picture_is_current(name: str) -> None:
    path, content = FILES[name]
    ET.fromstring(content)
    assert path.read_text(encoding="utf-8") == content, "run: make pictures"


def test_every_picture_file_is_made_here() -> None:
    made = set(FILES) | {f"{name}.json" for name in pictures.DATA}
    assert {path.name for path in (pictures.ROOT / "docs" / "pictures").iterdir()} == made


@pytest.mark.parametrize("path", pictures.PAGES, ids=lambda path: path.stem)
def test_the_tables_of_a_page_are_current(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert "<!-- end -->" in page
    assert pictures.tables(page) == page, "run: make pictures"


def test_the_data_has_every_case_of_the_simulator() -> None:
    held = json.loads((Path(pictures.PICTURES) / "accuracy.json").read_text(encoding="utf-8"))["results"]
    assert [one["case"]["name"] for one in held] == [case.name for case in cases()]


@pytest.mark.parametrize("name", ["2 regions, load 2", "load 2", "2 regions in one instant"])
def test_the_simulator_still_measures_what_the_data_says(name: str) -> None:
    held = json.loads((Path(pictures.PICTURES) / "accuracy.json").read_text(encoding="utf-8"))["results"]
    (expected,) = [one for one in held if one["case"]["name"] == name]
    (case,) = [one for one in cases() if one.name == name]
    found = json.loads(json.dumps(measure(case).document()))
    assert found == expected, "run: make pictures-measure"


def test_the_timeline_of_convergence_is_what_the_simulator_does() -> None:
    held = json.loads((Path(pictures.PICTURES) / "convergence.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(pictures.measure_convergence())) == held, "run: make pictures-measure"
