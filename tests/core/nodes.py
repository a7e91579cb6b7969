"""A node to test with, and the smallest origin and ledger that keep the contract: G-Counters in dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from tidegate.core.cells import Cell, Subject
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.ledger_sync import Found, LedgerSync, Publication
from tidegate.core.model import (
    DEGRADED,
    LOCAL,
    ORIGIN,
    Component,
    Decision,
    LedgerRow,
    Limit,
    OriginReply,
    Request,
    Tuning,
)
from tidegate.core.origin_sync import OriginSync
from tidegate.core.sweep import Sweep

# No anticipation unless a test asks for it: most tests are about what is known, not about what is probable.
PLAIN = Tuning(anticipation=False)


class DictOrigin:
    """Components by cell and writer, merged with max."""

    def __init__(self) -> None:
        self.cells: dict[tuple[bytes, int], dict[str, int]] = {}
        self.reads = 0
        self.merges = 0

    def read(self, wanted: Sequence[Component]) -> list[OriginReply]:
        self.reads += 1
        answers = []
        for one in wanted:
            held = self.cells.get((one.digest, one.sequence), {})
            answers.append(OriginReply(sum(held.values()), held.get(one.writer, 0)))
        return answers

    def merge(self, components: Sequence[Component]) -> list[OriginReply]:
        self.merges += 1
        answers = []
        for one in components:
            held = self.cells.setdefault((one.digest, one.sequence), {})
            before = held.get(one.writer, 0)
            held[one.writer] = max(before, one.own)
            answers.append(OriginReply(sum(held.values()), before))
        return answers

    def total(self, digest: bytes, sequence: int) -> int:
        return sum(self.cells.get((digest, sequence), {}).values())

    def copy(self) -> dict[tuple[bytes, int], dict[str, int]]:
        return {cell: dict(held) for cell, held in self.cells.items()}


class DictLedger:
    """Rows by unique key, merged with max."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str, int, int, str], LedgerRow] = {}
        self.rows_written = 0

    def publish(self, rows: Iterable[LedgerRow]) -> None:
        for row in rows:
            self.rows_written += 1
            held = self.counts.get(row[:6])
            if held is None or held.regional < row.regional:
                self.counts[row[:6]] = row

    def rows(self) -> list[LedgerRow]:
        return list(self.counts.values())


class Node:
    """One engine with its sync objects, and a driver that sends and merges at once."""

    def __init__(
        self,
        node_id: str = "n1",
        *,
        region: str = "fra",
        tuning: Tuning = PLAIN,
        has_origin: bool = True,
        has_ledger: bool = False,
    ) -> None:
        self.engine = Engine(tuning, node_id=node_id, has_origin=has_origin, has_ledger=has_ledger)
        self.sweep = Sweep(
            self.engine.subjects,
            self.engine.pending,
            self.engine.global_view,
            has_credit=self.engine.has_credit,
        )
        self.origin_sync = OriginSync(self.engine, self.sweep, tuning)
        self.ledger_sync = LedgerSync(self.engine, self.sweep, tuning, region)
        self.region = region

    def decide(self, limit: Limit, identifier: str, cost: int, now_ms: int, source: int = LOCAL) -> Decision:
        """A decision for which nothing need be read."""
        answer = self.engine.decide(limit, identifier, cost, now_ms, source)
        assert isinstance(answer, Decision), answer
        return answer

    def need(self, limit: Limit, identifier: str, cost: int, now_ms: int) -> Need:
        """What has to be read before a decision."""
        answer = self.engine.decide(limit, identifier, cost, now_ms)
        assert isinstance(answer, Need), answer
        return answer

    def limit(
        self, limit: Limit, identifier: str, cost: int, now_ms: int, origin: DictOrigin | None = None
    ) -> Decision:
        """A decision, after reading `origin` if that must come first; without one the read fails."""
        answer = self.engine.decide(limit, identifier, cost, now_ms)
        if isinstance(answer, Decision):
            return answer
        assert isinstance(answer, Need)
        return self.decide(limit, identifier, cost, now_ms, self.read([answer], now_ms, origin))

    def limit_many(
        self, requests: Sequence[Request], now_ms: int, origin: DictOrigin | None = None
    ) -> list[Decision]:
        decisions, needs = self.engine.decide_many(requests, now_ms)
        if decisions is None:
            decisions, _ = self.engine.decide_many(requests, now_ms, self.read(needs, now_ms, origin))
        assert decisions is not None
        return decisions

    def read(self, needs: Sequence[Need], now_ms: int, origin: DictOrigin | None) -> int:
        for need in needs:
            if origin is None:
                self.origin_sync.apply_read_failure(need, now_ms)
            else:
                self.origin_sync.apply_read(need, origin.read(need.wanted), now_ms)
        return DEGRADED if origin is None else ORIGIN

    def replay(self, origin: DictOrigin, now_ms: int, cells_max: int = 250) -> int:
        """Send everything that is dirty. Returns the number of components that were sent."""
        sent = 0
        while (replay := self.origin_sync.plan_replay(now_ms, cells_max)) is not None:
            sent += len(replay.components)
            self.origin_sync.apply_replay(replay, origin.merge(replay.components), now_ms)
        return sent

    def run_sweep(self, slots_max: int = 1000) -> None:
        while self.sweep.run(slots_max):
            pass

    def plan_publish(self, now_ms: int, *, pressed_only: bool = False) -> Publication | None:
        """All rows that are due, sorted, or None."""
        found: list[Found] = []
        waiting = self.ledger_sync.subjects_waiting(pressed_only=pressed_only)
        self.ledger_sync.collect_publish(found, now_ms, waiting, pressed_only=pressed_only)
        found.sort(key=itemgetter(0))
        return Publication(found) if found else None

    def publish(self, ledger: DictLedger, now_ms: int, *, pressed_only: bool = False) -> list[LedgerRow]:
        """One turn of publishing. Returns the rows that were sent."""
        publication = self.plan_publish(now_ms, pressed_only=pressed_only)
        if publication is None:
            return []
        ledger.publish(publication.rows)
        self.ledger_sync.apply_publish(publication, 0, len(publication.rows), now_ms)
        return publication.rows

    def import_all(self, ledger: DictLedger, now_ms: int) -> None:
        """A full import."""
        self.ledger_sync.begin_full_import()
        self.ledger_sync.apply_import(ledger.rows(), now_ms, full=True)
        self.ledger_sync.finish_import(now_ms, full=True)

    def subject(self, limit: Limit, identifier: str) -> Subject:
        subject = self.engine.subjects.find(limit.key, identifier)
        assert subject is not None, f"{identifier!r} is not remembered"
        return subject

    def cell(self, limit: Limit, identifier: str, sequence: int) -> Cell:
        cell = self.subject(limit, identifier).cell(sequence)
        assert cell is not None, f"{identifier!r} has no cell {sequence}"
        return cell

    def knows(self, limit: Limit, identifier: str) -> bool:
        return self.engine.subjects.find(limit.key, identifier) is not None
