from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tidegate.cli.root import root
from tidegate.telemetry.decisions import DecisionRecord


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Ten callers of 1 to 10 requests in a minute, all allowed; one has a name that would move the cursor."""
    file = tmp_path / "access.jsonl"
    names = [*(f"user_{number}" for number in range(1, 10)), "\x1b[2Jten"]
    lines = [
        DecisionRecord(1_700_000_000_000 + 100 * number, "acme", "api", name, 1, 100, 60_000, True).to_line()
        for caller, name in enumerate(names, 1)
        for number in range(caller)
    ]
    file.write_text("".join(lines))
    return file


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(root, ["simulate", "replay", *arguments])
    return result.exit_code, result.output


def test_the_table_says_who_would_have_been_denied(log: Path) -> None:
    code, output = run(str(log), "--limit", "8/minute")
    assert code == 0, output
    assert "100 per minute (55 requests); replayed with 8 per minute" in output
    assert "3 requests of 2 identifiers would have been denied" in output
    assert "agrees with 100.00% of the log" in output
    rows = [line.split() for line in output.splitlines() if line.startswith(("user_9", "'\\x1b"))]
    assert rows == [["'\\x1b[2Jten'", "10", "10", "8", "2", "0"], ["user_9", "9", "9", "8", "1", "0"]]
    assert "\x1b" not in output


def test_json_has_the_same_and_at_most_so_many_identifiers(log: Path) -> None:
    code, output = run(str(log), "--limit", "8/minute", "--top", "1", "--json")
    assert code == 0, output
    document = json.loads(output)
    assert (document["requests"], document["newly_denied"], document["callers_newly_denied"]) == (55, 3, 2)
    assert [caller["identifier"] for caller in document["callers"]] == ["\x1b[2Jten"]


def test_a_limit_that_changes_nothing_lists_no_identifier(log: Path) -> None:
    code, output = run(str(log), "--limit", "100/minute")
    assert code == 0 and "0 requests of 0 identifiers would have been denied" in output
    assert "identifier  " not in output


def test_the_plots_are_written(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, output = run(str(log), "--limit", "8/minute", "--plot", str(tmp_path / "plots"))
    assert code == 0, output
    names = {file.name for file in (tmp_path / "plots").iterdir()}
    assert names == {f"replay{part}.{kind}" for part in ("", "-identifiers") for kind in ("png", "svg")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--limit", "8"], "8"),
        (["--limit", "8/minute", "--namespace", "nowhere"], "nowhere"),
        ([], "--limit"),
    ],
)
def test_wrong_input_is_an_error_that_names_it(log: Path, arguments: list[str], named: str) -> None:
    code, output = run(str(log), *arguments)
    assert code == 2 and named in output
