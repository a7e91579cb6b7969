"""A node: one engine, the loops that exchange its counts with origin and ledger, and their start and stop.

    NEW ──▶ STARTING ──▶ RUNNING ──▶ STOPPING ──▶ STOPPED
     ▲          │  └────────┴──▶ LOST                       the event loop was closed without a `stop`
     └──────────┴▶ STOPPING                                 the start failed, and what it began was ended

Asynchronous, on the event loop it is started on. It is the same for both drivers: `AsyncLimiter` runs it on the
caller's loop, `Limiter` on a loop in a thread of its own. Every task is owned here and ends with `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from random import Random
from types import MappingProxyType
from typing import Final

from tidegate.adapters.backoff import Backoff
from tidegate.core.credit_sync import CreditSync
from tidegate.core.engine import Engine
from tidegate.core.gate import CLOSED, Gate
from tidegate.core.generations import cell_name
from tidegate.core.ledger_sync import LedgerSync
from tidegate.core.model import LedgerRow, Tuning, subject_digest
from tidegate.core.origin_sync import OriginSync
from tidegate.core.sharing import OriginUsage
from tidegate.core.sweep import Sweep
from tidegate.errors import CircuitOpen, Closed, ConfigurationError, DependencyError
from tidegate.ports import Ledger, Origin
from tidegate.runtime.breaker import Breaker
from tidegate.runtime.calls import ADAPTER_SHARE, Calls
from tidegate.runtime.exchange import Exchanges
from tidegate.runtime.import_lease import ImportLease
from tidegate.runtime.importer import ImportLoop
from tidegate.runtime.loops import loop_backoff
from tidegate.runtime.publish import PublishLoop
from tidegate.runtime.pulse import PulseLoop
from tidegate.runtime.reads import Reads
from tidegate.runtime.replay import ReplayLoop
from tidegate.runtime.reserving import Reserving
from tidegate.runtime.resets import ResetLoop
from tidegate.runtime.stalls import StallMonitor
from tidegate.runtime.states import StateMachine
from tidegate.runtime.statistics import Health

__all__ = ["Node"]

logger: Final = logging.getLogger(__name__)

BREAKER_NUMBERS = {"closed": 0, "half_open": 1, "open": 2}

# Expired subjects dropped between two turns of the event loop, about 0.2 ms, and how often.
EXPIRE_SLICE: Final = 200
EXPIRE_INTERVAL_S: Final = 1.0
# Longest wait of a start for the ledger: a few round trips around the world. One that is slower is opened later.
OPEN_LEDGER_S: Final = 3.0


class NodeState(Enum):
    """The state of a node."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    LOST = "lost"
    STOPPING = "stopping"
    STOPPED = "stopped"


