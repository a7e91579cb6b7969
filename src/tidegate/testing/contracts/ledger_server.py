"""Additional tests for a ledger on a database server, which can freeze, die, hold locks, reject, or lack the schema.

Subclasses of `ServerLedgerContract` define the fixture `place`, a `ServerLedgerPlace`. The suite knows no SQL dialect.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Final

import pytest

from tidegate.adapters.migrations import load_migrations, migrate, schema_version
from tidegate.adapters.secrets import mask
from tidegate.core.model import LedgerRow
from tidegate.errors import (
    ConfigurationError,
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    SchemaMissing,
)
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import (
    NOW_MS,
    TIMEOUT_S,
    LedgerContract,
    LedgerPlace,
    OpenLedger,
    held,
    merged,
    publish,
    read_all,
    row,
    rows_of,
)
from tidegate.testing.proxy import FaultProxy
from tidegate.testing.servers import ServerProcess

__all__ = ["ServerLedgerContract", "ServerLedgerPlace"]

# Short where no reply is expected; and the tolerance for a busy machine.
SHORT_TIMEOUT_S: Final = 0.2
MARGIN_S: Final = 2.0
TIMEOUTS: Final = 1_000


class ServerLedgerPlace(LedgerPlace):
    """A new database on a real server that can be frozen and killed."""

    server: ServerProcess
    url: str
    dialect: str

    @abstractmethod
    def ledger(self, url: str | None = None) -> Ledger:
        """A ledger for one more node, optionally at another URL; not yet opened."""

    @abstractmethod
    def empty_url(self) -> str:
        """The URL of a new database without a schema and without a password."""

    @abstractmethod
    def connections(self) -> int:
        """How many clients are connected, not counting this query."""

    @abstractmethod
    def waiting(self) -> int:
        """How many statements wait for a lock."""

    @abstractmethod
    def sql(self, statement: str) -> None:
        """Run a statement in the database of this place, as its owner."""

    @abstractmethod
    def held_open(self, rows: Sequence[LedgerRow]) -> AbstractAsyncContextManager[None]:
        """A publish that commits at the end of the block."""

    @abstractmethod
    def opposite(self, first: str, then: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """A transaction that has locked the region `first`; when called, it locks `then` and commits."""


class ServerLedgerContract(LedgerContract):
    """The tests for a ledger in another process."""

    @pytest.fixture
    def place(self) -> ServerLedgerPlace:
        raise NotImplementedError("define the fixture `place` in your subclass")

    # ---- transactions that commit late

    async def test_a_transaction_that_commits_late_is_not_missed(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        late = rows_of(30, region="fra", regional=5)
        _, cursor = await read_all(ledger)
        async with place.held_open(late):
            for turn in range(1, 4):
                # Others commit while it is open, with later times than its own rows, and imports read them.
                on_time = rows_of(30, region="iad", regional=turn)
                await publish(ledger, on_time)
                rows, cursor = await read_all(ledger, cursor)
                assert sorted(rows) == sorted(on_time)
        rows, cursor = await read_all(ledger, cursor)
        assert sorted(rows) == sorted(late)
        rows, cursor = await read_all(ledger, cursor)
        assert rows == [], "nothing is read twice"

    async def test_a_full_read_beside_a_late_transaction_does_not_pass_it(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        await publish(ledger, rows_of(10, region="fra"))
        late = rows_of(30, region="fra", regional=5)
        async with place.held_open(late):
            await publish(ledger, rows_of(10, region="iad"))
            rows, cursor = await read_all(ledger)
            assert sorted(rows) == sorted([*rows_of(10, region="fra"), *rows_of(10, region="iad")])
        rows, _ = await read_all(ledger, cursor)
        assert sorted(rows) == sorted(late)

    async def test_a_second_publisher_of_a_region_waits_for_the_first_and_comes_after_it(
        self, ledger: Ledger, place: ServerLedgerPlace, open_ledger: OpenLedger
    ) -> None:
        """The cursor relies on this: within a region, changes become visible in order."""
        reader = await open_ledger()
        _, cursor = await read_all(reader)
        async with place.held_open(rows_of(10, regional=5)):
            second = asyncio.create_task(ledger.publish([row("other")], timeout_s=TIMEOUT_S))
            await until(lambda: place.waiting() == 1, "the second publisher waits")
            assert (await read_all(reader, cursor))[0] == []
        await second
        rows, _ = await read_all(reader, cursor)
        assert sorted(rows) == sorted([*rows_of(10, regional=5), row("other")])

    async def test_a_lock_that_is_not_given_ends_in_time_and_leaves_nothing(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        async with place.held_open(rows_of(10)):
            await ends_in_time(
                lambda timeout_s: ledger.publish([row("other")], timeout_s=timeout_s), DependencyError
            )
            # Heartbeats and other regions do not wait for it.
            await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
            await publish(ledger, [row(region="iad")])
        await until(lambda: place.waiting() == 0, "the abandoned statement is gone")
        await publish(ledger, [row("other", 2)])
        assert await held(ledger) == sorted([*rows_of(10), row("other", 2), row(region="iad")])

    async def test_a_deadlock_is_tried_again(self, ledger: Ledger, place: ServerLedgerPlace) -> None:
        rows = [row(region="fra"), row(region="iad")]
        await publish(ledger, rows)
        raised = [row(region="fra", regional=2), row(region="iad", regional=2)]
        async with place.opposite("iad", "fra") as complete_the_deadlock:
            publishing = asyncio.create_task(ledger.publish(raised, timeout_s=TIMEOUT_S))
            await until(lambda: place.waiting() == 1, "the publisher holds fra and waits for iad")
            with suppress(DependencyUnavailable):  # either of the two may be the victim
                await complete_the_deadlock()
        await publishing
        assert await held(ledger) == raised

    # ---- a frozen server

    async def test_every_time_limit_is_kept_when_the_server_is_frozen(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        await publish(ledger, [row()])
        cold = place.ledger()
        place.server.freeze()
        try:
            for one in (ledger, cold):
                for call in calls_of(one).values():
                    for _ in range(2):
                        await ends_in_time(call)
        finally:
            place.server.thaw()
        for one in (ledger, cold):
            await recovered(one)
            assert await held(one) == [row()]
        await cold.close()

    async def test_closing_does_not_wait_for_a_frozen_server(
        self, place: ServerLedgerPlace, open_ledger: OpenLedger
    ) -> None:
        ledger = await open_ledger()
        await publish(ledger, [row()])
        place.server.freeze()
        try:
            async with asyncio.timeout(MARGIN_S):
                await ledger.close()
        finally:
            place.server.thaw()

    async def test_a_thousand_timeouts_leave_no_connection_behind(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        await publish(ledger, [row()])
        connections = place.connections()
        tasks = len(asyncio.all_tasks())
        place.server.freeze()
        try:
            calls = itertools.cycle(calls_of(ledger).values())
            for _ in range(TIMEOUTS):
                with pytest.raises(DependencyTimeout):
                    await next(calls)(0.001)
        finally:
            place.server.thaw()
        await recovered(ledger)
        assert await held(ledger) == [row()]
        await until(lambda: place.connections() <= connections, "the server has forgotten the others")
        assert len(asyncio.all_tasks()) <= tasks

    # ---- a killed server

    async def test_rows_that_cannot_be_read_are_skipped_and_counted_and_all_others_read(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        await publish(ledger, rows_of(10))
        columns = (
            "subject, sequence, region, workspace_id, namespace, identifier, duration_ms, count, expires_at, "
            "updated_at"
        )
        names = {"region": "fffe", "workspace_id": "c3", "namespace": "80", "identifier": "636166e9"}
        bad = [{column: binary(place, name)} for column, name in names.items()]
        bad += [{"duration_ms": "0"}, {"duration_ms": "0", "sequence": "-1"}, {"sequence": f"{2**63 - 1}"}]
        for number, changed in enumerate(bad):
            changed["subject"] = binary(place, f"{number:032x}")
            chosen = ", ".join(changed.get(each, each) for each in columns.split(", "))
            copied = f"SELECT {chosen} FROM ratelimit_window_counts ORDER BY subject DESC LIMIT 1"  # noqa: S608 - ours
            place.sql(f"INSERT INTO ratelimit_window_counts ({columns}) {copied}")
        values = f"VALUES ({binary(place, 'fffe')}, 1)"
        place.sql(f"INSERT INTO ratelimit_publishes (region, published_at) {values}")
        place.sql(f"INSERT INTO ratelimit_regions (region, beat_at) {values}")
        changes = await ledger.changes(None, now_ms=0, timeout_s=TIMEOUT_S)
        assert (len(changes.rows), changes.unreadable) == (10, len(bad))
        await publish(ledger, rows_of(10, regional=99))
        later = await ledger.changes(changes.cursor, now_ms=0, timeout_s=TIMEOUT_S)
        assert [each.regional for each in later.rows] == [99] * 10, "and the cursor has moved past them"
        assert [beat.region for beat in await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)] == ["fra"]
        overview = await ledger.overview(now_ms=0, hottest_max=50, timeout_s=TIMEOUT_S)
        assert "\\xff\\xfe" in overview.rows

    async def test_a_dead_server_is_unavailable_and_is_connected_to_again(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        await publish(ledger, rows_of(10))
        _, cursor = await read_all(ledger)
        place.server.kill()
        for call in calls_of(ledger).values():
            with pytest.raises(DependencyUnavailable):
                await call(TIMEOUT_S)
        place.server.start()
        await recovered(ledger)
        await publish(ledger, [row("after")])
        assert await held(ledger) == sorted([*rows_of(10), row("after")])
        rows, _ = await read_all(ledger, cursor)
        assert rows == [row("after")], "a cursor stays valid after a restart"

    async def test_a_ledger_that_starts_before_its_server_works_when_it_is_up(
        self, place: ServerLedgerPlace
    ) -> None:
        ledger = place.ledger()
        place.server.kill()
        with pytest.raises(DependencyUnavailable):
            await ledger.open(timeout_s=TIMEOUT_S)
        place.server.start()
        await recovered(ledger)
        await ledger.open(timeout_s=TIMEOUT_S)
        await ledger.close()

    async def test_chunks_are_whole_or_absent_when_the_server_is_killed_in_the_middle(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        """Acknowledged rows are kept."""
        chance = random.Random(3)
        acknowledged: set[int] = set()

        def has_grown_to(size: int) -> bool:
            return len(acknowledged) >= size

        async def work() -> None:
            for chunk in range(1_000):
                await ledger.publish(rows_of(400, namespace=f"chunk-{chunk}"), timeout_s=TIMEOUT_S)
                acknowledged.add(chunk)

        for _ in range(3):
            wanted = len(acknowledged) + chance.randrange(1, 10)
            working = asyncio.create_task(work())
            await until(partial(has_grown_to, wanted), "some chunks are in")
            place.server.kill()
            with pytest.raises(DependencyError):
                await working
            place.server.start()
            await recovered(ledger)
        sizes: dict[str, int] = {}
        for one in await held(ledger):
            sizes[one.namespace] = sizes.get(one.namespace, 0) + 1
        assert set(sizes.values()) == {400}
        assert {f"chunk-{chunk}" for chunk in acknowledged} <= set(sizes)

    # ---- connections that are cut

    async def test_a_connection_that_is_cut_is_replaced(self, place: ServerLedgerPlace) -> None:
        with FaultProxy(place.server.port) as proxy:
            ledger = place.ledger(proxy.through(place.url))
            await publish(ledger, [row()])
            cut = asyncio.create_task(ledger.publish(rows_of(2_000), timeout_s=TIMEOUT_S))
            await until(lambda: proxy.statistics().request_bytes > 100_000 or cut.done(), "it is on its way")
            proxy.reset_connections()
            with suppress(DependencyUnavailable):  # it may have finished before the cut
                await cut
            await publish(ledger, rows_of(2_000, regional=2))
            assert await held(ledger) == sorted([row(), *rows_of(2_000, regional=2)])
            await ledger.close()

    async def test_an_idle_connection_that_the_server_closed_is_replaced_without_an_error(
        self, place: ServerLedgerPlace
    ) -> None:
        with FaultProxy(place.server.port) as proxy:
            ledger = place.ledger(proxy.through(place.url))
            await publish(ledger, [row()])
            await held(ledger)
            for turn in range(3):
                proxy.reset_connections()
                await until(lambda: proxy.statistics().connections_open == 0, "both are cut")
                await publish(ledger, [row(regional=turn)])
                assert await held(ledger) == [row(regional=max(1, turn))]
            await ledger.close()

    # ---- cancelled callers

    async def test_a_cancelled_call_leaves_nothing_that_could_answer_the_wrong_question(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        chance = random.Random(11)
        await publish(ledger, rows_of(300))
        connections = place.connections()
        tasks = len(asyncio.all_tasks())
        cancelled = 0
        for _ in range(60):
            call = chance.choice(list(calls_of(ledger, rows_of(300)).values()))
            task = asyncio.ensure_future(call(TIMEOUT_S))
            for _ in range(chance.randrange(40)):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            cancelled += task.cancelled()
            beats = await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
            assert [beat.region for beat in beats] == ["fra"]
            overview = await ledger.overview(now_ms=NOW_MS, hottest_max=0, timeout_s=TIMEOUT_S)
            assert dict(overview.rows) == {"fra": 300}
        assert cancelled > 10, "too few statements were cancelled"
        assert await held(ledger) == sorted(rows_of(300))
        await until(lambda: place.connections() <= connections, "the server has forgotten the others")
        assert len(asyncio.all_tasks()) <= tasks

    async def test_a_caller_cancelled_in_the_queue_does_not_disturb_it(self, ledger: Ledger) -> None:
        tasks = [
            asyncio.create_task(ledger.publish([row(f"user-{index}")], timeout_s=TIMEOUT_S))
            for index in range(20)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        there = await held(ledger)
        assert {row(f"user-{index}") for index in range(1, 20, 2)} <= set(there)

    async def test_after_close_nothing_is_opened_again(
        self, ledger: Ledger, place: ServerLedgerPlace
    ) -> None:
        connections = place.connections()
        await ledger.close()
        for call in calls_of(ledger).values():
            with pytest.raises(DependencyUnavailable, match="closed"):
                await call(TIMEOUT_S)
        await until(lambda: place.connections() < max(1, connections), "the connections are gone")

    # ---- the schema

    async def test_a_database_without_a_schema_names_the_command_that_creates_it(
        self, place: ServerLedgerPlace
    ) -> None:
        url = place.empty_url()
        ledger = place.ledger(url)
        # A URL without a password is not masked: the command can be pasted.
        command = rf"tidegate migrate --ledger {re.escape(mask(url))}$"
        with pytest.raises(SchemaMissing, match=command):
            await ledger.open(timeout_s=TIMEOUT_S)
        with pytest.raises(DependencyUnavailable, match=command):
            await ledger.publish([row()], timeout_s=TIMEOUT_S)
        await migrate(url)
        await ledger.open(timeout_s=TIMEOUT_S)
        await publish(ledger, [row()])
        assert await held(ledger) == [row()]
        await ledger.close()

    async def test_a_schema_that_is_too_old_is_missing(self, place: ServerLedgerPlace) -> None:
        place.sql("DELETE FROM tidegate_schema")
        ledger = place.ledger()
        with pytest.raises(SchemaMissing, match="tidegate migrate --ledger"):
            await ledger.open(timeout_s=TIMEOUT_S)
        await ledger.close()

    async def test_a_dry_run_shows_what_a_migration_does_and_does_nothing(
        self, place: ServerLedgerPlace
    ) -> None:
        url = place.empty_url()
        planned = await migrate(url, dry_run=True)
        assert await schema_version(url) == 0
        assert await migrate(url, dry_run=True) == planned
        assert await migrate(url) == planned
        assert await schema_version(url) == len(load_migrations(place.dialect))
        assert any("ratelimit_window_counts" in statement for statement in planned)

    async def test_migrating_twice_does_nothing_more(self, place: ServerLedgerPlace, ledger: Ledger) -> None:
        await publish(ledger, [row()])
        assert await migrate(place.url) == []
        assert await migrate(place.url, dry_run=True) == []
        assert await held(ledger) == [row()]

    async def test_migrations_from_several_places_at_once_are_applied_once(
        self, place: ServerLedgerPlace
    ) -> None:
        url = place.empty_url()
        applied = await asyncio.gather(*(migrate(url) for _ in range(6)))
        assert sorted(bool(statements) for statements in applied) == [False] * 5 + [True]
        assert await schema_version(url) == len(load_migrations(place.dialect))

    async def test_a_migration_that_was_cut_off_is_finished_by_the_next(
        self, place: ServerLedgerPlace
    ) -> None:
        url = place.empty_url()
        working = asyncio.create_task(migrate(url))
        for _ in range(30):
            await asyncio.sleep(0)
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        await migrate(url)
        ledger = place.ledger(url)
        await ledger.open(timeout_s=TIMEOUT_S)
        await publish(ledger, [row()])
        await ledger.close()

    async def test_what_can_never_work_is_a_configuration_error_without_the_password(
        self, place: ServerLedgerPlace
    ) -> None:
        scheme, _, rest = place.url.partition("://")
        address = rest.rpartition("@")[2].partition("/")[0]
        ledger = place.ledger(f"{scheme}://nobody:hunter2@{address}/nowhere")
        with pytest.raises(ConfigurationError) as refusal:
            await ledger.open(timeout_s=TIMEOUT_S)
        assert "hunter2" not in str(refusal.value)
        assert address in str(refusal.value)
        await ledger.close()

    # ---- convergence

    async def test_regions_converge_through_a_server_that_is_killed_and_frozen(
        self, place: ServerLedgerPlace, open_ledger: OpenLedger
    ) -> None:
        """Publishers retry, readers continue from their cursor: at the end all have read all rows."""
        regions = ("fra", "iad")
        sent: dict[str, list[LedgerRow]] = {region: [] for region in regions}
        seen: dict[str, list[LedgerRow]] = {region: [] for region in regions}
        failed: list[DependencyError] = []
        finished = asyncio.Event()

        async def write(region: str, ledger: Ledger) -> None:
            for turn in range(1, 41):
                sent[region] = rows_of(50, regional=turn, region=region)
                await repeated(partial(ledger.publish, sent[region], timeout_s=1.0), failed)

        async def read(region: str, ledger: Ledger) -> None:
            cursor: str | None = None
            is_last = False
            while not is_last:
                is_last = finished.is_set()
                call = partial(ledger.changes, cursor, now_ms=NOW_MS, timeout_s=1.0)
                changes = await repeated(call, failed)
                cursor = changes.cursor
                seen[region] += changes.rows

        def turn_reached() -> int:
            return max(rows[0].regional if rows else 0 for rows in sent.values())

        def is_past(turn: int) -> bool:
            return turn_reached() > turn

        readers = [asyncio.create_task(read(region, await open_ledger())) for region in regions]
        writers = [asyncio.create_task(write(region, await open_ledger())) for region in regions]
        for fail, repair in (
            (place.server.kill, place.server.start),
            (place.server.freeze, place.server.thaw),
        ):
            await until(partial(is_past, turn_reached() + 3), "the writers continue")
            fail()
            failed.clear()
            await until(lambda: len(failed) > 3, "the writers notice")
            repair()
        await asyncio.gather(*writers)
        finished.set()
        await asyncio.gather(*readers)
        for region in regions:
            assert merged(seen[region]) == merged([*sent["fra"], *sent["iad"]])


# ---- helpers


def binary(place: ServerLedgerPlace, digits: str) -> str:
    """How the dialect writes these bytes, given in hexadecimal digits."""
    return f"x'{digits}'" if place.dialect == "mysql" else f"'\\x{digits}'::bytea"


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition while the event loop runs."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - another process sets no event here
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"gave up waiting until {what}") from None


async def repeated(
    call: Callable[[], Coroutine[Any, Any, Any]], failed: list[DependencyError] | None = None
) -> Any:
    """Retry until it succeeds, like a loop of the limiter. `failed` collects the errors."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return await call()
            except DependencyError as error:
                if failed is not None:
                    failed.append(error)
                await asyncio.sleep(0.01)


