from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tests.contract.origin_places import SetClock
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import OriginReply
from tidegate.ports import Origin
from tidegate.telemetry.otel import traced_origin
from tidegate.testing.contracts.origin import OriginContract, OriginPlace, component, new_digest


class MemoryPlace(OriginPlace):
    def __init__(self) -> None:
        self.clock = SetClock()
        self.first = MemoryOrigin(clock=self.clock)

    def node(self) -> Origin:
        return self.first.another()

    def wipe(self) -> None:
        self.first.wipe()

    def entries(self) -> int:
        return self.first.statistics()["cells"]

    async def wait_until(self, at_ms: int, origin: Origin) -> None:
        self.clock.at_ms = at_ms + 1


class TestMemoryOrigin(OriginContract):
    @pytest.fixture
    def place(self) -> MemoryPlace:
        return MemoryPlace()


class TracedPlace(MemoryPlace):
    """Each call has a span, and answers as before."""

    def node(self) -> Origin:
        return traced_origin(super().node(), TracerProvider().get_tracer("test"))


class TestTracedOrigin(OriginContract):
    @pytest.fixture
    def place(self) -> TracedPlace:
        return TracedPlace()


def test_a_restored_snapshot_is_an_older_copy_of_everything() -> None:
    origin = MemoryOrigin(clock=SetClock())
    digest = new_digest()
    origin.pulse_nowait("fra")
    origin.merge_nowait([component(digest, 5)])
    copy = origin.snapshot()
    origin.merge_nowait([component(digest, 9), component(digest, 2, writer="node-b")])
    origin.restore(copy)
    assert origin.read_nowait([component(digest)]) == [OriginReply(5, 5)]
    assert origin.merge_nowait([component(digest, 9)]) == [OriginReply(9, 5)]
    origin.restore(copy)
    assert origin.read_nowait([component(digest)]) == [OriginReply(5, 5)], (
        "a copy can be restored more than once"
    )
    assert not origin.pulse_nowait("fra").was_empty, "the copy has the name that this node knows"


def test_a_copy_from_before_the_region_was_claimed_is_noticed() -> None:
    origin = MemoryOrigin(clock=SetClock())
    copy = origin.snapshot()
    origin.pulse_nowait("fra")
    origin.restore(copy)
    assert origin.pulse_nowait("fra").was_empty


def test_statistics_count_what_this_node_asked() -> None:
    origin = MemoryOrigin(clock=SetClock())
    other = origin.another()
    origin.merge_nowait([component(new_digest(), 1), component(new_digest(), 1)])
    other.read_nowait([component(new_digest())])
    assert dict(origin.statistics()) == {
        "commands": 1, "connections_opened": 0, "cells": 2, "cells_read": 0, "cells_merged": 2,
        "messages": 0,
        "shares": 0,
    }  # fmt: skip
    assert other.statistics()["cells_read"] == 1
