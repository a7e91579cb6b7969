"""Calls to one dependency: admitted by its breaker, timed, and counted by operation and outcome.

Whatever an adapter does, the caller gets an answer or a `DependencyError`, no later than the time allowed: an
unexpected exception of a driver must not end a loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

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


def reason_of(error: DependencyError) -> str:
    """timeout, circuit_open or other: the label of an error in the metrics."""
    if isinstance(error, DependencyTimeout):
        return "timeout"
    return "circuit_open" if isinstance(error, CircuitOpen) else "other"


def _always() -> bool:
    return True


class Calls:
    """Calls of one kind to a dependency (reads, replays, …)."""

    def __init__(self, name: str, tuning: Tuning, is_usable: Callable[[], bool] = _always) -> None:
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
        for operation in operations:
            self.operations[operation] = self.operations.get(operation, 0) + 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await function(timeout_s * ADAPTER_SHARE)
        except RowsRejected as error:
            # The dependency works: it read the rows and refused them.
            self.breaker.record(ticket, True, loop.time())
            self._failed(operations, error)
            self.is_failing = False
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
        finally:
            # Failed calls too: the time that was lost to them is what an operator looks for.
            for operation in operations:
                self.latency.setdefault(operation, Histogram()).observe(loop.time() - started_s)
        self.breaker.record(ticket, True, loop.time())
        self.is_failing = False
        return answer

    def _failed(self, operations: Sequence[str], error: DependencyError) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        self.is_failing = True
        for operation in operations:
            key = (operation, reason_of(error))
            self.errors[key] = self.errors.get(key, 0) + 1
