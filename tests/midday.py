"""Time that begins at noon, so that no window of a minute, an hour or a day ends in the middle of a test by chance.

For tests that cannot pass a clock: example applications, and programs in separate processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

DAY_NS = 86_400_000_000_000
# Where limiters take the time of the machine from.
READERS = (
    "tidegate.adapters.clock.time_ns",
    "tidegate.adapters.clock.now_ns",
    "tidegate.runtime.fleet.now_ns",
)


@contextmanager
def begins_now() -> Iterator[None]:
    """For limiters that are created in this block, time starts at noon and runs from there."""
    shift_ns = DAY_NS // 2 + DAY_NS - time.time_ns() % DAY_NS

    def time_ns() -> int:
        return time.time_ns() + shift_ns

    with ExitStack() as patches:
        for reader in READERS:
            patches.enter_context(patch(reader, time_ns))
        yield
