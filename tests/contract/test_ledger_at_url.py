"""The contract of the ledger on a database that runs already (`tests/running_server.py`)."""

from __future__ import annotations

import pytest

from tests.running_server import URL
from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
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
