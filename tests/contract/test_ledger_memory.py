from __future__ import annotations

import pytest

from tidegate.adapters.memory import MemoryLedger
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import LedgerContract, LedgerPlace


class MemoryPlace(LedgerPlace):
    def __init__(self) -> None:
        refused = self.refused_rows()
        self.shared = MemoryLedger(rejects=lambda row: row in refused)

    def ledger(self) -> Ledger:
        return self.shared


class TestMemoryLedger(LedgerContract):
    @pytest.fixture
    def place(self) -> MemoryPlace:
        return MemoryPlace()
