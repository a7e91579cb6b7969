from __future__ import annotations

import pytest

from tests.contract.ledger_places import MySQLPlace
from tidegate.adapters.migrations import migrate
from tidegate.testing.contracts.ledger_server import ServerLedgerContract
from tidegate.testing.servers import MariaDBServer


class TestMariaDBLedger(ServerLedgerContract):
    @pytest.fixture
    async def place(self, mariadb_server: MariaDBServer, mariadb_url: str) -> MySQLPlace:
        await migrate(mariadb_url)
        return MySQLPlace(mariadb_server, mariadb_url)
