from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tidegate.adapters.memory import MemoryLedger
from tidegate.ports import Ledger
from tidegate.telemetry.otel import traced_ledger
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


class TracedPlace(MemoryPlace):
    """Each call has a span, and answers as before."""

    def ledger(self) -> Ledger:
        return traced_ledger(super().ledger(), TracerProvider().get_tracer("test"))


class TestTracedLedger(LedgerContract):
    @pytest.fixture
    def place(self) -> TracedPlace:
        return TracedPlace()
