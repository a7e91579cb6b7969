"""A pytest plugin for applications that use Tidegate. It is found by itself where Tidegate is installed.

| fixture | what a test gets |
| --- | --- |
| `tidegate_clock` | a `ManualClock`, at the beginning of a window of every duration up to a day |
| `tidegate_limiter` | an embedded `Limiter` that uses this clock |
| `tidegate_async_limiter` | an embedded `AsyncLimiter` that uses this clock |
| `tidegate_origin` | a `FailingOrigin`: a shared counter in memory that fails, hangs or loses answers on command |

pytest loads this module in every project that has Tidegate installed. The fixtures import what they need, so that a
project which uses none of them does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidegate.runtime.async_limiter import AsyncLimiter
    from tidegate.runtime.limiter import Limiter
    from tidegate.testing.clock import ManualClock
    from tidegate.testing.faults import FailingOrigin

# 2027-01-16, 00:00 UTC.
START_MS = 1_800_057_600_000


@pytest.fixture
def tidegate_clock() -> ManualClock:
    """A clock that moves only when a test moves it."""
    from tidegate.testing.clock import ManualClock

    return ManualClock(START_MS)


@pytest.fixture
def tidegate_limiter(tidegate_clock: ManualClock) -> Limiter:
    """A limiter for threads that uses `tidegate_clock`."""
    from tidegate.testing.limiters import make_limiter

    return make_limiter(clock=tidegate_clock)


@pytest.fixture
def tidegate_async_limiter(tidegate_clock: ManualClock) -> AsyncLimiter:
    """A limiter for tasks that uses `tidegate_clock`."""
    from tidegate.testing.limiters import make_async_limiter

    return make_async_limiter(clock=tidegate_clock)


@pytest.fixture
def tidegate_origin() -> FailingOrigin:
    """An origin whose `faults` a test controls: `tidegate_origin.faults.fail()`."""
    from tidegate.adapters.memory import MemoryOrigin
    from tidegate.testing.faults import FailingOrigin

    return FailingOrigin(MemoryOrigin())
