"""Calls to one dependency: admitted by its breaker, timed, and counted by operation and outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tidegate.core.model import Tuning
from tidegate.errors import CircuitOpen, DependencyError, DependencyTimeout, RowsRejected
from tidegate.runtime.breaker import Breaker
from tidegate.runtime.latency import Histogram

__all__ = ["Calls", "reason_of"]

T = TypeVar("T")


def reason_of(error: DependencyError) -> str:
    """timeout, circuit_open or other: the label of an error in the metrics."""
    if isinstance(error, DependencyTimeout):
        return "timeout"
    return "circuit_open" if isinstance(error, CircuitOpen) else "other"


class Calls:
    """The way to one side of a dependency (its reads, its replays, …)."""

    def __init__(self, name: str, tuning: Tuning) -> None:
        self.breaker = Breaker(name, tuning)
        # False while the dependency must not be used at all: not reached yet, or not ours.
        self.is_usable: Callable[[], bool] = lambda: True
        # Made calls, and failed or refused ones by (operation, reason).
        self.operations: dict[str, int] = {}
        self.errors: dict[tuple[str, str], int] = {}
        self.latency: dict[str, Histogram] = {}
        # For people: what went wrong last.
        self.last_error: str | None = None

    async def through(
        self, operations: Sequence[str], call: Callable[[], Awaitable[T]], timeout_s: float
    ) -> T:
        """Make one call that serves these operations. Raises a `DependencyError`, `CircuitOpen` without trying.

        Adapters keep their time limit themselves; the one here is for an adapter that does not.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if not self.is_usable() or not self.breaker.admit(started_s):
            error = CircuitOpen(f"{self.breaker.name} is not tried now")
            self._failed(operations, error)
            raise error
        for operation in operations:
            self.operations[operation] = self.operations.get(operation, 0) + 1
        try:
            async with asyncio.timeout(timeout_s * 1.1):
                answer = await call()
        except RowsRejected as error:
            # The dependency is well: it looked at the rows and said no.
            self.breaker.record(True, loop.time())
            self._failed(operations, error)
            raise
        except DependencyError as error:
            self.breaker.record(False, loop.time())
            self._failed(operations, error)
            raise
        except TimeoutError as error:
            self.breaker.record(False, loop.time())
            late = DependencyTimeout(f"{self.breaker.name}: no answer within {timeout_s:g} s")
            self._failed(operations, late)
            raise late from error
        except BaseException:
            self.breaker.release()
            raise
        finished_s = loop.time()
        self.breaker.record(True, finished_s)
        for operation in operations:
            self.latency.setdefault(operation, Histogram()).observe(finished_s - started_s)
        return answer

    def _failed(self, operations: Sequence[str], error: DependencyError) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        for operation in operations:
            key = (operation, reason_of(error))
            self.errors[key] = self.errors.get(key, 0) + 1
