from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.origin_places import SetClock
from tidegate.adapters.sqlite.origin import STATEMENT_CELLS, SQLiteOrigin, _Pace, _statements
from tidegate.core.model import OriginReply
from tidegate.core.sharing import Share
from tidegate.errors import ConfigurationError, DependencyError
from tidegate.ports import Origin
from tidegate.testing.contracts.origin import (
    FAR_MS,
    REGION,
    TIMEOUT_S,
    OpenNode,
    OriginContract,
    OriginPlace,
    component,
    new_digest,
)

# Another process of the machine: counts in ten cells, one merge at a time, and prints the last reply.
NEIGHBOUR = """
import asyncio, sys
from tidegate.adapters.sqlite.origin import SQLiteOrigin
from tidegate.core.model import Component

async def main(path, writer, expires_at_ms):
    origin = SQLiteOrigin(path)
    await origin.open("fra", timeout_s=10)
    digests = [bytes([index]) * 16 for index in range(10)]
    for own in range(1, 51):
        replies = await origin.merge(
            [Component(digest, 1, writer, own, expires_at_ms) for digest in digests], timeout_s=10
        )
        assert all(one.component == own - 1 for one in replies)
    await origin.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class SQLitePlace(OriginPlace):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = SetClock()

    def node(self) -> Origin:
        return SQLiteOrigin(self.path, clock=self.clock)

    def wipe(self) -> None:
        for name in (self.path, *self.path.parent.glob(f"{self.path.name}-*")):
            name.unlink()

    def entries(self) -> int:
        with closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute(
                "SELECT count(*) FROM (SELECT DISTINCT digest, sequence FROM origin_components)"
            ).fetchone()
            return int(count)

    async def wait_until(self, at_ms: int, origin: Origin) -> None:
        self.clock.at_ms = at_ms + 1


class TestSQLiteOrigin(OriginContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> SQLitePlace:
        return SQLitePlace(tmp_path / "origin.db")

    async def test_a_file_from_before_ages_of_regions_were_kept_is_used(self, place: SQLitePlace) -> None:
        first = place.node()
        await first.open(REGION, timeout_s=TIMEOUT_S)
        entry = Share(new_digest(), 60_000, FAR_MS // 60_000, "us", 30, "a")
        await first.share([entry], timeout_s=TIMEOUT_S)
        await first.close()
        with closing(sqlite3.connect(place.path)) as connection:
            connection.execute("ALTER TABLE origin_foreign DROP COLUMN learned_at_ms")
            connection.execute("ALTER TABLE origin_lease DROP COLUMN lag_ms")
        second = place.node()
        await second.open(REGION, timeout_s=TIMEOUT_S)
        found = await second.usage(entry.digest, entry.sequence, timeout_s=TIMEOUT_S)
        assert found.regions == [("us", 30, -1)]
        await second.share([entry._replace(counted=31)], timeout_s=TIMEOUT_S)
        found = await second.usage(entry.digest, entry.sequence, timeout_s=TIMEOUT_S)
        assert found.regions == [("us", 31, 0)]
        assert (await second.lease("a", life_ms=1_000, timeout_s=TIMEOUT_S)).state.lag_ms == -1
        await second.close()

    async def test_the_time_limit_is_kept_while_another_process_holds_the_lock(
        self, origin: Origin, place: SQLitePlace
    ) -> None:
        cell = component(new_digest(), 3)
        await self.merged(origin, cell)
        with closing(sqlite3.connect(place.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # It ends while the lock is held, and it is held until this test releases it.
            with pytest.raises(DependencyError):
                await origin.merge([cell], timeout_s=0.2)
            assert await self.read(origin, cell) == OriginReply(3, 3), "a reader does not wait for the writer"
        assert await self.merged(origin, cell) == OriginReply(3, 3)

    async def test_processes_that_count_at_the_same_time_lose_nothing(
        self, origin: Origin, place: SQLitePlace
    ) -> None:
        writers = [f"process-{index}" for index in range(3)]
        neighbours = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", NEIGHBOUR, place.path, writer, str(FAR_MS)
            )
            for writer in writers
        ]
        assert [await neighbour.wait() for neighbour in neighbours] == [0, 0, 0]
        cells = [component(bytes([index]) * 16, writer=writers[0]) for index in range(10)]
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [OriginReply(150, 50)] * 10

    async def test_expired_cells_are_deleted_a_few_at_a_time(
        self, origin: Origin, place: SQLitePlace
    ) -> None:
        now_ms = place.clock.at_ms
        old = [component(new_digest(), 1, expires_at_ms=now_ms + 1_000) for _ in range(350)]
        await origin.merge(old, timeout_s=TIMEOUT_S)
        place.clock.at_ms += 1_000
        left = []
        for own in range(1, 5):
            await self.merged(origin, component(b"x" * 16, own))
            left.append(place.entries())
        assert left == [251, 151, 51, 1]

    async def test_two_writers_of_one_cell_in_a_large_merge_are_both_answered_with_its_total(
        self, origin: Origin
    ) -> None:
        digests = [number.to_bytes(16, "big") for number in range(2 * STATEMENT_CELLS)]
        ones = [component(digest, 2, writer="one") for digest in digests]
        # A statement with as many cells as the others would end between the two.
        other = component(digests[STATEMENT_CELLS - 1], 3, writer="other")
        replies = await origin.merge([*ones, other], timeout_s=TIMEOUT_S)
        assert replies[STATEMENT_CELLS - 1] == replies[-1] == OriginReply(5, 0)
        assert replies.count(OriginReply(2, 0)) == len(ones) - 1

    async def test_a_file_that_is_replaced_is_found_by_every_node(
        self, place: SQLitePlace, open_node: OpenNode
    ) -> None:
        here, there = await open_node(), await open_node()
        digest = new_digest()
        await self.merged(here, component(digest, 5, writer="here"))
        place.wipe()
        await self.merged(here, component(digest, 6, writer="here"))
        assert await self.merged(there, component(digest, 1, writer="there")) == OriginReply(7, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing/origin.db", "does not exist"), (".", "is a directory"), ("text.db", "not a database")],
)
async def test_a_file_that_can_never_work_is_a_configuration_error(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "text.db").write_text("no database, but long enough to be taken for one. " * 100)
    origin = SQLiteOrigin(tmp_path / name)
    with pytest.raises(ConfigurationError, match=said) as refusal:
        await origin.open(REGION, timeout_s=TIMEOUT_S)
    assert str(tmp_path) in str(refusal.value)
    await origin.close()


def test_a_large_merge_is_written_in_the_order_of_the_table() -> None:
    components = [component(new_digest(), 1) for _ in range(2 * STATEMENT_CELLS + 7)]
    statements = list(_statements(components, _Pace(len(components))))
    assert [len(statement.positions) for statement in statements] == [STATEMENT_CELLS, STATEMENT_CELLS, 7]
    order = [components[position].digest for statement in statements for position in statement.positions]
    assert order == sorted(each.digest for each in components)
