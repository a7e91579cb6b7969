"""The pulse: once a second the node asks its origin for the region's name and its clock.

A missing name means that the origin was wiped or replaced, with or without traffic: everything is merged again, with
growing pauses if losses continue. Another region's name means that this is the wrong origin: it is not used until that
is corrected. The clock offset is reported, never corrected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tidegate.core.gate import Gate
from tidegate.core.model import Tuning
from tidegate.core.sweep import Sweep
from tidegate.errors import DependencyError, DependencyUnavailable, RegionMismatch
from tidegate.ports import Origin

__all__ = ["PulseLoop"]

logger: Final = logging.getLogger(__name__)


class PulseLoop:
    """Asks the origin of one node for its region and its clock."""

    def __init__(
        self,
        origin: Origin,
        region: str,
        gate: Gate,
        sweep: Sweep,
        tuning: Tuning,
        *,
        on_wiped: Callable[[], object],
        on_recovered: Callable[[], object],
        on_resets: Callable[[int, bool], object],
    ) -> None:
        self._origin = origin
        self._region = region
        self._gate = gate
        self._sweep = sweep
        self._interval_s = tuning.pulse_interval_ms / 1000
        self._timeout_s = tuning.read_timeout_ms / 1000
        self._offset_warn_ms = tuning.clock_offset_warn_ms
        self._on_wiped = on_wiped
        # Called when the origin answers after it did not.
        self._on_recovered = on_recovered
        # Called with the number of the origin's last reset, and whether it has lost what it held.
        self._on_resets = on_resets
        self._warned = False
        self.last_error: str | None = None
        # Origin clock minus ours, at the middle of the last round trip; None before the first.
        self.clock_offset_ms: int | None = None
        self.is_alive: bool = False
        self._is_confirmed = False
        # The name that the origin holds instead of ours, if it is the origin of another region.
        self.foreign_region: str | None = None

    @property
    def is_ours(self) -> bool:
        """The origin may be used: it has been opened, and held our name when it last answered."""
        return self._is_confirmed and self.foreign_region is None

    def confirm(self) -> None:
        """The origin was opened: it holds our name."""
        self._is_confirmed = True

    async def run_once(self) -> None:
        """One pulse. Raises a `DependencyError` when the origin does not answer."""
        before_ms = self._gate.now_ms()
        try:
            pulse = await self._origin.pulse(self._region, timeout_s=self._timeout_s)
        except DependencyError as error:
            self._failed(error)
            raise
        except Exception as error:
            logger.exception("the origin's adapter raised an unexpected error")
            self._failed(error)
            raise DependencyUnavailable(str(self.last_error)) from error
        after_ms = self._gate.now_ms()
        had_failed, self.is_alive = not self.is_alive, True
        if pulse.region != self._region:
            if self.foreign_region is None:
                logger.error("%s", RegionMismatch(self._region, pulse.region))
            self.foreign_region = pulse.region
            return
        self.foreign_region = None
        self._is_confirmed = True
        self._note_offset(pulse.time_ms - (before_ms + after_ms) // 2, after_ms - before_ms)
        with self._gate:
            # Its clock was read after the request left: it cannot be further ahead.
            self._sweep.origin_ahead_ms = max(0, pulse.time_ms - before_ms)
            heals = self._sweep.resume(after_ms)
            if pulse.was_empty:
                self._sweep.suspect_all(after_ms)
        if heals or pulse.was_empty:
            self._on_wiped()
        self._on_resets(pulse.resets, pulse.was_empty)
        if had_failed:
            if self.last_error is not None:
                logger.info("the origin answers again")
            self._on_recovered()

    def _failed(self, error: Exception) -> None:
        if self.is_alive:
            logger.warning("the origin does not answer, decisions are local: %s", error)
        self.is_alive = False
        self.last_error = f"{type(error).__name__}: {error}"

    def _note_offset(self, offset_ms: int, round_trip_ms: int) -> None:
        if round_trip_ms > 2 * self._offset_warn_ms:
            # The offset is exact to half a round trip. A busy event loop must not look like a wrong clock.
            return
        self.clock_offset_ms = offset_ms
        if abs(offset_ms) <= self._offset_warn_ms:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning(
                "the clock of this node is %d ms off the clock of its origin; check NTP on both", -offset_ms
            )

    async def run(self) -> None:
        """The loop, until cancelled."""
        while True:
            try:
                await self.run_once()
            except DependencyError:
                logger.debug("no pulse: %s", self.last_error)
            await asyncio.sleep(self._interval_s)
