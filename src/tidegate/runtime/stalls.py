"""How long the event loop was blocked: the delay of a timer."""

from __future__ import annotations

import asyncio
from typing import Final

from tidegate.runtime.latency import Histogram

__all__ = ["StallMonitor"]

INTERVAL_S: Final = 0.1


class StallMonitor:
    """Feeds `loop_stall_seconds`."""

    def __init__(self) -> None:
        self.histogram: Final[Histogram] = Histogram()

    async def run(self) -> None:
        """The loop, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.histogram.observe(max(0.0, loop.time() - due_s))
