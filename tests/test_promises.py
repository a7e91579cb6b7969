"""The table of promises: every promise has a check, every check a broken variant, and all of them exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.core import test_credit
from tests.core.credit_world import Broken, World
from tests.runtime import (
    test_exchange,
    test_import_lease,
    test_publish,
    test_pulse,
    test_reads,
    test_replay,
    test_running_time,
)
from tests.sim.mutants import MUTANTS
from tests.telemetry import test_meanings
from tidegate import Tuning
from tidegate.core.grants import GrantRules
from tidegate.ports import Changes
from tidegate.runtime.importer import ImportLoop
from tidegate.runtime.node import Node

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture" / "promises.md"
MODEL = (ROOT / "docs" / "architecture" / "consistency-model.md").read_text(encoding="utf-8")
ACCURACY = (ROOT / "docs" / "architecture" / "accuracy.md").read_text(encoding="utf-8")

# Sections of the page about accuracy that show figures and state no bound.
WITHOUT_BOUND = {"How regions converge", "Distance", "Which tests check this"}


WIPE = test_credit.test_a_wipe_admits_at_most_the_credit_that_was_out_the_unknown_counts_and_what_came_until_repair


async def drops_own_rows(self: Any, changes: Changes, start: int, now_ms: int) -> None:
    rows = [row for row in changes.rows if row.region != self._region]
    await SHARE(self, changes._replace(rows=rows), start, now_ms)


async def sets_aside_the_chunk(self: Any, publication: Any, start: int, end: int, *_rest: Any) -> None:
    for index in range(start, end):
        self._sync.set_aside(publication, index, self._gate.now_ms())


async def without_deadline(self: Any, timeout_s: float | None = None) -> bool:
    return await STOP(self, 60)


SHARE = ImportLoop._share
STOP = Node.stop
TUNING = "tests.runtime.world.Tuning"
RULES = "tidegate.adapters.memory.CREDIT_RULES"

# Broken variants of what is not compiled, and of times that a promise states: a test that must fail, what is replaced,
# and by what.
VARIANTS: dict[str, tuple[Callable[..., None], str, object]] = {
    "a lease to import of 4 s": (
        test_import_lease.test_a_holder_that_dies_is_replaced_within_two_seconds_and_the_import_continues_from_its_cursor,
        TUNING,
        partial(Tuning, import_lease_ms=4_000),
    ),
    "a publisher that is waited for 4 s": (
        test_import_lease.test_a_node_that_dies_before_it_publishes_is_responsible_for_two_seconds,
        RULES,
        GrantRules(publish_ms=4_000),
    ),
    "credit that lives for 10 s": (
        test_exchange.test_the_credit_of_a_crashed_limiter_is_available_again_when_it_expires,
        RULES,
        GrantRules(life_ms=10_000),
    ),
    "a full read a minute after a loss": (
        test_import_lease.test_a_ledger_that_lost_its_rows_gets_them_again,
        "tidegate.runtime.importer.LOSS_INTERVALS",
        12,
    ),
    "a pulse every 5 s": (
        test_pulse.test_a_wiped_origin_is_noticed_without_traffic_and_gets_everything_back,
        TUNING,
        partial(Tuning, pulse_interval_ms=5_000),
    ),
    "a breaker that never opens": (
        test_reads.test_reads_that_mostly_fail_open_their_breaker_and_decisions_continue,
        "tidegate.runtime.breaker.Breaker.record",
        lambda _self, _ticket, _succeeded, _now_s: None,
    ),
    "nodes that wait for an importer while Redis is down": (
        test_import_lease.test_without_its_origin_every_node_imports_and_publishes_for_itself,
        "tidegate.runtime.import_lease.ImportLease.is_shared",
        True,
    ),
    "a rejected row takes its chunk with it": (
        test_publish.test_a_row_that_the_ledger_refuses_is_set_aside_and_all_others_are_published_in_the_same_turn,
        "tidegate.runtime.publish.PublishLoop._bisect",
        sets_aside_the_chunk,
    ),
    "a stop without a deadline": (
        test_replay.test_stop_gives_up_at_its_deadline,
        "tidegate.runtime.node.Node.stop",
        without_deadline,
    ),
    "an importer that drops the rows of its own region": (
        test_import_lease.test_a_region_that_restarts_with_an_empty_origin_counts_its_row_of_the_window_before,
        "tidegate.runtime.importer.ImportLoop._share",
        drops_own_rows,
    ),
    "requests that wait for 3 s": (
        test_running_time.test_without_a_stall_a_request_waits_300_ms,
        "tests.runtime.credit_fleet.Tuning",
        partial(Tuning, read_timeout_ms=3_000),
    ),
    "a wiped Redis and credit that can be spent twice": (
        partial(WIPE, holds_only=False),
        "tests.core.test_credit.World",
        partial(World, broken=Broken.UNSPENT_COUNTED_TWICE),
    ),
    "a clock offset that is not reported": (
        test_meanings.test_the_offset_is_positive_when_this_node_is_ahead_of_its_origin,
        "tidegate.runtime.pulse.PulseLoop._note_offset",
        lambda self, _offset_ms, _round_trip_ms: setattr(self, "clock_offset_ms", 0),
    ),
}


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without the heads."""
    found = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.lstrip().startswith("|")
    ]
    rules = [number for number, cells in enumerate(found) if set("".join(cells)) <= {"-", ":", " "}]
    return [cells for number, cells in enumerate(found) if number not in rules and number + 1 not in rules]


