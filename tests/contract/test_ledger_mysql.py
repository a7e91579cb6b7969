from __future__ import annotations

import pytest

from tests.contract.ledger_places import MySQLPlace
from tidegate.adapters.migrations import migrate
from tidegate.testing.contracts.ledger_server import ServerLedgerContract
from tidegate.testing.servers import MySQLServer


class TestMySQLLedger(ServerLedgerContract):
    @pytest.fixture
    async def place(self, mysql_server: MySQLServer, mysql_url: str) -> MySQLPlace:
        await migrate(mysql_url)
        return MySQLPlace(mysql_server, mysql_url)
