"""Wrappers of origins and ledgers that inject faults, and wrappers that record calls.

`FailingOrigin` and `FailingLedger` wrap a real adapter and let chosen operations fail; `TrackingOrigin` and
`TrackingLedger` change nothing and record every call. They implement the ports, so they can be nested. A fault stays
until `heal`, or for a given number of calls.

    origin = TrackingOrigin(FailingOrigin(MemoryOrigin()))
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Generic, NamedTuple, TypeVar

from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import DependencyTimeout, DependencyUnavailable
from tidegate.ports import Changes, Ledger, LedgerOverview, Origin, Pulse, RegionBeat

__all__ = [
    "Call",
    "FailingLedger",
    "FailingOrigin",
    "FaultPlan",
    "TrackingLedger",
    "TrackingOrigin",
]

T = TypeVar("T")
Port = TypeVar("Port", bound="Origin | Ledger")

ORIGIN_OPERATIONS: Final = (
    "open",
    "read",
    "merge",
    "exchange",
    "share",
    "usage",
    "claim",
    "resets",
    "lease",
    "pulse",
)
LEDGER_OPERATIONS: Final = ("open", "publish", "changes", "heartbeat", "cleanup", "overview")


class _Fault:
    """What happens to the next calls of one operation."""

    def __init__(self, kind: str, error: Exception | None, times: int | None) -> None:
        self.kind = kind
        self.error = error
        self.times_left = times
        self.released = asyncio.Event()


class FaultPlan:
    """Which operations fail, and how. Without `operations`, a method applies to all of them."""

    def __init__(self, operations: Sequence[str]) -> None:
        self._operations = operations
        self._faults: dict[str, _Fault] = {}
        self.fired: Counter[str] = Counter()
        """How often a fault happened, by operation. Check it: a test without a fault proves nothing."""

    def fail(self, *operations: str, error: Exception | None = None, times: int | None = None) -> None:
        """Raise `error`, or `DependencyUnavailable`, without calling the adapter."""
        self._set(operations, "fail", error, times)

    def lose_answers(self, *operations: str, times: int | None = None) -> None:
        """Call the adapter, then raise `DependencyTimeout`: the call is applied, but its reply is lost."""
        self._set(operations, "lose", None, times)

    def hang(self, *operations: str, times: int | None = None) -> None:
        """Block until `heal`, ignoring the timeout; then call the adapter."""
        self._set(operations, "hang", None, times)

    def heal(self, *operations: str) -> None:
        """Remove faults; blocked calls continue."""
        for operation in operations or self._operations:
            fault = self._faults.pop(operation, None)
            if fault is not None:
                fault.released.set()

    def _set(self, operations: Sequence[str], kind: str, error: Exception | None, times: int | None) -> None:
        for operation in operations or self._operations:
            if operation not in self._operations:
                raise ValueError(f"unknown operation {operation!r}: use one of {', '.join(self._operations)}")
            self._faults[operation] = _Fault(kind, error, times)

    async def around(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call the adapter, with the fault of this operation."""
        fault = self._faults.get(operation)
        if fault is None:
            return await call()
        self.fired[operation] += 1
        if fault.times_left is not None:
            fault.times_left -= 1
            if fault.times_left <= 0:
                del self._faults[operation]
        if fault.kind == "fail":
            raise fault.error or DependencyUnavailable(f"{operation}: injected failure")
        if fault.kind == "lose":
            await call()
            raise DependencyTimeout(f"{operation}: injected loss of the reply")
        await fault.released.wait()
        return await call()


class FailingOrigin:
    """Wraps an origin; set faults through `faults`."""

    def __init__(self, inner: Origin) -> None:
        self.inner = inner
        self.faults: FaultPlan = FaultPlan(ORIGIN_OPERATIONS)

    async def open(self, region: str, *, timeout_s: float) -> None:
        await self.faults.around("open", lambda: self.inner.open(region, timeout_s=timeout_s))

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        return await self.faults.around("read", lambda: self.inner.read(wanted, timeout_s=timeout_s))

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        return await self.faults.around("merge", lambda: self.inner.merge(components, timeout_s=timeout_s))

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        return await self.faults.around(
            "exchange", lambda: self.inner.exchange(requests, timeout_s=timeout_s)
        )

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        return await self.faults.around("share", lambda: self.inner.share(shares, timeout_s=timeout_s))

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        return await self.faults.around(
            "usage", lambda: self.inner.usage(digest, sequence, timeout_s=timeout_s)
        )

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        return await self.faults.around("claim", lambda: self.inner.claim(claims, timeout_s=timeout_s))

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        return await self.faults.around(
            "resets", lambda: self.inner.resets(known, since=since, timeout_s=timeout_s)
        )

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        return await self.faults.around(
            "lease",
            lambda: self.inner.lease(
                node_id, life_ms=life_ms, state=state, has_lost=has_lost, timeout_s=timeout_s
            ),
        )

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        await self.inner.listen(node_id, on_recall)

    @property
    def can_be_recalled(self) -> bool:
        return self.inner.can_be_recalled

    @property
    def rules(self) -> GrantRules:
        return self.inner.rules

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        return await self.faults.around("pulse", lambda: self.inner.pulse(region, timeout_s=timeout_s))

    async def close(self) -> None:
        await self.inner.close()

    def statistics(self) -> Mapping[str, int]:
        return self.inner.statistics()


