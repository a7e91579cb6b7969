"""OpenTelemetry spans for calls of the origin and the ledger (Redis and the database).

Off unless `traced_origin` or `traced_ledger` wraps a port. A decision from memory is never traced, because a span costs
20 times as much. The wrappers are ports, so the runtime knows nothing about tracing. `opentelemetry-api` is imported
when the first wrapper is created. Span attributes contain counts only, no identifiers and no URLs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from tidegate.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
    from tidegate.core.model import Component, LedgerRow, OriginReply
    from tidegate.core.reservations import Claim, ClaimReply
    from tidegate.core.resets import Reset, ResetsReply
    from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
    from tidegate.ports import Changes, Ledger, LedgerOverview, Origin, Pulse, RegionBeat

__all__ = ["traced_ledger", "traced_origin"]


def traced_origin(origin: Origin, tracer: Tracer | None = None) -> Origin:
    """`origin` with a span around each of its round trips."""
    return _TracedOrigin(origin, tracer or _tracer())


def traced_ledger(ledger: Ledger, tracer: Tracer | None = None) -> Ledger:
    """`ledger` with a span around each of its calls."""
    return _TracedLedger(ledger, tracer or _tracer())


def _tracer() -> Tracer:
    try:
        from opentelemetry import trace
    except ModuleNotFoundError as error:
        raise MissingExtra("otel", "tracing") from error
    return trace.get_tracer("tidegate")


class _TracedOrigin:
    def __init__(self, inner: Origin, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    def _span(self, name: str, **attributes: int) -> Any:
        return self._tracer.start_as_current_span(f"tidegate.origin.{name}", attributes=attributes)

    async def open(self, region: str, *, timeout_s: float) -> None:
        with self._span("open"):
            await self._inner.open(region, timeout_s=timeout_s)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        with self._span("read", cells=len(wanted)):
            return await self._inner.read(wanted, timeout_s=timeout_s)

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        with self._span("merge", cells=len(components)):
            return await self._inner.merge(components, timeout_s=timeout_s)

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        with self._span("exchange", messages=len(requests)):
            return await self._inner.exchange(requests, timeout_s=timeout_s)

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        with self._span("share", cells=len(shares)):
            return await self._inner.share(shares, timeout_s=timeout_s)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        with self._span("usage", cells=1):
            return await self._inner.usage(digest, sequence, timeout_s=timeout_s)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        with self._span("claim", cells=len(claims)):
            return await self._inner.claim(claims, timeout_s=timeout_s)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        with self._span("resets", cells=len(known)):
            return await self._inner.resets(known, since=since, timeout_s=timeout_s)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        # No span, as with the pulse.
        return await self._inner.lease(
            node_id, life_ms=life_ms, state=state, has_lost=has_lost, timeout_s=timeout_s
        )

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        await self._inner.listen(node_id, on_recall)

    @property
    def can_be_recalled(self) -> bool:
        return self._inner.can_be_recalled

    @property
    def rules(self) -> GrantRules:
        return self._inner.rules

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        # No span: one per second and node would hide the others.
        return await self._inner.pulse(region, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()

    def statistics(self) -> Mapping[str, int]:
        return self._inner.statistics()


class _TracedLedger:
    def __init__(self, inner: Ledger, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    def _span(self, name: str, **attributes: int) -> Any:
        return self._tracer.start_as_current_span(f"tidegate.ledger.{name}", attributes=attributes)

    async def open(self, *, timeout_s: float) -> None:
        with self._span("open"):
            await self._inner.open(timeout_s=timeout_s)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        with self._span("publish", rows=len(rows)):
            await self._inner.publish(rows, timeout_s=timeout_s)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        with self._span("import", full=int(cursor is None)) as span:
            changes = await self._inner.changes(cursor, now_ms=now_ms, timeout_s=timeout_s)
            cast("Span", span).set_attribute("rows", len(changes.rows))
            return changes

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        with self._span("heartbeat"):
            return await self._inner.heartbeat(region, timeout_s=timeout_s)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        with self._span("cleanup"):
            return await self._inner.cleanup(cutoff_ms, rows_max=rows_max, timeout_s=timeout_s)

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        with self._span("overview"):
            return await self._inner.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()

    def statistics(self) -> Mapping[str, int]:
        return self._inner.statistics()