async def recovered(ledger: Ledger) -> None:
    """The ledger reconnects by itself, for writes and for reads."""
    await repeated(lambda: ledger.heartbeat("fra", timeout_s=2.0))
    await repeated(lambda: ledger.changes(None, now_ms=NOW_MS, timeout_s=2.0))


def calls_of(
    ledger: Ledger, rows: Sequence[LedgerRow] = (row(),)
) -> dict[str, Callable[[float], Coroutine[Any, Any, Any]]]:
    """Every call that can block, as a function of its timeout."""
    return {
        "publish": lambda timeout_s: ledger.publish(rows, timeout_s=timeout_s),
        "changes": lambda timeout_s: ledger.changes(None, now_ms=NOW_MS, timeout_s=timeout_s),
        "heartbeat": lambda timeout_s: ledger.heartbeat("fra", timeout_s=timeout_s),
        "cleanup": lambda timeout_s: ledger.cleanup(0, rows_max=10, timeout_s=timeout_s),
        "overview": lambda timeout_s: ledger.overview(now_ms=NOW_MS, hottest_max=3, timeout_s=timeout_s),
        "open": lambda timeout_s: ledger.open(timeout_s=timeout_s),
    }


async def ends_in_time(
    call: Callable[[float], Coroutine[Any, Any, Any]], error: type[DependencyError] = DependencyTimeout
) -> None:
    """The call raises `DependencyTimeout`, and in time."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(error):
        await call(SHORT_TIMEOUT_S)
    assert loop.time() - started < SHORT_TIMEOUT_S + MARGIN_S
