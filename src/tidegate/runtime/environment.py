"""What a limiter takes from the machine: clock, randomness, sleep, and a node id.

`Limiter` and `AsyncLimiter` have no parameters for these. Tests and the simulator use another environment through
`tidegate.testing.limiters` only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tidegate.adapters.clock import WallClock
from tidegate.core import engine
from tidegate.ports import Clock

__all__ = ["Environment", "decides_in_one_step", "is_compiled"]


def is_compiled() -> bool:
    """Whether the core runs as extension modules, and not interpreted."""
    return not engine.__file__.endswith(".py")


def decides_in_one_step() -> bool:
    """Whether no other thread, signal handler or finalizer can run while compiled code decides.

    Interpreted code is interrupted between any two instructions. Without a GIL, threads run side by side.
    """
    is_gil_enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return is_compiled() and (is_gil_enabled is None or is_gil_enabled())


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
    """The clock by which credit expires. It never steps back."""
