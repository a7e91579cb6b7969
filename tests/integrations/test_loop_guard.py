from __future__ import annotations

import asyncio
import threading

import pytest

from tests.integrations.kit import LoopBlocked, no_blocking
from tidegate import Limit, Limiter
from tidegate.adapters.memory import MemoryOrigin
from tidegate.testing import FailingOrigin


async def test_the_guard_finds_a_limiter_for_threads_on_an_event_loop() -> None:
    origin = FailingOrigin(MemoryOrigin())
    limiter = Limiter(region="fra", origin=origin)
    await asyncio.to_thread(limiter.start)
    origin.faults.hang("exchange")
    blocked = pytest.raises(AssertionError, match="blocked the event loop")
    with blocked, no_blocking(), pytest.raises(LoopBlocked):
        limiter.limit(Limit("1/minute", namespace="guarded"), "ann")
    await asyncio.to_thread(limiter.stop)


async def test_the_guard_leaves_other_threads_and_other_code_alone() -> None:
    with no_blocking():
        await asyncio.to_thread(threading.Event().wait, 0.001)
        threading.Event().wait(0.001)
