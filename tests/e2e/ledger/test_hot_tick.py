from __future__ import annotations

import asyncio

from tests.runtime.world import Member, Region, clock, on_virtual_time
from tidegate import Limit
from tidegate.adapters.memory import MemoryLedger
from tidegate.core.model import LedgerRow

# Far from full after the first publish: what follows causes no pressure.
HALF_USED = Limit("1000/hour", namespace="tests")


def _world() -> tuple[MemoryLedger, Region, Member]:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger)
    return ledger, region, region.node(with_origin=False)


def _count(ledger: MemoryLedger, identifier: str) -> int:
    return sum(row.regional for row in ledger.rows() if row.identifier == identifier)


@on_virtual_time
async def test_while_cells_are_hot_a_small_change_is_published_within_a_second() -> None:
    ledger, region, node = _world()
    await node.accept("ada", 200, HALF_USED)
    await asyncio.sleep(1)
    assert _count(ledger, "ada") == 200
    for expected in range(201, 211):
        await node.accept("ada", 1, HALF_USED)
        await asyncio.sleep(1)
        assert _count(ledger, "ada") == expected
    await region.stop()


@on_virtual_time
async def test_a_node_whose_cells_have_cooled_down_ticks_slowly_again() -> None:
    ledger, region, node = _world()
    await node.accept("ada", 200, HALF_USED)
    await asyncio.sleep(30)
    loop = node.limiter._parts.node
    assert loop is not None and loop.publish is not None
    before = loop.publish.turns
    await asyncio.sleep(60)
    assert loop.publish.turns - before <= 13, "every 5 s"
    assert _count(ledger, "ada") == 200
    await region.stop()


@on_virtual_time
async def test_many_hot_cells_are_written_no_faster_than_a_thousand_rows_a_second() -> None:
    _, region, node = _world()
    names = [f"user-{n}" for n in range(2_000)]
    for name in names:
        await node.limiter.limit(HALF_USED, name, 200)
    await asyncio.sleep(6)
    assert node.ledger is not None
    began = len(node.ledger.calls)
    for _ in range(40):
        for name in names:
            await node.limiter.limit(HALF_USED, name)
        await asyncio.sleep(0.5)
    written = 0
    for call in node.ledger.calls[began:]:
        if call.operation == "publish" and isinstance(call.argument, list):
            assert all(isinstance(row, LedgerRow) for row in call.argument)
            written += len(call.argument)
    # 20 seconds: a thousand rows each, one more tick's worth, and what the usual ticks take.
    assert 10_000 <= written <= 20_000 + 2_000 + 4 * 2_000
    await region.stop()
