"""A node on an event loop of its own, in one thread: what a `Limiter` with an origin or a ledger owns.

Any thread may call `call_soon`, `wait_for` and `read`, also while another one stops it: what comes too late is dropped,
and a decision that wanted to ask the origin is made without it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.running_time import result_within
from tidegate.core.freshness import Need
from tidegate.core.tickets import Ticket
from tidegate.errors import Closed
from tidegate.runtime.node import Node

__all__ = ["NodeThread"]

T = TypeVar("T")


class NodeThread:
    """`on_started` is called in the thread, with the error or None; requests wait at most `wait_s` for it."""

    def __init__(
        self, node: Node, on_started: Callable[[BaseException | None], object], wait_s: float
    ) -> None:
        self._node = node
        self._on_started = on_started
        self._start_by = Deadline.after(wait_s, time.monotonic())
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._flush_timeout_s: float | None = None
        self._can_decide: Future[None] = Future()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="tidegate", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        # The runner cancels what is still under way at the end, such as reads of callers.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        starting = asyncio.ensure_future(self._node.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        deciding = asyncio.ensure_future(self._node.can_decide.wait())
        await asyncio.wait([starting, stopping, deciding], return_when=asyncio.FIRST_COMPLETED)
        if deciding.done() and not starting.done():
            self._can_decide.set_result(None)
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        deciding.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        failure = Closed("stopped while it started") if starting.cancelled() else starting.exception()
        self._on_started(failure)
        for future in (self._can_decide, self._started):
            if future.done():
                continue
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
        if failure is None:
            await stopping
        else:
            stopping.cancel()
        if failure is None or starting.cancelled():
            await self._node.stop(self._flush_timeout_s)

    def wait_started(self) -> None:
        """Wait for the start and raise what it raised."""
        self._started.result()

    def wait_can_decide(self) -> None:
        """Wait until the origin was opened or could not be; raise the error of a start that failed by then."""
        wait([self._can_decide], self._start_by.remaining(time.monotonic()))
        if self._can_decide.done():
            self._can_decide.result()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call it on the node's loop; from any thread."""
        with suppress(RuntimeError):  # closed: the limiter was stopped at the same moment
            self._loop.call_soon_threadsafe(callback)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Do it on the node's loop; None if that is closed: the limiter was stopped at the same moment."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            return None

    def wait_for(self, ticket: Ticket, timeout_s: float) -> None:
        """Let the ticket wait on the node's loop, and wait for its decision; not longer than `timeout_s`."""
        assert self._node.exchanges is not None
        future = self._submit(self._node.exchanges.wait(ticket))
        if future is not None:
            with suppress(TimeoutError, CancelledError):
                result_within(future, timeout_s)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the node's loop, and wait for its result. It ends in time by itself."""
        future = self._submit(work)
        if future is not None:
            with suppress(CancelledError):
                return future.result()
        raise Closed("this limiter was stopped; make a new one")

    def read(self, needs: list[Need], timeout_s: float) -> bool:
        """Read on the node's loop and wait for it; False when the decision must be made without it."""
        assert self._node.reads is not None
        future = self._submit(self._node.reads.fetch(needs))
        if future is not None:
            with suppress(TimeoutError, CancelledError):
                return result_within(future, timeout_s)
        return False

    def stop(self, timeout_s: float | None) -> None:
        """Flush within a deadline, and end the thread."""
        self._flush_timeout_s = timeout_s
        with suppress(RuntimeError):  # closed: it never started
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
