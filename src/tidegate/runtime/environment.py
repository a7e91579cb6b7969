"""What a limiter takes from the machine: clock, randomness, sleep, and a node id.

`Limiter` and `AsyncLimiter` have no parameters for these. `tidegate.testing.limiters` makes limiters with another
environment: that is the one way in, for tests and the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tidegate.adapters.clock import WallClock
from tidegate.ports import Clock

__all__ = ["Environment"]


@dataclass(frozen=True)
class Environment:
    """By default, that of this process."""

    clock: Clock = field(default_factory=WallClock)
    node_id: str | None = None
    """None for a random one."""
    random: Random = field(default_factory=Random)
    sleep: Callable[[float], object] = time.sleep
    """How `Limiter.wait` sleeps. `AsyncLimiter.wait` sleeps on its event loop."""
    monotonic_s: Callable[[], float] = time.monotonic
    """The clock that `sleep` moves."""
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    """The clock that credit lives by. It never steps back."""
