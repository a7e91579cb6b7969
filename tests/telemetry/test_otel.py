from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.core.model import Component, LedgerRow, subject_digest
from tidegate.errors import DependencyError, MissingExtra
from tidegate.ports import Ledger, Origin
from tidegate.telemetry.otel import traced_ledger, traced_origin


class Recording:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def tracer(self) -> Tracer:
        return self._provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


async def test_a_traced_origin_replies_as_before_and_creates_spans_without_identifiers() -> None:
    recording = Recording()
    origin: Origin = traced_origin(MemoryOrigin(), recording.tracer)
    digest = subject_digest("w", "n", "alice", 60_000)
    component = Component(digest, 5, "node", 3, 2**53)
    await origin.open("fra", timeout_s=1)
    assert [reply.total for reply in await origin.merge([component], timeout_s=1)] == [3]
    assert [reply.total for reply in await origin.read([component], timeout_s=1)] == [3]
    assert (await origin.pulse("fra", timeout_s=1)).region == "fra"
    assert "commands" in origin.statistics()
    await origin.close()
    assert set(recording.spans) == {"tidegate.origin.open", "tidegate.origin.merge", "tidegate.origin.read"}
    assert dict(recording.spans["tidegate.origin.merge"].attributes or {}) == {"cells": 1}


async def test_a_traced_ledger_replies_as_before_and_counts_rows() -> None:
    recording = Recording()
    ledger: Ledger = traced_ledger(MemoryLedger(), recording.tracer)
    row = LedgerRow("w", "n", "alice", 60_000, 5, "fra", 3, 420_000)
    await ledger.open(timeout_s=1)
    await ledger.publish([row], timeout_s=1)
    assert (await ledger.changes(None, now_ms=300_000, timeout_s=1)).rows == [row]
    assert [beat.region for beat in await ledger.heartbeat("fra", timeout_s=1)] == ["fra"]
    assert (await ledger.overview(now_ms=300_000, hottest_max=1, timeout_s=1)).rows == {"fra": 1}
    assert await ledger.cleanup(500_000, rows_max=10, timeout_s=1) == 1
    assert "statements" in ledger.statistics()
    await ledger.close()
    names = {"open", "publish", "import", "heartbeat", "overview", "cleanup"}
    assert set(recording.spans) == {f"tidegate.ledger.{name}" for name in names}
    assert dict(recording.spans["tidegate.ledger.import"].attributes or {}) == {"full": 1, "rows": 1}


async def test_an_error_is_raised_and_recorded_in_the_span() -> None:
    class Down(MemoryOrigin):
        async def read(self, wanted: object, *, timeout_s: float) -> list[object]:  # type: ignore[override] # fails only
            raise DependencyError("down")

    recording = Recording()
    origin = traced_origin(Down(), recording.tracer)  # type: ignore[arg-type] # the same
    with pytest.raises(DependencyError):
        await origin.read([], timeout_s=1)
    assert not recording.spans["tidegate.origin.read"].status.is_ok


@pytest.fixture
def no_opentelemetry() -> Iterator[None]:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("opentelemetry")}
    sys.modules["opentelemetry"] = None  # type: ignore[assignment] # how Python marks a module as absent
    yield
    del sys.modules["opentelemetry"]
    sys.modules.update(hidden)


def test_without_opentelemetry_the_error_names_the_extra(no_opentelemetry: None) -> None:
    with pytest.raises(MissingExtra, match=r"tidegate\[otel\]"):
        traced_origin(MemoryOrigin())
