"""The embedded origin under stress: a reader that waits for no writer, and a damaged file that is noticed."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tidegate.adapters.sqlite.origin import SQLiteOrigin
from tidegate.core.model import Component
from tidegate.errors import DependencyUnavailable
from tidegate.testing.clock import ManualClock

TIMEOUT_S = 20.0
FAR_MS = 2**52


def component(number: int, own: int = 1) -> Component:
    return Component(number.to_bytes(16, "big"), 1, "node", own, FAR_MS)


async def test_a_read_a_pulse_and_usage_do_not_wait_for_merges_that_were_queued_before_it(
    tmp_path: Path,
) -> None:
    origin = SQLiteOrigin(tmp_path / "origin.db")
    await origin.open("fra", timeout_s=TIMEOUT_S)
    await origin.merge([component(1, 7)], timeout_s=TIMEOUT_S)
    with closing(sqlite3.connect(tmp_path / "origin.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # like a slow disk: no merge proceeds until it ends
        merges = [
            asyncio.ensure_future(origin.merge([component(n)], timeout_s=TIMEOUT_S)) for n in range(2, 6)
        ]
        await asyncio.sleep(0)
        (reply,) = await origin.read([component(1)], timeout_s=TIMEOUT_S)
        assert reply.total == 7
        assert (await origin.usage(component(1).digest, 1, timeout_s=TIMEOUT_S)).total == 7
        assert (await origin.pulse("fra", timeout_s=TIMEOUT_S)).region == "fra"
        assert not any(merge.done() for merge in merges)
        other.execute("ROLLBACK")
    await asyncio.gather(*merges)
    await origin.close()


async def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "origin.db"
    origin = SQLiteOrigin(path)
    await origin.open("fra", timeout_s=TIMEOUT_S)
    for start in range(0, 5_000, 1_000):
        await origin.merge([component(n) for n in range(start, start + 1_000)], timeout_s=TIMEOUT_S)
    await origin.close()
    data = bytearray(path.read_bytes())
    data[8_192:] = b"\xa5" * (len(data) - 8_192)
    path.write_bytes(data)
    origin = SQLiteOrigin(path)
    with pytest.raises(DependencyUnavailable, match=r"origin\.db: the file is damaged .* move the file away"):
        await origin.merge([component(n) for n in range(1_000)], timeout_s=TIMEOUT_S)
    await origin.close()


async def test_a_file_does_not_grow_beyond_its_bound_and_is_used_again_once_cells_have_expired(
    tmp_path: Path,
) -> None:
    clock = ManualClock(1_000)
    path = tmp_path / "origin.db"
    origin = SQLiteOrigin(path, clock=clock, bytes_max=400_000)
    await origin.open("fra", timeout_s=TIMEOUT_S)

    async def fill(start: int) -> int:
        for number in range(start, start + 100_000, 500):
            cells = [component(n)._replace(expires_at_ms=60_000) for n in range(number, number + 500)]
            try:
                await origin.merge(cells, timeout_s=TIMEOUT_S)
            except DependencyUnavailable:
                return number - start
        raise AssertionError("there is no bound")

    merged = await fill(0)
    assert merged > 1_000
    with pytest.raises(DependencyUnavailable, match="largest size"):
        await origin.merge([component(n) for n in range(10_000, 20_000)], timeout_s=TIMEOUT_S)
    (kept, lost) = await origin.read([component(0), component(merged)], timeout_s=TIMEOUT_S)
    assert (kept.total, lost.total) == (1, 0), "a merge that does not fit leaves nothing behind"
    assert path.stat().st_size <= 400_000
    clock.set(70_000)
    await origin.merge([component(7)], timeout_s=TIMEOUT_S)
    await origin.close()
    assert path.stat().st_size <= 400_000
