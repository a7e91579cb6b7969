"""The contract of the ledger on a database that runs already (`tests/running_server.py`)."""

from __future__ import annotations

import pytest

from tests.running_server import URL
from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.core.model import LedgerRow
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import LedgerContract, LedgerPlace

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not URL, reason="TIDEGATE_TEST_LEDGER names no running database: nothing was checked on it"
    ),
]


class UrlPlace(LedgerPlace):
    def __init__(self, url: str) -> None:
        self._url = url

    def ledger(self) -> Ledger:
        return open_ledger(self._url)


class TestLedgerAtUrl(LedgerContract):
    @pytest.fixture
    async def place(self, running_url: str) -> UrlPlace:
        await migrate(running_url)
        return UrlPlace(running_url)

    async def test_no_call_causes_a_warning_of_the_server(
        self, place: UrlPlace, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledger = place.ledger()
        row = LedgerRow("w", "n", "alice", 60_000, 1, "fra", 5, 180_000)
        await ledger.publish([row], timeout_s=30)
        full = await ledger.changes(None, now_ms=0, timeout_s=30)
        await ledger.changes(full.cursor, now_ms=0, timeout_s=30)
        await ledger.publish([row._replace(regional=6)], timeout_s=30)
        changed = await ledger.changes(full.cursor, now_ms=0, timeout_s=30)
        overview = await ledger.overview(now_ms=0, hottest_max=5, timeout_s=30)
        await ledger.cleanup(200_000, rows_max=10, timeout_s=30)
        await ledger.close()
        assert (len(full.rows), len(changed.rows), len(overview.hottest)) == (1, 1, 1)
        assert [record.getMessage() for record in caplog.records] == []
