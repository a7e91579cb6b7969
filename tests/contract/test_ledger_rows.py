"""The order in which rows are written: the adapters' unique key, whatever order the rows come in."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tidegate.adapters.ledger_rows import stored_rows
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
