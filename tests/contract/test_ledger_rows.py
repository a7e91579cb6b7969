"""How rows are written, in the order of the adapters' unique key, and which ones are read."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.nodes import Node
from tidegate.adapters.ledger_rows import RowReader, stored_rows
from tidegate.core.model import LedgerRow

ROWS = st.builds(
    LedgerRow,
    workspace=st.sampled_from(["default", "ws"]),
    namespace=st.sampled_from(["mail", "login"]),
    identifier=st.text("abc", min_size=1, max_size=3),
    duration_ms=st.sampled_from([60_000, 3_600_000]),
    sequence=st.integers(1_000, 1_002),
    region=st.sampled_from(["fra", "iad"]),
    regional=st.integers(1, 100),
    expires_at_ms=st.just(10**12),
)


@given(st.lists(ROWS, max_size=250))
def test_rows_in_any_order_are_written_once_each_in_the_order_of_the_unique_key(
    rows: list[LedgerRow],
) -> None:
    highest: dict[tuple[object, ...], int] = {}
    for row in rows:
        highest[row[:6]] = max(highest.get(row[:6], 0), row.regional)
    written = asyncio.run(stored_rows(rows))
    keys = [(row.subject, row.sequence, row.region) for row in written]
    assert keys == sorted(set(keys))
    assert sorted(row.regional for row in written) == sorted(highest.values())


INT64 = st.integers(-(2**63), 2**63 - 1)
NOW_MS = 1_800_000_000_000


@given(duration_ms=INT64, sequence=INT64, count=st.integers(0, 2**63 - 1))
@example(duration_ms=0, sequence=-1, count=1)  # a reset
@example(duration_ms=0, sequence=5, count=1)
@example(duration_ms=1, sequence=-(2**63), count=1)
@example(duration_ms=60_000, sequence=-1, count=2**63 - 1)
def test_a_row_with_any_numbers_is_imported_or_skipped_and_stops_no_other(
    duration_ms: int, sequence: int, count: int
) -> None:
    good = LedgerRow("w", "n", "good", 60_000, NOW_MS // 60_000, "ams", 7, NOW_MS + 90_000)
    reader = RowReader()
    for row in (good._replace(duration_ms=duration_ms, sequence=sequence, regional=count), good):
        names = [name.encode() for name in (row.region, row.workspace, row.namespace, row.identifier)]
        reader.add_nowait([(b"", row.sequence, *names, row.duration_ms, row.regional, 2**63 - 1, 1)])
    assert len(reader.rows) + reader.unreadable == 2
    node = Node(has_origin=False, has_ledger=True)
    node.ledger_sync.apply_import(reader.rows, NOW_MS)
    assert reader.rows[-1].regional == 7
    assert node.ledger_sync.rows_imported >= 1
