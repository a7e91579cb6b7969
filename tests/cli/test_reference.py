"""The reference pages are up to date with the tables that they are generated from."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference import PAGES
from tidegate.cli.outcomes import ExitCode
from tidegate.cli.root import COMMANDS
from tidegate.server.process.config import SETTINGS
from tidegate.telemetry.metrics import METRICS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    generated = PAGES[name]()
    assert (REFERENCE / name).read_text(encoding="utf-8") == generated, "run: make docs-reference"


def test_the_pages_name_every_setting_metric_command_and_code() -> None:
    config, cli = PAGES["config.md"](), PAGES["cli.md"]()
    metrics, codes = PAGES["metrics.md"](), PAGES["exit-codes.md"]()
    for setting in SETTINGS:
        assert f"`{setting.path}`" in config
        assert f"`{setting.env}`" in config
        assert setting.description in config
    for entry in METRICS:
        assert f"`{entry.full_name}`" in metrics
        assert entry.worry in metrics
    for command in COMMANDS:
        assert f"## tidegate {command}\n" in cli
    for code in ExitCode:
        assert f"`{int(code)}`" in codes


def test_the_how_to_pages_name_only_flags_of_serve_that_exist() -> None:
    known = {setting.flag for setting in SETTINGS} | {"--config", "--json"}
    lines = [
        line.partition("#")[0]
        for page in (REFERENCE.parent / "how-to").glob("*.md")
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if line.startswith("tidegate serve ")
    ]
    assert len(lines) >= 5
    for line in lines:
        assert {word for word in line.split() if word.startswith("--")} <= known, line


def test_no_page_contains_a_path_of_this_machine() -> None:
    for page in PAGES.values():
        assert str(Path.home()) not in page()
        assert str(REFERENCE.parents[1]) not in page()
