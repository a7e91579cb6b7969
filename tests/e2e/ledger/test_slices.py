from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.e2e.ledger.world import BY_HAND, NEVER_MS, THOUSAND_A_DAY, World, node_of
from tidegate.runtime import importer, publish

pytestmark = [pytest.mark.server, pytest.mark.slow]

CELLS = 50_000


@asynccontextmanager
async def steps(progress: Callable[[], int]) -> AsyncIterator[list[int]]:
    """By how much a value changed in each turn of the event loop."""
    moved: list[int] = []

    async def watch() -> None:
        before = progress()
        while True:
            await asyncio.sleep(0)
            now = progress()
            if now != before:
                moved.append(abs(now - before))
            before = now

    watching = asyncio.create_task(watch())
    try:
        yield moved
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def test_publish_and_import_of_fifty_thousand_cells_never_hold_the_event_loop_for_long(
    server_world: World,
) -> None:
    """A turn of the loop handles a slice, whatever the number of cells: that is what keeps `loop_stall_seconds` low."""
    world = server_world
    # The test runs single turns itself.
    fra = await world.region("fra", origin=None).start(world.ledger(), **BY_HAND)
    iad = await world.region("iad", origin=None).start(
        world.ledger(), import_interval_ms=NEVER_MS, jitter_percent=0
    )
    for number in range(CELLS):
        await fra.limit(THOUSAND_A_DAY, f"user-{number}", 600)
        if number % 100 == 0:
            await asyncio.sleep(0)
    sender, receiver = node_of(fra), node_of(iad)
    assert sender.publish is not None and receiver.importer is not None
    waiting = sender.ledger_sync.subjects_waiting
    async with steps(waiting) as planned:
        published = await sender.publish.run_once()
    # The first of them may have been published before, under pressure.
    assert published.ok and len(published.rows) >= CELLS - 1
    assert sender.publish.rows_published == CELLS
    assert max(planned) <= publish.SLICE_ROWS
    assert max(published.chunks) == 5_000 and len(published.chunks) == 10
    assert len(set(published.rows)) == len(published.rows)

    async with steps(lambda: receiver.ledger_sync.rows_imported) as merged:
        imported = await receiver.importer.run_once(full=True)
    assert imported.ok and imported.rows == CELLS
    assert max(merged) <= importer.SLICE_ROWS
    # A small change costs little.
    for number in range(100):
        await fra.limit(THOUSAND_A_DAY, f"user-{number}")
    assert len((await sender.publish.run_once()).rows) == 100
    assert await receiver.importer.run_once() == (True, 100, False)
