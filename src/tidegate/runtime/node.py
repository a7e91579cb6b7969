"""A node: one engine, the loops that keep it in touch with its origin and its ledger, and their start and stop.

Asynchronous, on whatever event loop it is started on. It is the same for both drivers: `AsyncLimiter` runs it on
the caller's loop, `Limiter` on a loop in a thread of its own. Every task is owned here and ends with `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Final

from tidegate.core.convergence import Convergence
from tidegate.core.engine import Engine
from tidegate.core.gate import CLOSED, Gate
from tidegate.core.model import Tuning
from tidegate.errors import CircuitOpen, Closed, ConfigurationError, DependencyError
from tidegate.ports import Ledger, Origin
from tidegate.runtime.breaker import Breaker
from tidegate.runtime.calls import ADAPTER_SHARE
from tidegate.runtime.importer import ImportLoop
from tidegate.runtime.loops import Backoff
from tidegate.runtime.publish import PublishLoop
from tidegate.runtime.pulse import PulseLoop
from tidegate.runtime.reads import Reads
from tidegate.runtime.replay import ReplayLoop
from tidegate.runtime.stalls import StallMonitor
from tidegate.runtime.statistics import Health

__all__ = ["Node"]

logger = logging.getLogger(__name__)

BREAKER_NUMBERS = {"closed": 0, "half_open": 1, "open": 2}

# Expired subjects dropped between two breaths of the event loop, and how often somebody looks.
EXPIRE_SLICE = 500
EXPIRE_INTERVAL_S = 1.0
# Longest wait of a start for the ledger: a few round trips around the world. One that is slower is opened later.
OPEN_LEDGER_S: Final = 3.0


class Node:
    """The shared side of one limiter."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        tuning: Tuning,
        random: Random,
        *,
        region: str,
        origin: Origin | None,
        ledger: Ledger | None,
        on_loop_closed: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._tuning = tuning
        self._region = region
        self._origin = origin
        self._ledger = ledger
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._ledger_ready = False
        self._ledger_problem: str | None = None
        # Set as soon as requests need not wait for the start any longer: the origin was met, or was not.
        self.can_decide = asyncio.Event()
        # Called when the loops end without a `stop`: their event loop is being closed.
        self._on_loop_closed = on_loop_closed
        self.convergence = Convergence(engine, tuning, region)
        self.stalls = StallMonitor()
        self.reads: Reads | None = None
        self.replay: ReplayLoop | None = None
        self.pulse: PulseLoop | None = None
        self.publish: PublishLoop | None = None
        self.importer: ImportLoop | None = None
        if origin is not None:
            self.reads = Reads(origin, gate, self.convergence, tuning)
            self.replay = ReplayLoop(origin, gate, self.convergence, tuning, Backoff(tuning, random))
            self.pulse = PulseLoop(origin, region, gate, self.convergence, tuning, self.wake)
            pulse = self.pulse
            self.reads.calls.is_usable = self.replay.calls.is_usable = lambda: pulse.is_ours
            self.reads.on_news = self.wake
            self.pulse.on_recovered = self.replay.retry
        if ledger is not None:
            self.publish = PublishLoop(ledger, gate, self.convergence, tuning, random)
            self.importer = ImportLoop(ledger, region, engine, gate, self.convergence, tuning, random)
            self.publish.calls.is_usable = lambda: self._ledger_ready
            self.publish.on_published = self.importer.hurry

    # -- start and stop

    async def _open_origin(self) -> None:
        if self._origin is None or self.pulse is None:
            return
        timeout_s = self._tuning.replay_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._origin.open(self._region, timeout_s=timeout_s * ADAPTER_SHARE)
            self.pulse.is_confirmed = True
        except (DependencyError, TimeoutError) as error:
            logger.warning("the origin is not reachable, decisions are local: %s", error)

    async def _open_ledger(self) -> None:
        if self._ledger is None:
            return
        timeout_s = min(OPEN_LEDGER_S, self._tuning.ledger_timeout_ms / 1000)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ledger.open(timeout_s=timeout_s * ADAPTER_SHARE)
            self._ledger_ready = True
        except (DependencyError, TimeoutError) as error:
            self._ledger_problem = str(error) or "no answer in time"
            logger.warning("the ledger is not reachable, regions drift apart: %s", error)

    async def start(self) -> None:
        """Check both dependencies, both at once, and start the loops.

        What can never work is raised, and nothing is left behind; what is merely down, or slow, is left for later.
        """
        openings = [self._start_origin(), self._start_ledger()]
        for problem in await asyncio.gather(*openings, return_exceptions=True):
            if problem is not None:
                await self._end_loops()
                await self._close()
                raise problem
        self._spawn(self.stalls.run())
        self._spawn(self._expire())

    def assume_open(self) -> None:
        """Instead of `start`: both dependencies count as open, and no loop runs by itself."""
        if self.pulse is not None:
            self.pulse.is_confirmed = True
        self._ledger_ready = True
        self.can_decide.set()

    async def _start_origin(self) -> None:
        try:
            await self._open_origin()
            if self.replay is not None and self.pulse is not None:
                self._spawn(self.replay.run())
                self._spawn(self.pulse.run())
        finally:
            self.can_decide.set()

    async def _start_ledger(self) -> None:
        await self._open_ledger()
        if self.publish is not None and self.importer is not None:
            self._spawn(self.publish.run())
            self._spawn(self._import())

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if not self._stopping:
                self._stopping = True
                self._on_loop_closed()
        elif (error := task.exception()) is not None:
            # Not a failure of a dependency, those are handled: a fault of ours must not go unseen.
            logger.error("a background loop ended: %r", error, exc_info=error)

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the loops, flush the last counts within the deadline. True if nothing was left untold."""
        deadline_s = self._tuning.flush_timeout_ms / 1000 if timeout_s is None else timeout_s
        await self._end_loops()
        try:
            async with asyncio.timeout(deadline_s):
                if self.reads is not None:
                    # Who still waits for a read decides now, and is flushed with the others.
                    await self.reads.close()
                flushed = await self._flush()
        except TimeoutError:
            flushed = False
        finally:
            with suppress(Closed), self._gate:
                self._gate.resting = CLOSED
            await self._close()
        if not flushed:
            logger.warning("stopped with counts that did not reach the origin or the ledger in time")
        return flushed

    async def _end_loops(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _close(self) -> None:
        if self.reads is not None:
            await self.reads.close()
        if self._origin is not None:
            await self._origin.close()
        if self._ledger is not None:
            await self._ledger.close()

    async def _flush(self) -> bool:
        """Tell what is left, and shut the gate in the very step that finds nothing more: whatever was allowed
        was told, and whatever comes later is refused."""
        while True:
            # At once: an origin that hangs must not use up the ledger's time.
            flushed = all(await asyncio.gather(self._flush_origin(), self._flush_ledger()))
            with self._gate:
                if not flushed or not self.convergence.has_dirty:
                    self._gate.resting = CLOSED
                    return flushed

    async def _flush_origin(self) -> bool:
        """Send what is left; again after a failure, for as long as the deadline and the breaker let it."""
        if self.replay is None:
            return True
        while True:
            try:
                await self.replay.run_once()
            except CircuitOpen as error:
                logger.warning("the last counts did not reach the origin: %s", error)
                return False
            except DependencyError:
                await asyncio.sleep(self._tuning.backoff_first_ms / 1000)
            else:
                return True

    async def _flush_ledger(self) -> bool:
        return self.publish is None or not self._ledger_ready or (await self.publish.run_once()).ok

    # -- background

    def wake(self) -> None:
        """There is work for the replay or the publish loop. Cheap; call it on the node's own event loop."""
        self._engine.signals = False
        if self.replay is not None:
            self.replay.wake()
        if self.publish is not None and self.convergence.has_pressed:
            self.publish.press()

    @property
    def is_awake(self) -> bool:
        """The loops will see new work by themselves."""
        return (self.replay is None or self.replay.awake) and not self.convergence.has_pressed

    async def _import(self) -> None:
        """Wait until the ledger can be used at all, then import for ever."""
        assert self._ledger is not None and self.importer is not None
        backoff_s = self._tuning.backoff_first_ms / 1000
        while not self._ledger_ready:
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._tuning.backoff_last_ms / 1000)
            try:
                await self._ledger.open(timeout_s=self._tuning.ledger_timeout_ms / 1000)
                self._ledger_ready = True
                self._ledger_problem = None
            except (DependencyError, ConfigurationError) as error:
                if str(error) != self._ledger_problem:
                    logger.warning("the ledger cannot be used: %s", error)
                self._ledger_problem = str(error)
        await self.importer.run()

    async def _expire(self) -> None:
        """Drop what has aged out, a slice at a time."""
        while True:
            more = True
            while more:
                with self._gate:
                    more = self._engine.subjects.expire(self._gate.now_ms(), EXPIRE_SLICE)
                await asyncio.sleep(0)
            await asyncio.sleep(EXPIRE_INTERVAL_S)

    # -- telling

    def _breakers(self) -> list[Breaker]:
        parts = (self.reads, self.replay, self.publish, self.importer)
        return [part.calls.breaker for part in parts if part is not None]

    def health(self, now_s: float) -> list[Health]:
        """One line per dependency. Degraded is not dead: decisions go on whatever these say."""
        found: list[Health] = []
        if self.pulse is not None:
            found.append(Health("origin", self.pulse.alive and self.pulse.is_ours, self._origin_detail()))
        if self.importer is not None:
            ok = self._ledger_ready and not self.importer.calls.is_failing
            detail = (
                "reachable"
                if ok
                else self._ledger_problem or self.importer.calls.last_error or "not reached yet"
            )
            found.append(Health("ledger", ok, detail))
        for breaker in self._breakers():
            state = breaker.state(now_s)
            found.append(Health(f"breaker {breaker.name}", state != "open", state))
        return found

    def _origin_detail(self) -> str:
        assert self.pulse is not None
        if self.pulse.foreign_region is not None:
            return f"belongs to region {self.pulse.foreign_region!r}"
        if not self.pulse.alive:
            return self.pulse.last_error or "not reached yet"
        return f"reachable, clock offset {self.pulse.clock_offset_ms} ms"

    def statistics(self, now_s: float) -> dict[str, object]:
        """What the loops know, as fields of `Statistics`."""
        known: dict[str, object] = {
            "breaker_states": {b.name: BREAKER_NUMBERS[b.state(now_s)] for b in self._breakers()},
            "loop_stall": self.stalls.histogram.snapshot(),
            "cells_created_by_import": self.convergence.cells_imported,
            "origin_heals": self.convergence.heals,
            "rows_set_aside": self.convergence.rows_set_aside,
        }
        if self.reads is not None and self.replay is not None and self.pulse is not None:
            since_s = self.replay.behind_since_s
            known |= {
                "origin_operations": self.reads.calls.operations | self.replay.calls.operations,
                "origin_errors": self.reads.calls.errors | self.replay.calls.errors,
                "origin_latency": {
                    operation: histogram.snapshot()
                    for operation, histogram in (self.reads.calls.latency | self.replay.calls.latency).items()
                },
                "origin_dirty_subjects": len(self._engine.dirty),
                "origin_cells_merged": self.replay.cells_merged,
                "replay_lag_s": 0.0 if since_s is None else now_s - since_s,
                "clock_offset_ms": self.pulse.clock_offset_ms,
            }
        if self.publish is not None and self.importer is not None:
            known |= {
                "publish_rows": self.publish.rows_published,
                "publish_errors": sum(self.publish.calls.errors.values()),
                "import_rows": self.importer.rows_total,
                "import_rows_last": self.importer.rows_last,
                "import_errors": sum(self.importer.calls.errors.values()),
                "global_lag_ms": dict(self.importer.lag_ms),
                "regions": self._engine.regions,
            }
        return known
