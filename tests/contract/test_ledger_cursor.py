"""The incremental import, on a real SQLite file with small answers: any mixture of publishes and imports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.adapters.ledger_cursor import Cursor, LivePlace, Place
from tidegate.adapters.migrations import migrate
from tidegate.adapters.sqlite.ledger import SQLiteLedger
from tidegate.core.model import LedgerRow
from tidegate.testing.contracts.ledger import NOW_MS, TIMEOUT_S, merged, publish, read_all, row, rows_of

REGIONS = ("fra", "iad", "syd")


class SetClock:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.at_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms


async def new_ledger(
    path: Path, clock: SetClock | None = None, answer_rows_max: int = 50_000
) -> SQLiteLedger:
    await migrate(f"sqlite:///{path}")
    return SQLiteLedger(path, clock=clock or SetClock(), answer_rows_max=answer_rows_max)


@pytest.fixture
async def empty_ledger(tmp_path: Path) -> Path:
    await (await new_ledger(tmp_path / "empty.db")).close()
    return tmp_path / "empty.db"


steps = st.lists(
    st.one_of(
        # publish: how far the clock jumps (also back), region, cells, count
        st.tuples(
            st.integers(-5_000, 5_000),
            st.sampled_from(REGIONS),
            st.sets(st.integers(0, 9), min_size=1),
            st.integers(0, 30),
        ),
        st.just("import"),
        st.just("start again"),
    ),
    max_size=25,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(steps=steps, answer_rows_max=st.integers(1, 7))
async def test_whatever_the_order_of_publishes_and_imports_everything_is_seen_and_nothing_twice(
    empty_ledger: Path, steps: list[object], answer_rows_max: int
) -> None:
    clock = SetClock()
    path = empty_ledger.with_name("used.db")
    shutil.copy(empty_ledger, path)
    ledger = SQLiteLedger(path, clock=clock, answer_rows_max=answer_rows_max)
    sent: list[LedgerRow] = []
    seen: list[LedgerRow] = []
    cursor: str | None = None
    for step in steps:
        if step == "start again":
            cursor, seen = None, []
        elif step == "import":
            # One answer only: the next publish comes in the middle of a read.
            changes = await ledger.changes(cursor, now_ms=NOW_MS, timeout_s=TIMEOUT_S)
            assert len(changes.rows) <= answer_rows_max
            assert not changes.lost
            seen += changes.rows
            cursor = changes.cursor
        else:
            assert isinstance(step, tuple)
            jump_ms, region, cells, regional = step
            clock.at_ms += jump_ms
            rows = [row(f"user-{cell}", regional, region=region) for cell in sorted(cells)]
            sent += rows
            await ledger.publish(rows, timeout_s=TIMEOUT_S)
    # What rose during a full read comes with the import after it.
    for _ in range(2):
        rest, cursor = await read_all(ledger, cursor)
        seen += rest
    assert merged(seen) == merged(sent)
    again, _ = await read_all(ledger, cursor)
    assert again == [], "a place that was reached is not read again"
    await ledger.close()


async def test_only_what_rose_is_read(tmp_path: Path) -> None:
    ledger = await new_ledger(tmp_path / "ledger.db")
    await publish(ledger, rows_of(100, regional=5))
    _, cursor = await read_all(ledger)
    await publish(ledger, [*rows_of(50, regional=3), *rows_of(100, regional=5), row("user-7", 6)])
    rows, cursor = await read_all(ledger, cursor)
    assert rows == [row("user-7", 6)]
    await ledger.close()


async def test_a_ledger_restored_from_an_older_copy_is_read_again(tmp_path: Path) -> None:
    clock = SetClock()
    path, copy = tmp_path / "ledger.db", tmp_path / "copy.db"
    ledger = await new_ledger(path, clock)
    await publish(ledger, rows_of(3))
    await ledger.close()  # the last one to close moves everything into the file
    shutil.copy(path, copy)
    ledger = SQLiteLedger(path, clock=clock)
    clock.at_ms += 60_000
    await publish(ledger, rows_of(3, regional=9))
    _, cursor = await read_all(ledger)
    await ledger.close()
    shutil.copy(copy, path)
    clock.at_ms -= 30_000  # and the new server's clock is behind
    ledger = SQLiteLedger(path, clock=clock)
    await publish(ledger, [row("user-1", 4)])
    rows, cursor = await read_all(ledger, cursor, is_lost=True)
    assert sorted(rows) == sorted([row("user-0"), row("user-1", 4), row("user-2")])
    await publish(ledger, [row("user-2", 5)])
    assert (await read_all(ledger, cursor))[0] == [row("user-2", 5)]
    await ledger.close()


async def test_a_ledger_that_came_back_empty_goes_on_with_an_old_cursor(tmp_path: Path) -> None:
    ledger = await new_ledger(tmp_path / "ledger.db")
    await publish(ledger, [*rows_of(3), *rows_of(3, region="iad")])
    _, cursor = await read_all(ledger)
    empty = await new_ledger(tmp_path / "empty.db")
    rows, cursor = await read_all(empty, cursor, is_lost=True)
    assert rows == []
    await publish(empty, rows_of(2))
    assert sorted((await read_all(empty, cursor))[0]) == sorted(rows_of(2))
    await ledger.close()
    await empty.close()


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "17",
        "nonsense",
        "[]",
        "{}",
        '{"places":[]}',
        '{"places":{"zz":[1,"",1]}}',
        '{"places":{},"after":[1]}',
    ],
)
async def test_an_invalid_cursor_starts_a_full_import(tmp_path: Path, cursor: str) -> None:
    ledger = await new_ledger(tmp_path / "ledger.db")
    await publish(ledger, rows_of(3))
    rows, _ = await read_all(ledger, cursor)
    assert sorted(rows) == sorted(rows_of(3))
    await ledger.close()


@given(
    places=st.dictionaries(
        st.binary(),
        st.builds(Place, st.integers(-1, 2**63), st.binary(max_size=16), st.integers(-1, 2**63 - 1)),
    ),
    after=st.none() | st.builds(LivePlace, st.integers(), st.binary(), st.integers(), st.binary()),
)
def test_a_cursor_is_the_same_after_it_was_written_and_read(
    places: dict[bytes, Place], after: LivePlace | None
) -> None:
    cursor = Cursor(places, after)
    assert Cursor.loaded(cursor.dumped()) == cursor
    json.loads(cursor.dumped())
