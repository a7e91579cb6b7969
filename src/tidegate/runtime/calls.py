"""Calls to one dependency: admitted by its breaker, timed, and counted by operation and outcome.

Whatever an adapter does, the caller gets an answer or a `DependencyError`, no later than the time allowed, by the time
in which this process runs: an unexpected exception of a driver must not end a loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from tidegate.adapters.running_time import RunningTimeout
from tidegate.core.model import Tuning
from tidegate.errors import (
    CircuitOpen,
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    RowsRejected,
)
from tidegate.runtime.breaker import Breaker
from tidegate.runtime.latency import Histogram

__all__ = ["ADAPTER_SHARE", "Calls", "reason_of"]

logger: Final = logging.getLogger(__name__)

T = TypeVar("T")

# Adapters keep their time limit by themselves, and get a little less than the caller waits: when they run out of time
# they must be able to drop a dead connection before they are cancelled.
ADAPTER_SHARE: Final = 0.95

# A dependency that fails now and then would fill the log.
LOG_INTERVAL_S: Final = 10.0


def reason_of(error: DependencyError) -> str:
    """timeout, circuit_open, rejected or other: the label of an error in the metrics."""
    if isinstance(error, DependencyTimeout):
        return "timeout"
    if isinstance(error, RowsRejected):
        return "rejected"
    return "circuit_open" if isinstance(error, CircuitOpen) else "other"


def _always() -> bool:
    return True


class Calls:
    """Calls of one kind to a dependency (reads, replays, …)."""

    def __init__(
        self, name: str, tuning: Tuning, is_usable: Callable[[], bool] = _always, *, carries: str = ""
    ) -> None:
        """`carries`: what does not arrive while calls fail, for a log line at each change."""
        self.breaker: Final[Breaker] = Breaker(name, tuning)
        # False while the dependency must not be called at all: not opened yet, or that of another region.
        self.is_usable = is_usable
        # Made calls, and failed or refused ones by (operation, reason).
        self.operations: dict[str, int] = {}
        self.errors: dict[tuple[str, str], int] = {}
        self.latency: dict[str, Histogram] = {}
        # The last error, for health reports.
        self.last_error: str | None = None
        # Whether the last call got no answer. A breaker opens after 20 calls in 10 s, which a quiet node never makes.
        self.is_failing: bool = False
        self._carries = carries
        # What the log says, and when that was written: at most two lines in `LOG_INTERVAL_S`, however fast it changes.
        self._is_logged_failing = False
        self._logged_at_s = float("-inf")

    async def call(
        self, operations: Sequence[str], function: Callable[[float], Awaitable[T]], timeout_s: float
    ) -> T:
        """Make one call that serves these operations; it is given the seconds that the adapter has.

        Raises a `DependencyError`, `CircuitOpen` without trying.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        ticket = self.breaker.admit(started_s) if self.is_usable() else 0
        if not ticket:
            error = CircuitOpen(
                f"{self.breaker.name} is not called now: its breaker is open, or it has not been opened yet"
            )
            self._failed(operations, error)
            raise error
        # A read of hundreds of subjects names one operation for each.
        counts = Counter(operations)
        for operation, times in counts.items():
            self.operations[operation] = self.operations.get(operation, 0) + times
        try:
            async with RunningTimeout(timeout_s):
                answer = await function(timeout_s * ADAPTER_SHARE)
        except RowsRejected as error:
            # The dependency works: it read the rows and refused them.
            self.breaker.record(ticket, True, loop.time())
            self._failed(operations, error)
            self.is_failing = False
            self._log_change()
            raise
        except DependencyError as error:
            self.breaker.record(ticket, False, loop.time())
            self._failed(operations, error)
            raise
        except TimeoutError as error:
            self.breaker.record(ticket, False, loop.time())
            late = DependencyTimeout(f"{self.breaker.name}: no answer within {timeout_s:g} s")
            self._failed(operations, late)
            raise late from error
        except Exception as error:
            # The port forbids it: a fault of the adapter, not of its dependency.
            logger.exception("%s: the adapter raised an unexpected error", self.breaker.name)
            self.breaker.record(ticket, False, loop.time())
            fault = DependencyUnavailable(f"{self.breaker.name}: {type(error).__name__}: {error}")
            self._failed(operations, fault)
            raise fault from error
        except BaseException:
            self.breaker.release(ticket)
            raise
        took_s = loop.time() - started_s
        for operation, times in counts.items():
            self.latency.setdefault(operation, Histogram()).observe(took_s, times)
        self.breaker.record(ticket, True, loop.time())
        if self.is_failing or self._is_logged_failing:
            self.is_failing = False
            self._log_change()
        return answer

    def failures(self, operation: str) -> int:
        """Calls of this operation that were made and got no answer: not those that a breaker prevented, and not
        those in which rows were rejected."""
        return sum(
            count
            for (name, reason), count in self.errors.items()
            if name == operation and reason not in ("circuit_open", "rejected")
        )

    def _log_change(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._carries or self.is_failing == self._is_logged_failing:
            return
        if now_s - self._logged_at_s < LOG_INTERVAL_S and self.is_failing:
            return
        self._is_logged_failing = self.is_failing
        self._logged_at_s = now_s
        if self.is_failing:
            logger.warning("%s do not arrive and wait in memory: %s", self._carries, self.last_error)
        else:
            logger.info("%s arrive again", self._carries)

    def _failed(self, operations: Sequence[str], error: DependencyError) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        self.is_failing = True
        self._log_change()
        for operation in operations:
            key = (operation, reason_of(error))
            self.errors[key] = self.errors.get(key, 0) + 1