class FailingLedger:
    """Wraps a ledger; set faults through `faults`."""

    def __init__(self, inner: Ledger) -> None:
        self.inner = inner
        self.faults: FaultPlan = FaultPlan(LEDGER_OPERATIONS)

    async def open(self, *, timeout_s: float) -> None:
        await self.faults.around("open", lambda: self.inner.open(timeout_s=timeout_s))

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        await self.faults.around("publish", lambda: self.inner.publish(rows, timeout_s=timeout_s))

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        return await self.faults.around(
            "changes", lambda: self.inner.changes(cursor, now_ms=now_ms, timeout_s=timeout_s)
        )

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        return await self.faults.around(
            "heartbeat", lambda: self.inner.heartbeat(region, timeout_s=timeout_s)
        )

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        return await self.faults.around(
            "cleanup", lambda: self.inner.cleanup(cutoff_ms, rows_max=rows_max, timeout_s=timeout_s)
        )

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        return await self.faults.around(
            "overview",
            lambda: self.inner.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s),
        )

    async def close(self) -> None:
        await self.inner.close()

    def statistics(self) -> Mapping[str, int]:
        return self.inner.statistics()


class Call(NamedTuple):
    """One call of a port: operation, argument, and start in loop time."""

    operation: str
    argument: object
    """The components, rows, cursor or region name; None if the operation has none of these."""
    began_s: float


class _Tracking(Generic[Port]):
    """Records the calls of one adapter."""

    def __init__(self, inner: Port) -> None:
        self.inner: Port = inner
        self.calls: list[Call] = []
        self.in_flight: Counter[str] = Counter()
        self.in_flight_max: Counter[str] = Counter()
        self.closed: int = 0
        """How often `close` was called."""
        self._call_started = asyncio.Event()

    def count(self, operation: str) -> int:
        """How many calls of this operation have started."""
        return sum(call.operation == operation for call in self.calls)

    def arguments(self, operation: str) -> list[object]:
        """The argument of each call of this operation, in order."""
        return [call.argument for call in self.calls if call.operation == operation]

    async def until(self, operation: str, count: int) -> None:
        """Wait until `count` calls of this operation have started."""
        while self.count(operation) < count:
            self._call_started.clear()
            await self._call_started.wait()

    @contextmanager
    def tracked(self, operation: str, argument: object) -> Iterator[None]:
        self.calls.append(Call(operation, argument, asyncio.get_running_loop().time()))
        self.in_flight[operation] += 1
        self.in_flight_max[operation] = max(self.in_flight_max[operation], self.in_flight[operation])
        self._call_started.set()
        try:
            yield
        finally:
            self.in_flight[operation] -= 1

    async def close(self) -> None:
        self.closed += 1
        await self.inner.close()

    def statistics(self) -> Mapping[str, int]:
        return self.inner.statistics()


class TrackingOrigin(_Tracking[Origin]):
    """Wraps an origin and records every call."""

    async def open(self, region: str, *, timeout_s: float) -> None:
        with self.tracked("open", region):
            await self.inner.open(region, timeout_s=timeout_s)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        with self.tracked("read", list(wanted)):
            return await self.inner.read(wanted, timeout_s=timeout_s)

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        with self.tracked("merge", list(components)):
            return await self.inner.merge(components, timeout_s=timeout_s)

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        with self.tracked("exchange", list(requests)):
            return await self.inner.exchange(requests, timeout_s=timeout_s)

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        with self.tracked("share", list(shares)):
            return await self.inner.share(shares, timeout_s=timeout_s)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        with self.tracked("usage", digest):
            return await self.inner.usage(digest, sequence, timeout_s=timeout_s)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        with self.tracked("claim", list(claims)):
            return await self.inner.claim(claims, timeout_s=timeout_s)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        with self.tracked("resets", list(known)):
            return await self.inner.resets(known, since=since, timeout_s=timeout_s)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        with self.tracked("lease", (node_id, life_ms, state)):
            return await self.inner.lease(
                node_id, life_ms=life_ms, state=state, has_lost=has_lost, timeout_s=timeout_s
            )

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        await self.inner.listen(node_id, on_recall)

    @property
    def can_be_recalled(self) -> bool:
        return self.inner.can_be_recalled

    @property
    def rules(self) -> GrantRules:
        return self.inner.rules

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        with self.tracked("pulse", region):
            return await self.inner.pulse(region, timeout_s=timeout_s)


class TrackingLedger(_Tracking[Ledger]):
    """Wraps a ledger and records every call."""

    async def open(self, *, timeout_s: float) -> None:
        with self.tracked("open", None):
            await self.inner.open(timeout_s=timeout_s)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        with self.tracked("publish", list(rows)):
            await self.inner.publish(rows, timeout_s=timeout_s)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        with self.tracked("changes", cursor):
            return await self.inner.changes(cursor, now_ms=now_ms, timeout_s=timeout_s)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        with self.tracked("heartbeat", region):
            return await self.inner.heartbeat(region, timeout_s=timeout_s)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        with self.tracked("cleanup", cutoff_ms):
            return await self.inner.cleanup(cutoff_ms, rows_max=rows_max, timeout_s=timeout_s)

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        with self.tracked("overview", None):
            return await self.inner.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s)
