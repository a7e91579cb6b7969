"""An event loop with virtual time: when nothing is ready, it jumps to the next timer.

It has no selector, no sockets and no threads. Callbacks run in the order in which they were scheduled, so a program
without other randomness runs the same way every time. A loop that would wait forever raises `LoopStalled`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["LoopStalled", "VirtualClock", "VirtualLoop", "owned_context", "recorded_errors"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# The simulated process that a task belongs to; several processes share one loop.
_OWNER: ContextVar[object] = ContextVar("owner", default=None)


def owned_context(owner: object) -> Context:
    """A context whose tasks, and the tasks they start, belong to `owner`."""
    context = copy_context()
    context.run(_OWNER.set, owner)
    return context


# More iterations than this without time passing mean an endless loop.
TURNS_MAX = 100_000


class LoopStalled(RuntimeError):
    """Virtual time cannot advance: every task waits without a timer, or some task never waits."""


class _TimeJump:
    """Takes the place of a selector: it moves the time forward instead of waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # Iterations of one run of the loop since time last moved.
        self.turns = 0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise LoopStalled("every task waits, and there is no timer")
        if timeout_s > 0:
            self.now_s += timeout_s
            self.turns = 0
        else:
            self.turns += 1
            if self.turns > TURNS_MAX:
                self.turns = 0
                raise LoopStalled("some task is always ready, so that time does not advance")
        return []

    def close(self) -> None:
        """Nothing to release."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A deterministic event loop in virtual time, which starts at 0.

    Simulated processes share it. Each can be paused, as by SIGSTOP: its callbacks are held while time goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._selector = _TimeJump()
        self._ready: Any
        # Callbacks of paused owners, in order; and the running tasks of every owner, in order of their start.
        self._held: dict[object, list[asyncio.Handle]] = {}
        self._owned: dict[object, dict[asyncio.Task[Any], None]] = {}
        # Timers this close together are due together; far below the microseconds of the simulation.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._selector.now_s

    def now_us(self) -> int:
        """Microseconds since the start, rounded: sums of floats must not lose a millisecond."""
        return round(self._selector.now_s * 1e6)

    def run_forever(self) -> None:
        # A caller that runs the loop repeatedly moves time itself, or sends many requests at one instant.
        self._selector.turns = 0
        super().run_forever()

    def advance_to(self, now_s: float) -> None:
        """Move the time forward, never back. Due timers run in the next iteration."""
        if now_s > self._selector.now_s:
            self._selector.now_s = now_s
            self._selector.turns = 0

    # -- simulated processes

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._held:
            owner = context.get(_OWNER) if context is not None else _OWNER.get()
            held = self._held.get(owner)
            if held is not None:
                handle = asyncio.Handle(callback, args, self, context)
                held.append(handle)
                return handle
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        owner = context.get(_OWNER) if context is not None else _OWNER.get()
        if owner is None:
            return super().call_at(when, callback, *args, context=context)
        timers: list[asyncio.TimerHandle] = []
        timer = super().call_at(when, self._run_timer, owner, timers, callback, args, context=context)
        timers.append(timer)
        return timer

    def _run_timer(
        self,
        owner: object,
        timers: list[asyncio.TimerHandle],
        callback: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        held = self._held.get(owner)
        if held is None:
            callback(*args)
        else:
            arguments = (timers[0], callback, args)
            held.append(asyncio.Handle(self._run_held, arguments, self, copy_context()))

    def _run_held(
        self, timer: asyncio.TimerHandle, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        # A callback that ran earlier after the pause may have cancelled the timer.
        if not timer.cancelled():
            callback(*args)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = super().create_task(coro, name=name, context=context)
        owner = context.get(_OWNER) if context is not None else _OWNER.get()
        if owner is not None:
            tasks = self._owned.setdefault(owner, {})
            tasks[task] = None
            task.add_done_callback(tasks.pop)
        return task

    def pause(self, owner: object) -> None:
        """Hold the callbacks of `owner` until it is resumed."""
        self._held.setdefault(owner, [])

    def resume(self, owner: object) -> None:
        self._ready.extend(self._held.pop(owner, ()))

    def kill(self, owner: object) -> None:
        """Cancel every task of `owner`, paused or not."""
        self.resume(owner)
        for task in list(self._owned.pop(owner, ())):
            task.cancel()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no I/O events."""

    def _write_to_self(self) -> None:
        """There is no selector to wake up."""


class VirtualClock:
    """The clock of a node: implements `Clock` with the time of a `VirtualLoop`, plus an offset and a drift.

    They change what the node reads, not its timers, which use the monotonic time of the loop, as on a real machine.
    """

    def __init__(self, loop: VirtualLoop, epoch_ms: int, *, offset_ms: int = 0, drift_ppm: int = 0) -> None:
        self._loop = loop
        self._epoch_ms = epoch_ms
        self.offset_ms = offset_ms
        self.drift_ppm = drift_ppm

    def now_ms(self) -> int:
        now_us = self._loop.now_us()
        drift_us = now_us * self.drift_ppm // 1_000_000
        return self._epoch_ms + self.offset_ms + (now_us + drift_us) // 1_000


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.getMessage())


@contextmanager
def recorded_errors() -> Iterator[list[str]]:
    """The errors that the library logs in this block; warnings are dropped, because faults cause many."""
    logger = logging.getLogger("tidegate")
    recorder = _Recorder()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(recorder)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield recorder.errors
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(level)
        logger.propagate = propagate
