"""Shared by the tests of the ledger: real databases, regions of nodes around them, and waiting."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import time_ns
from typing import Any, Final, cast

from tests.running_server import RunningServer
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.adapters.memory import MemoryOrigin
from tidegate.adapters.urls import open_ledger
from tidegate.core.grants import GrantRules
from tidegate.core.model import LedgerRow
from tidegate.ports import Clock, Ledger, Origin
from tidegate.runtime.node import Node
from tidegate.runtime.publish import PublishLoop
from tidegate.testing.limiters import make_async_limiter
from tidegate.testing.servers import PostgresServer
from tidegate.testing.servers.mysql_family import MySQLFamilyServer

DAY_MS: Final = 86_400_000
# Long, because a busy machine is not a bug.
PATIENCE_S: Final = 30.0

# The intervals of the design, twenty times as fast; everything else is unchanged.
BRISK: Final[Mapping[str, Any]] = {
    "publish_interval_ms": 250,
    "import_interval_ms": 250,
    "import_hot_interval_ms": 25,
    "pressure_interval_ms": 25,
    "backoff_first_ms": 10,
    "backoff_last_ms": 200,
    "breaker_open_ms": 250,
    "pulse_interval_ms": 100,
    # Anticipation may deny, which would make counts depend on the speed of the machine.
    "anticipation": False,
}

# As long as its credit lives, a node that needs no more does not ask the origin, and learns nothing of other regions.
BRISK_CREDIT: Final = GrantRules(life_ms=250)

# For loops whose turns a test runs itself. Their first tick comes after a random part of the interval, plus or minus
# the jitter: with an hour and the usual 20 percent, one in forty came at once.
NEVER_MS: Final = 100 * DAY_MS
BY_HAND: Final[Mapping[str, Any]] = {
    "publish_interval_ms": NEVER_MS,
    "pressure_interval_ms": NEVER_MS,
    "jitter_percent": 0,
}

HUNDRED_A_DAY = Limit(100, duration_ms=DAY_MS, namespace="tests")
THOUSAND_A_DAY = Limit(1000, duration_ms=DAY_MS, namespace="tests")


class Midday:
    """The real time, shifted so that the test begins at noon: no window of a day ends by chance."""

    def __init__(self) -> None:
        now_ms = time_ns() // 1_000_000
        self._shift_ms = DAY_MS // 2 - now_ms % DAY_MS

    def now_ms(self) -> int:
        return time_ns() // 1_000_000 + self._shift_ms


class Database(ABC):
    """A database with the schema, which tests can query directly, not only through the ledger."""

    name: str
    url: str

    @abstractmethod
    def sql(self, statement: str) -> list[list[str]]:
        """Run statements and return the answer as text. Run statements that wait for locks in a thread: a node of this
        process may hold the locks, and releases them only while the event loop runs."""

    @abstractmethod
    def copy(self) -> Callable[[], None]:
        """Copy all counts. Returns a function that restores the copy."""

    def counts(self) -> dict[tuple[str, str], int]:
        """The count of every row, by identifier and region."""
        found = self.sql(f"SELECT {self.text('identifier')}, {self.text('region')}, count FROM {COUNTS}")
        return {(identifier, region): int(count) for identifier, region, count in found}

    @staticmethod
    @abstractmethod
    def text(column: str) -> str:
        """A column of bytes as text."""

    def wipe(self) -> None:
        for table in TABLES:
            self.sql(f"DELETE FROM {table}")


COUNTS = "ratelimit_window_counts"
TABLES = {
    COUNTS: (
        "subject, sequence, region, workspace_id, namespace, identifier, duration_ms, count, expires_at, updated_at"
    ),
    "ratelimit_publishes": "region, published_at",
    "ratelimit_regions": "region, beat_at",
}


def _copy_rows(source: str, target: str, columns: str) -> str:
    """With the names of the columns: a sharded Vitess needs them."""
    return f"INSERT INTO {target} ({columns}) SELECT {columns} FROM {source}"


class ServerDatabase(Database):
    """On a server that can be killed and frozen."""

    def __init__(self, server: MySQLFamilyServer | PostgresServer | RunningServer, url: str) -> None:
        self.name = server.kind
        self.dialect = "postgres" if server.kind == "postgres" else "mysql"
        self.server = server
        self.url = url

    def sql(self, statement: str) -> list[list[str]]:
        return self.server.sql(statement, self.url.rpartition("/")[2])

    def copy(self) -> Callable[[], None]:
        for table, columns in TABLES.items():
            like = f"(LIKE {table})" if self.dialect == "postgres" else f"LIKE {table}"
            self.sql(f"CREATE TABLE {table}_copy {like}")
            self.sql(_copy_rows(table, f"{table}_copy", columns))

        def restore() -> None:
            # In one transaction: no reader can see an empty table.
            self.sql(
                "BEGIN; "
                + "; ".join(
                    f"DELETE FROM {table}; {_copy_rows(f'{table}_copy', table, columns)}"
                    for table, columns in TABLES.items()
                )
                + "; COMMIT"
            )

        return restore

    def text(self, column: str) -> str:  # type: ignore[override]  # which it is depends on the server
        if self.dialect == "mysql":
            return f"CONVERT({column} USING utf8mb4)"
        return f"convert_from({column}, 'UTF8')"

    def connections(self) -> int:
        """How many clients the server has, without this query."""
        name = self.url.rpartition("/")[2]
        if self.dialect == "mysql":
            question = (
                f"SELECT COUNT(*) FROM information_schema.processlist WHERE db = '{name}' "
                "AND id <> CONNECTION_ID()"
            )
        else:
            question = (
                f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
            )
        return int(self.sql(question)[0][0])

    def refuse(self, identifier: str) -> None:
        """From now on the database rejects rows of this identifier, as a stricter schema would."""
        if self.dialect == "mysql":
            self.sql(
                f"ALTER TABLE {COUNTS} ADD CONSTRAINT no_{identifier} CHECK (identifier <> '{identifier}')"
            )
        else:
            self.sql(
                f"ALTER TABLE {COUNTS} ADD CONSTRAINT no_{identifier} "
                f"CHECK (identifier <> convert_to('{identifier}', 'UTF8'))"
            )

    def accept_again(self, identifier: str) -> None:
        self.sql(f"ALTER TABLE {COUNTS} DROP CONSTRAINT no_{identifier}")


class FileDatabase(Database):
    """SQLite."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def sql(self, statement: str) -> list[list[str]]:
        connection = sqlite3.connect(self.path, timeout=PATIENCE_S)
        try:
            found = [[str(value) for value in row] for row in connection.execute(statement)]
            connection.commit()
        finally:
            connection.close()
        return found

    def copy(self) -> Callable[[], None]:
        for table in TABLES:
            self.sql(f"CREATE TABLE {table}_copy AS SELECT * FROM {table}")

        def restore() -> None:
            connection = sqlite3.connect(self.path, timeout=PATIENCE_S, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                connection.execute(f"DELETE FROM {table}")
                connection.execute(f"INSERT INTO {table} SELECT * FROM {table}_copy")
            connection.execute("COMMIT")
            connection.close()

        return restore

    @staticmethod
    def text(column: str) -> str:
        return f"CAST({column} AS TEXT)"


class BriskOrigin(MemoryOrigin):
    """In memory, with the intervals of `BRISK`."""

    def another(self) -> BriskOrigin:
        other = BriskOrigin(clock=self._clock)
        other._store = self._store
        return other

    @property
    def rules(self) -> GrantRules:
        return BRISK_CREDIT


class Region:
    """Nodes around one origin in memory (or another one), and the ledger."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        stack: AsyncExitStack,
        origin: MemoryOrigin | str | None = None,
    ) -> None:
        self.name = name
        self.nodes: list[AsyncLimiter] = []
        self._clock = clock
        self._stack = stack
        self._origin = origin

    async def start(self, ledger: str | Ledger, **tuning: Any) -> AsyncLimiter:
        """One more node, running."""
        origin = self._origin.another() if isinstance(self._origin, MemoryOrigin) else self._origin
        node = make_async_limiter(
            region=self.name,
            origin=cast("Origin | str | None", origin),
            ledger=ledger,
            clock=self._clock,
            tuning=Tuning(**{**BRISK, **tuning}),
        )
        await self._stack.enter_async_context(node)
        self.nodes.append(node)
        return node


class World:
    """Regions around one database."""

    def __init__(self, database: Database, stack: AsyncExitStack) -> None:
        self.database = database
        self.clock: Clock = Midday()
        self.stack = stack
        self.regions: dict[str, Region] = {}

    def region(self, name: str, *, origin: str | None = "memory") -> Region:
        """A new region; by default its origin is in memory and empty."""
        store = BriskOrigin(clock=self.clock) if origin == "memory" else origin
        self.regions[name] = Region(name, clock=self.clock, stack=self.stack, origin=store)
        return self.regions[name]

    async def grid(self, *names: str, nodes: int = 2, **tuning: Any) -> list[AsyncLimiter]:
        """Regions with the given numbers of nodes, all running."""
        for name in names:
            region = self.region(name)
            for _ in range(nodes):
                await region.start(self.database.url, **tuning)
        return self.nodes()

    async def grid_on(self, **origins: str) -> list[AsyncLimiter]:
        """Two nodes in each region, with the Redis of this URL."""
        for name, url in origins.items():
            region = self.region(name, origin=url)
            for _ in range(2):
                await region.start(self.database.url)
        return self.nodes()

    def nodes(self) -> list[AsyncLimiter]:
        return [node for region in self.regions.values() for node in region.nodes]

    def ledger(self) -> Ledger:
        return open_ledger(self.database.url)

    def row(self, identifier: str, region: str, count: int, limit: Limit = HUNDRED_A_DAY) -> LedgerRow:
        """A row of the present cell, as a region would publish it."""
        sequence = self.clock.now_ms() // limit.duration_ms
        return LedgerRow(
            limit.workspace,
            limit.namespace,
            identifier,
            limit.duration_ms,
            sequence,
            region,
            count,
            (sequence + 2) * limit.duration_ms,
        )

    async def until_rows(self, condition: Callable[[dict[tuple[str, str], int]], bool], what: str) -> None:
        """Wait for what the database holds, by identifier and region. Read in a thread: a node that shares this event
        loop would lose its lease while a command line client runs."""

        async def holds() -> bool:
            return condition(await asyncio.to_thread(self.database.counts))

        await until(holds, what)

    async def publish(self, *rows: LedgerRow) -> None:
        """Publish as another region, which is not part of this test."""
        ledger = self.ledger()
        try:
            await ledger.publish(sorted(rows), timeout_s=PATIENCE_S)
        finally:
            await ledger.close()


def node_of(limiter: AsyncLimiter) -> Node:
    """The loops of a limiter, for tests that run single turns."""
    node = limiter._parts.node
    assert node is not None
    return node


def publish_of(limiter: AsyncLimiter) -> PublishLoop:
    publish = node_of(limiter).publish
    assert publish is not None
    return publish


async def until_publishes_are_answered(limiters: Sequence[AsyncLimiter]) -> None:
    """Wait until the nodes know what they have written: each has begun another turn since. A row is visible in the
    database before its writer has the answer, and until then a turn that the test runs would write it again."""
    before = [publish_of(limiter).turns for limiter in limiters]
    await until(
        lambda: all(publish_of(one).turns > turns for one, turns in zip(limiters, before, strict=True)),
        "every node has begun another turn",
    )


async def accept(limiter: AsyncLimiter, identifier: str, cost: int = 1, limit: Limit = HUNDRED_A_DAY) -> int:
    """One request; the cost if it passed."""
    return cost if await limiter.limit(limit, identifier, cost) else 0


async def seen(limiter: AsyncLimiter, identifier: str, limit: Limit = HUNDRED_A_DAY) -> int:
    """How much was accepted, according to this node."""
    return (await limiter.peek(limit, identifier)).effective


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Poll a condition while the event loop runs. A check that blocks the loop, such as a call of a command line
    client, is followed by a pause of the same length."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PATIENCE_S
    while True:
        asked_s = loop.time()
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert loop.time() < deadline_s, f"gave up waiting until {what}"
        await asyncio.sleep(max(0.01, loop.time() - asked_s))


async def until_all_see(
    nodes: Sequence[AsyncLimiter], expected: Mapping[str, int], limit: Limit = HUNDRED_A_DAY
) -> None:
    """Wait until every node counts the expected numbers."""
    views: list[dict[str, int]] = []

    async def agreed() -> bool:
        views[:] = [{name: await seen(node, name, limit) for name in expected} for node in nodes]
        return all(view == expected for view in views)

    try:
        await until(agreed, "all nodes agree")
    except AssertionError as error:
        differing = [
            {name: count for name, count in view.items() if count != expected[name]} for view in views
        ]
        raise AssertionError(f"{error}: of {dict(expected)} the nodes see otherwise {differing}") from None