def exists(name: str) -> bool:
    """Whether there is a test of this name, or a file with tests."""
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.search(rf"def {re.escape(function)}\(" if function else "def test_", text) is not None


PROMISES = rows(PAGE.read_text(encoding="utf-8"))


def test_every_promise_of_the_readme_has_a_row() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| It promises |")[2].partition("| It does not promise |")[0]
    promised = [cells[0] for cells in rows("| x |\n" + table.partition("\n")[2])]
    assert len(promised) >= 8
    assert set(promised) <= {cells[0] for cells in PROMISES}


def test_every_invariant_has_a_row() -> None:
    section = MODEL.partition("## Invariants")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    assert len(numbers) >= 10
    assert {f"Invariant {number}" for number in numbers} <= {cells[0] for cells in PROMISES}


def test_every_failure_has_a_row() -> None:
    failures = [cells[0] for cells in rows(MODEL.partition("## Failures")[2].partition("\n## ")[0])]
    assert len(failures) >= 14
    assert {f"Failure: {failure}" for failure in failures} <= {cells[0] for cells in PROMISES}


def test_every_bound_of_accuracy_has_a_row() -> None:
    sections = set(re.findall(r"^## (.+)$", ACCURACY, re.MULTILINE))
    assert sections > WITHOUT_BOUND
    cases = set(re.findall(r"^- \*\*(.+?)\*\*", ACCURACY, re.MULTILINE))
    assert len(cases) >= 5
    named = {f"Accuracy: {name}" for name in sections - WITHOUT_BOUND | cases}
    assert named == {cells[0] for cells in PROMISES if cells[0].startswith("Accuracy: ")}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_check_fails_on_its_broken_variant(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    check, place, broken = VARIANTS[name]
    wanted = [each for each in inspect.signature(check).parameters.values() if each.default is each.empty]
    arguments = {each.name: request.getfixturevalue(each.name) for each in wanted}
    monkeypatch.setattr(place, broken)
    with pytest.raises(AssertionError):
        check(**arguments)


@pytest.mark.parametrize("cells", PROMISES, ids=lambda cells: cells[0])
def test_what_a_row_names_exists(cells: list[str]) -> None:
    promise, checks, variants = cells
    assert promise
    named = re.findall(r"`([^`]+)`", checks)
    assert named, "a promise without a check"
    for name in named:
        assert exists(name), name
    broken = re.findall(r"`([^`]+)`", variants)
    assert broken, "a check that nothing proves"
    for name in broken:
        if name in VARIANTS:
            check = VARIANTS[name][0]
            assert getattr(check, "func", check).__name__ in {each.partition("::")[2] for each in named}, name
        else:
            assert name in MUTANTS or name in Broken.__members__ or exists(name), name