TRANSITIONS: Final = MappingProxyType(
    {
        NodeState.NEW: {NodeState.STARTING, NodeState.RUNNING, NodeState.STOPPING},
        NodeState.STARTING: {NodeState.RUNNING, NodeState.LOST, NodeState.STOPPING},
        NodeState.RUNNING: {NodeState.LOST, NodeState.STOPPING},
        NodeState.LOST: {NodeState.STOPPING},
        NodeState.STOPPING: {NodeState.NEW, NodeState.STOPPED},
        NodeState.STOPPED: set(),
    }
)


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
        self._random = random
        self._region = region
        self._origin = origin
        self._ledger = ledger
        self._on_loop_closed = on_loop_closed
        self._life = StateMachine(NodeState.NEW, TRANSITIONS)
        self._tasks: list[asyncio.Task[None]] = []
        # Why the ledger cannot be used; None once it was opened.
        self._ledger_problem: str | None = "not opened yet"
        # Why a loop has ended by itself, which none does.
        self._fault: BaseException | None = None
        # Set when requests need not wait for the start any longer: the origin was opened, or could not be.
        self.can_decide: Final[asyncio.Event] = asyncio.Event()
        self.sweep: Final[Sweep] = Sweep(
            engine.subjects, engine.pending, engine.global_view, has_credit=engine.has_credit
        )
        self.origin_sync: Final[OriginSync] = OriginSync(engine, self.sweep, tuning)
        self.ledger_sync: Final[LedgerSync] = LedgerSync(engine, self.sweep, tuning, region)
        self.stalls: StallMonitor = StallMonitor()
        # With credit `exchanges` does the work of `reads` and `replay`.
        self.exchanges: Exchanges | None = None
        self.reserving: Reserving | None = None
        self.reads: Reads | None = None
        self.replay: ReplayLoop | None = None
        self.pulse: PulseLoop | None = None
        self.publish: PublishLoop | None = None
        self.importer: ImportLoop | None = None
        # Only with credit: its messages carry what other regions have counted, and its answers who publishes.
        self.import_lease: ImportLease | None = None
        if origin is not None:
            self.reserving = Reserving(
                origin, gate, engine, tuning, is_usable=self._is_origin_usable, on_work=self.wake
            )
        self._publish_calls = Calls("ledger_publish", tuning, self._is_ledger_usable)
        self.resets: Final[ResetLoop] = ResetLoop(
            engine,
            gate,
            region,
            origin=origin,
            origin_calls=None if self.reserving is None else self.reserving.calls,
            ledger=ledger,
            ledger_calls=self._publish_calls,
            is_importer=self._is_importer,
            on_work=self.wake,
        )
        if origin is not None:
            self._make_origin_loops(origin)
        if ledger is not None:
            self._make_ledger_loops(ledger)

    def _make_origin_loops(self, origin: Origin) -> None:
        gate, sync, tuning = self._gate, self.origin_sync, self._tuning
        if self._engine.has_credit:
            exchanges = Exchanges(
                origin,
                gate,
                CreditSync(self._engine, sync, self.ledger_sync, tuning, origin.rules),
                self.sweep,
                tuning,
                self._random,
                is_usable=self._is_origin_usable,
                on_work=self.wake,
            )
            self.exchanges = exchanges
            retry_now = exchanges.retry_now
        else:
            replay = ReplayLoop(origin, gate, sync, tuning, self._backoff(), is_usable=self._is_origin_usable)
            self.replay = replay
            self.reads = Reads(
                origin, gate, sync, tuning, is_usable=self._is_origin_usable, on_work=self.wake
            )
            retry_now = replay.retry_now
        self.pulse = PulseLoop(
            origin,
            self._region,
            gate,
            self.sweep,
            tuning,
            on_wiped=self.wake,
            on_recovered=retry_now,
            on_resets=self.resets.on_pulse,
        )

    def _make_ledger_loops(self, ledger: Ledger) -> None:
        gate, sync, tuning, random = self._gate, self.ledger_sync, self._tuning, self._random
        if self._origin is not None and self._engine.has_credit:
            self.import_lease = ImportLease(
                self._origin,
                self._engine.node_id,
                gate,
                sync,
                self.sweep,
                tuning,
                random,
                is_usable=self._is_origin_usable,
                can_import=self._is_ledger_usable,
                can_publish=self._can_publish,
                on_change=self._on_import_lease_change,
            )
        importer = ImportLoop(
            ledger,
            self._region,
            gate,
            sync,
            tuning,
            random,
            self.import_lease,
            on_due=self._entrust,
            on_resets=self.resets.on_import,
            on_full=self.resets.on_full_import,
            has_unsent_resets=self.resets.has_unsent_to_origin,
        )
        self.importer = importer
        self.publish = PublishLoop(
            ledger,
            gate,
            sync,
            tuning,
            random,
            calls=self._publish_calls,
            on_published=importer.import_soon,
            import_lease=self.import_lease,
        )

    def _backoff(self) -> Backoff:
        return loop_backoff(self._tuning, self._random)

    def _is_origin_usable(self) -> bool:
        return self.pulse is not None and self.pulse.is_ours

    def _is_ledger_usable(self) -> bool:
        return self._ledger_problem is None

    def _entrust(self, rows: Sequence[tuple[LedgerRow, int]]) -> None:
        if self.publish is not None:
            self.publish.entrust(rows)

    def _is_importer(self) -> bool:
        return self.import_lease is not None and self.import_lease.is_holder

    def _can_publish(self) -> bool:
        return self._is_ledger_usable() and self.publish is not None and not self.publish.calls.is_failing

    def _on_import_lease_change(self) -> None:
        if self._is_importer():
            self.resets.on_importer()
        if self.importer is not None:
            self.importer.import_soon()
        if self.publish is not None:
            self.publish.press()

    # -- start and stop

    async def _open_origin(self) -> None:
        if self._origin is None or self.pulse is None:
            return
        timeout_s = self._tuning.replay_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._origin.open(self._region, timeout_s=timeout_s * ADAPTER_SHARE)
            self.pulse.confirm()
        except (DependencyError, TimeoutError) as error:
            logger.warning("the origin is not reachable, decisions are local: %s", error)

    async def _open_ledger(self) -> None:
        if self._ledger is None:
            return
        timeout_s = min(OPEN_LEDGER_S, self._tuning.ledger_timeout_ms / 1000)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ledger.open(timeout_s=timeout_s * ADAPTER_SHARE)
            self._ledger_problem = None
        except (DependencyError, TimeoutError) as error:
            self._ledger_problem = str(error) or "no answer in time"
            logger.warning("the ledger is not reachable, counts of regions drift apart: %s", error)

    async def start(self) -> None:
        """Open both dependencies, at the same time, and start the loops.

        What can never work is raised, and nothing keeps running; what is down or slow is opened later.
        """
        self._life.move(NodeState.STARTING)
        openings = [self._start_origin(), self._start_ledger()]
        for problem in await asyncio.gather(*openings, return_exceptions=True):
            if problem is not None:
                self._life.move(NodeState.STOPPING)
                await self._end_loops()
                await self._close()
                self._life.move(NodeState.NEW)
                raise problem
        self._spawn(self.stalls.run())
        self._spawn(self.resets.run())
        self._spawn(self._expire())
        self._life.move(NodeState.RUNNING)

    def assume_open(self) -> None:
        """Instead of `start`: both dependencies count as open, and no loop runs by itself."""
        if self.pulse is not None:
            self.pulse.confirm()
        self._ledger_problem = None
        self.can_decide.set()
        self._life.move(NodeState.RUNNING)

    async def _start_origin(self) -> None:
        try:
            await self._open_origin()
            if self.replay is not None:
                self._spawn(self.replay.run())
            if self.exchanges is not None and self._origin is not None:
                self._spawn(self.exchanges.run())
                self._spawn(self._origin.listen(self._engine.node_id, self.exchanges.on_recall))
            if self.reserving is not None:
                self._spawn(self.reserving.run())
            if self.pulse is not None:
                self._spawn(self.pulse.run())
                await self.resets.run_once()
        finally:
            self.can_decide.set()

    async def _start_ledger(self) -> None:
        await self._open_ledger()
        if self.import_lease is not None:
            self._spawn(self.import_lease.run())
        if self.publish is not None and self.importer is not None:
            self._spawn(self.publish.run())
            self._spawn(self._open_and_import())

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if self._life.state in (NodeState.STARTING, NodeState.RUNNING):
                self._life.move(NodeState.LOST)
                self._on_loop_closed()
        elif (error := task.exception()) is not None:
            # Failures of dependencies are handled in the loops: this is a fault of ours.
            self._fault = error
            logger.error("a background loop ended with an unexpected error: %r", error, exc_info=error)

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the loops and flush the last counts within the deadline. True if all of them were acknowledged."""
        self._life.move(NodeState.STOPPING)
        flush_s = self._tuning.flush_timeout_ms / 1000 if timeout_s is None else timeout_s
        await self._end_loops()
        try:
            async with asyncio.timeout(flush_s):
                if self.reserving is not None:
                    with suppress(DependencyError):
                        await self.reserving.run_once(is_last=True)
                # Requests that wait for the origin are decided now, and flushed with the others.
                if self.reads is not None:
                    await self.reads.close()
                if self.exchanges is not None:
                    await self.exchanges.close()
                if self.resets.has_unsent:
                    await self.resets.run_once()
                if self.import_lease is not None:
                    await self.import_lease.release()
                flushed = await self._flush()
        except TimeoutError:
            flushed = False
        finally:
            with suppress(Closed), self._gate:
                self._gate.resting = CLOSED
            await self._close()
            self._life.move(NodeState.STOPPED)
        if not flushed:
            logger.warning("stopped too early: %s", self._unsent())
        return flushed

    def _unsent(self) -> str:
        """What the origin and the ledger did not get."""
        parts: list[str] = []
        if self._origin is not None:
            counts = [
                sum(
                    max(0, cell.own - cell.origin.acked)
                    for cell in subject.cells()
                    if cell.origin is not None
                )
                for subject in self._engine.pending.dirty
                if subject.table >= 0 and subject.is_unreplayed()
            ]
            if counts or self.exchanges is None:
                parts.append(f"{sum(counts)} counts of {len(counts)} subjects did not reach the origin")
            if self.exchanges is not None:
                parts.append("credit was not given back, and can be used by other nodes in a few seconds")
        if self._ledger is not None:
            changed = sum(subject.table >= 0 for subject in self._engine.pending.changed)
            parts.append(f"{changed} subjects that changed were not published")
        return ", ".join(parts)

    async def _end_loops(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _close(self) -> None:
        if self.reads is not None:
            await self.reads.close()
        if self.exchanges is not None:
            await self.exchanges.close()
        if self._origin is not None:
            await self._origin.close()
        if self._ledger is not None:
            await self._ledger.close()

    async def _flush(self) -> bool:
        """Send what is left, and close the gate in the same step that finds nothing more: every count that was
        allowed is sent, and every later request is refused."""
        while True:
            # At the same time: an origin that hangs must not use up the ledger's time.
            flushed = all(await asyncio.gather(self._flush_origin(), self._flush_ledger()))
            if flushed and self._engine.pending.due:
                # The last counts made this node responsible for some rows.
                flushed = await self._flush_ledger()
            with self._gate:
                if not flushed or not self._engine.pending.dirty:
                    self._gate.resting = CLOSED
                    return flushed

    async def _flush_origin(self) -> bool:
        """Send what is left; again after a failure, until the deadline or until the breaker opens."""
        if self.replay is None and self.exchanges is None:
            return True
        backoff = self._backoff()
        while True:
            try:
                if self.exchanges is not None:
                    await self.exchanges.flush()
                elif self.replay is not None:
                    await self.replay.run_once()
            except CircuitOpen as error:
                logger.warning("the last counts did not reach the origin: %s", error)
                return False
            except DependencyError:
                await asyncio.sleep(backoff.pause_s())
            else:
                return True

    async def _flush_ledger(self) -> bool:
        """Publish what is left. A ledger that could not be opened gets nothing: False if something waits for it."""
        if self.publish is None:
            return True
        if not self._is_ledger_usable():
            pending = self._engine.pending
            return not any(subject.table >= 0 for subject in [*pending.changed, *pending.due])
        return (await self.publish.run_once()).ok

    # -- questions

    async def usage(self, key: tuple[str, str, int], identifier: str, at_ms: int) -> OriginUsage | None:
        """What the origin knows of a counter beyond its messages; None if it does not answer."""
        if self._origin is None or not self._is_origin_usable():
            return None
        workspace, namespace, duration_ms = key
        with self._gate:
            generation = self._engine.resets.generation_of(key, identifier)
        digest = subject_digest(workspace, namespace, identifier, duration_ms)
        name = cell_name(at_ms // duration_ms, generation, duration_ms)
        timeout_s = self._tuning.read_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                return await self._origin.usage(digest, name, timeout_s=timeout_s * ADAPTER_SHARE)
        except (DependencyError, TimeoutError):
            return None

    # -- background

    def wake(self) -> None:
        """There is work for the loops. Cheap; call it on the node's own event loop."""
        self._engine.pending.is_urgent = False
        if self.exchanges is not None:
            self.exchanges.wake()
        if self.replay is not None and not self.replay.is_reporting:
            self.replay.wake()
        if self.publish is not None and (self._engine.pending.pressed or self._engine.pending.due):
            self.publish.press()

    @property
    def is_awake(self) -> bool:
        """The loops will see new work by themselves."""
        pending = self._engine.pending
        return (
            (self.replay is None or self.replay.is_reporting)
            and (self.exchanges is None or self.exchanges.is_awake)
            and not pending.pressed
        )

    async def _open_and_import(self) -> None:
        """Open the ledger unless that is done, then import until cancelled."""
        assert self._ledger is not None and self.importer is not None
        backoff = self._backoff()
        while self._ledger_problem is not None:
            await asyncio.sleep(backoff.pause_s())
            try:
                await self._ledger.open(timeout_s=self._tuning.ledger_timeout_ms / 1000)
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
                if self.exchanges is not None and self.exchanges.expire(EXPIRE_SLICE):
                    more = True
                await asyncio.sleep(0)
            await asyncio.sleep(EXPIRE_INTERVAL_S)

    # -- reports

    def _breakers(self) -> list[Breaker]:
        parts = (
            self.exchanges,
            self.reserving,
            self.reads,
            self.replay,
            self.import_lease,
            self.publish,
            self.importer,
        )
        return [part.calls.breaker for part in parts if part is not None]

    def health(self, now_s: float) -> list[Health]:
        """One line per dependency, and one for a fault of ours. Decisions continue in any case."""
        found: list[Health] = []
        if self.pulse is not None:
            found.append(Health("origin", self.pulse.is_alive and self.pulse.is_ours, self._origin_detail()))
        carrier = self.exchanges or self.replay
        if carrier is not None:
            # The origin may answer and still take no counts: its memory or its disk is full.
            failing = carrier.is_failing
            detail = f"wait in memory: {carrier.calls.last_error}" if failing else "arrive at the origin"
            found.append(Health("counts", not failing, detail))
        if self.importer is not None:
            ok = self._is_ledger_usable() and not self.importer.calls.is_failing
            detail = "reachable" if ok else self._ledger_problem or self.importer.calls.last_error or ""
            found.append(Health("ledger", ok, detail))
        for breaker in self._breakers():
            state = breaker.state(now_s)
            found.append(Health(f"breaker {breaker.name}", state != "open", state))
        if self._fault is not None:
            detail = f"one ended with {self._fault!r}; restart the process, and report this"
            found.append(Health("background loops", False, detail))
        return found

    def _origin_detail(self) -> str:
        assert self.pulse is not None
        if self.pulse.foreign_region is not None:
            return f"belongs to region {self.pulse.foreign_region!r}"
        if not self.pulse.is_alive:
            return self.pulse.last_error or "not opened yet"
        return f"reachable, clock offset {self.pulse.clock_offset_ms} ms"

    def statistics(self, now_s: float) -> dict[str, object]:
        """The fields of `Statistics` about the loops."""
        known: dict[str, object] = {
            "breaker_states": {b.name: BREAKER_NUMBERS[b.state(now_s)] for b in self._breakers()},
            "loop_stall": self.stalls.histogram.snapshot(),
            "cells_created_by_import": self.ledger_sync.cells_imported,
            "origin_heals": self.sweep.heals,
            "rows_set_aside": self.ledger_sync.rows_set_aside,
        }
        if self.pulse is not None:
            known["clock_offset_ms"] = self.pulse.clock_offset_ms
        if self.reads is not None and self.replay is not None:
            known |= self.replay.statistics(now_s, self.reads.calls)
            known["origin_cells_merged"] = self.replay.cells_merged
        if self.exchanges is not None:
            known |= self.exchanges.statistics(now_s)
        if self.publish is not None and self.importer is not None:
            known |= {
                "publish_rows": self.publish.rows_published,
                "publish_errors": self.publish.calls.failures("publish"),
                "import_rows": self.importer.rows_total,
                "import_rows_last": self.importer.rows_last,
                "import_rows_unreadable": self.importer.rows_unreadable,
                "import_errors": self.importer.calls.failures("import"),
                "global_lag_ms": dict(self.importer.lag_ms),
                "regions": self._engine.global_view.regions,
                "heartbeat_age_ms": self.importer.heartbeat_age_ms(now_s),
            }
        if self.import_lease is not None:
            known |= self.import_lease.statistics(now_s)
        return known
