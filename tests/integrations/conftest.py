from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.kit import manual_async_limiter, manual_clock, no_blocking
from tidegate import AsyncLimiter
from tidegate.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return manual_clock()


@pytest.fixture
def limiter(clock: ManualClock) -> AsyncLimiter:
    """For asynchronous frameworks. Tests of the others use one for threads."""
    return manual_async_limiter(clock)


@pytest.fixture
def loop_guard() -> Iterator[None]:
    """A call that blocks the event loop fails the test."""
    with no_blocking():
        yield
