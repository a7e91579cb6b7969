"""Merging is commutative, associative and idempotent: deliveries may come late, twice and in any order.

A node sends reads and replays while a peer merges too; all answers stay on the wire. Then they are delivered, in
an order and with repetitions that hypothesis chooses, together with rows of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.nodes import DictOrigin, Node
from tidegate.core.freshness import Need
from tidegate.core.model import DEGRADED, Component, LedgerRow, Limit, OriginReply
from tidegate.core.origin_sync import Replay

LIMIT = Limit(1_000_000, duration_ms=60_000, namespace="default")
T = 60_000 * 1000

# One stage of the past: (how late it is, what the node accepts, what a peer merges, whether a replay is sent).
stages = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(1, 9), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=5,
)
# Live rows, some of them from regions whose clocks run ahead by minutes.
rows = st.lists(
    st.builds(
        lambda identifier, sequence, region, regional: LedgerRow(
            "default", "default", identifier, 60_000, sequence, region, regional, 60_000 * (sequence + 2)
        ),
        st.sampled_from(["a", "b"]),
        st.sampled_from([999, 1000, 1001, 1002, 1003, 1500]),
        st.sampled_from(["fra", "iad", "syd"]),
        st.integers(1, 60),
    ),
    max_size=6,
)

Delivery = Callable[[Node], None]

# When answers arrive, by the clock of the node, which does not step back here: a step is more than another order.
ARRIVED_MS = T + 30_000


def with_answers_in_flight(script: list[tuple[int, int, int, bool]]) -> tuple[Node, list[Delivery]]:
    """A node that has sent messages and has no reply yet, and everything that is in flight."""
    node = Node(has_ledger=True)
    origin = DictOrigin()
    deliveries: list[Delivery] = []
    now_ms = T
    peers = 0
    for late_ms, cost, peer, replays in script:
        now_ms += late_ms
        answer = node.engine.decide(LIMIT, "a", cost, now_ms)
        assert isinstance(answer, Need)
        deliveries.append(read_delivery(answer, origin.read(answer.wanted), ARRIVED_MS))
        node.decide(LIMIT, "a", cost, now_ms, DEGRADED)
        if peer:
            peers += peer
            one = answer.wanted[0]
            origin.merge([Component(one.digest, one.sequence, "peer", peers, one.expires_at_ms)])
        if replays:
            replay = node.origin_sync.plan_replay(now_ms, 100)
            assert replay is not None
            deliveries.append(replay_delivery(replay, origin.merge(replay.components), ARRIVED_MS + 2))
    return node, deliveries


def read_delivery(need: Need, replies: list[OriginReply], now_ms: int) -> Delivery:
    return lambda node: node.origin_sync.apply_read(need, replies, now_ms)


def replay_delivery(replay: Replay, replies: list[OriginReply], now_ms: int) -> Delivery:
    return lambda node: node.origin_sync.apply_replay(replay, replies, now_ms)


def import_delivery(row: LedgerRow) -> Delivery:
    return lambda node: node.ledger_sync.apply_import([row], T + 30_000)


def state(node: Node) -> dict[tuple[str, int], tuple[object, ...]]:
    """Everything that deliveries write, of all cells that hold anything."""
    found: dict[tuple[str, int], tuple[object, ...]] = {}
    for subject in node.engine.subjects.slots:
        if subject is None:
            continue
        for cell in subject.cells():
            origin, ledger = cell.origin, cell.ledger
            assert origin is not None and ledger is not None
            if cell.total() == 0:
                continue
            found[subject.identifier, cell.sequence] = (
                cell.own,
                cell.others,
                cell.foreign,
                dict(ledger.components or {}),
                ledger.published,
                origin.acked,
            )
            if cell.own:
                # The freshness of other cells is not compared: a cell that was empty when it was read is not kept, and
                # one that an import creates is as fresh as the previous cell was at that time.
                found[f"{subject.identifier} deadlines", cell.sequence] = (
                    origin.answered_at_ms,
                    origin.fresh_until_ms,
                    origin.failed_until_ms,
                )
    return found


@given(st.data(), stages, rows)
@settings(max_examples=200)
def test_invariant_05_any_order_and_any_repetition_of_deliveries_gives_the_same_state(
    data: st.DataObject, script: list[tuple[int, int, int, bool]], imported: list[LedgerRow]
) -> None:
    one, its_deliveries = with_answers_in_flight(script)
    other, others_deliveries = with_answers_in_flight(script)
    its_deliveries += [import_delivery(row) for row in imported]
    others_deliveries += [import_delivery(row) for row in imported]

    for deliver in its_deliveries:
        deliver(one)
    order = data.draw(st.permutations(range(len(others_deliveries))), "order")
    again = data.draw(st.lists(st.sampled_from(order), max_size=6), "again")
    for index in [*order, *again]:
        others_deliveries[index](other)

    assert state(other) == state(one)
    for node in (one, other):
        assert not node.sweep.is_active, "an answer that was overtaken is not evidence of a wiped origin"


@given(st.data(), rows, rows)
def test_imports_in_one_piece_or_in_many_are_the_same(
    data: st.DataObject, first: list[LedgerRow], second: list[LedgerRow]
) -> None:
    whole, pieces = Node(has_ledger=True), Node(has_ledger=True)
    whole.ledger_sync.apply_import(first + second, T)
    for row in data.draw(st.permutations(first + second + first)):
        pieces.ledger_sync.apply_import([row], T)
    assert state(pieces) == state(whole)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_view_never_falls_whatever_an_origin_answers(totals: list[int]) -> None:
    node = Node()
    need = node.need(LIMIT, "a", 0, T)
    for heard_so_far, total in enumerate(totals, 1):
        node.origin_sync.apply_read(need, [OriginReply(total, 0), OriginReply(0, 0)], T)
        assert node.cell(LIMIT, "a", 1000).others == max(totals[:heard_so_far])
