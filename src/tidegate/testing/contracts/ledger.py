"""The contract of `tidegate.ports.Ledger` as tests, for every ledger.

`ledger_server` adds tests for a store in another process. Subclasses define the fixture `place`. The cells of these
tests are in the year 2100, so that nothing expires during a test. The suite does not know a particular store.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.core.generations import RESET_NAME, cell_name, reset_expires_at_ms
from tidegate.core.model import NAME_LENGTH_MAX, LedgerRow
from tidegate.errors import RowsRejected
from tidegate.ports import Ledger

__all__ = ["LedgerContract", "LedgerPlace", "OpenLedger", "read_all", "row", "rows_of"]

# Generous where a reply is expected: the machine may be busy.
TIMEOUT_S: Final = 20.0
NOW_MS: Final = 4_102_444_800_000
DURATION_MS: Final = 60_000
SEQUENCE: Final = NOW_MS // DURATION_MS
# A reset in that cell.
GENERATION: Final = NOW_MS + 5
COUNT_MAX: Final = 2**53
# The bounds of the port.
PUBLISH_ROWS_MAX: Final = 5_000
ANSWER_ROWS_MAX: Final = 50_000

# Names that some collation, encoding, client or C string confuses with another.
NASTY_NAMES: Final = (
    *("a", "A", "á", "a\u0301", "à", "Å", "\u212b", "ａ", "ß", "ss", "SS", "ı", "i", "İ", "ö", "oe"),
    *(
        "a ",
        "a  ",
        " a",
        "a\t",
        "a\n",
        "a\r\n",
        "a\x00",
        "a\x00b",
        "\x00",
        "\x01",
        "\x7f",
        "\u200b",
        "a\u200d",
    ),
    *(
        "\ud800",
        "\udfff",
        "\ud83d",
        "\ude00",
        "\U0001f600",
        "\U0001f600\ufe0f",
        "\U0010ffff",
        "\ufffd",
        "\ufeff",
    ),
    *(
        "'",
        '"',
        "\\",
        "\\'",
        "''",
        "%",
        "%s",
        "_",
        "?",
        "$1",
        ":a",
        ";",
        "--",
        "/*",
        "`",
        "{",
        "}",
        '{"a"}',
        "[]",
    ),
    *(
        "0",
        "00",
        "0x41",
        "x'41'",
        "NULL",
        "null",
        "None",
        "true",
        "\\x41",
        "\\N",
        "e\u0301" * 100,
        "שלום",
        "日本語",
    ),
)

_numbers = itertools.count()
_quick = settings(
    max_examples=30,
    deadline=None,
    # Examples share a ledger, each with its own namespace. Subclasses share the test: it must be derandomized, without
    # an example database.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    derandomize=True,
)


def new_namespace() -> str:
    """A namespace that no other test and no other example has used."""
    return f"contract-{next(_numbers)}"


def row(
    identifier: str = "user",
    regional: int = 1,
    *,
    region: str = "fra",
    namespace: str = "email",
    workspace: str = "acme",
    sequence: int = SEQUENCE,
    duration_ms: int = DURATION_MS,
) -> LedgerRow:
    expires_at_ms = (sequence + 2) * duration_ms
    return LedgerRow(workspace, namespace, identifier, duration_ms, sequence, region, regional, expires_at_ms)


def rows_of(
    count: int, *, regional: int = 1, region: str = "fra", namespace: str = "email"
) -> list[LedgerRow]:
    return [row(f"user-{index}", regional, region=region, namespace=namespace) for index in range(count)]


async def publish(ledger: Ledger, rows: Sequence[LedgerRow]) -> None:
    for start in range(0, len(rows), PUBLISH_ROWS_MAX):
        await ledger.publish(rows[start : start + PUBLISH_ROWS_MAX], timeout_s=TIMEOUT_S)


async def read_all(
    ledger: Ledger, cursor: str | None = None, *, now_ms: int = NOW_MS, is_lost: bool = False
) -> tuple[list[LedgerRow], str]:
    """Read until there is no more, and return the cursor. With `is_lost`, the ledger must report lost rows."""
    rows: list[LedgerRow] = []
    was_lost = False
    while True:
        changes = await ledger.changes(cursor, now_ms=now_ms, timeout_s=TIMEOUT_S)
        assert len(changes.rows) <= ANSWER_ROWS_MAX
        assert set(changes.lag_ms) == {one.region for one in changes.rows}
        rows += changes.rows
        cursor = changes.cursor
        was_lost = was_lost or changes.lost
        if not changes.more:
            assert was_lost == is_lost
            return rows, cursor


async def held(ledger: Ledger, *, namespace: str | None = None) -> list[LedgerRow]:
    """The rows of the ledger (of one namespace), sorted."""
    rows, _ = await read_all(ledger)
    return sorted(one for one in rows if namespace is None or one.namespace == namespace)


def merged(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """The expected rows after publishing `rows`: the highest of each key, sorted."""
    highest: dict[tuple[Any, ...], LedgerRow] = {}
    for one in rows:
        key = one[:6]
        if key not in highest or highest[key].regional < one.regional:
            highest[key] = one
    return sorted(highest.values())


class LedgerPlace(ABC):
    """The store behind the ledgers of one test, with its schema."""

    @abstractmethod
    def ledger(self) -> Ledger:
        """A ledger for one more node on this store, not yet opened."""

    def refused_rows(self) -> list[LedgerRow]:
        """Rows that the store rejects, one for each reason."""
        return [
            row(region="r" * 256),
            row(regional=-1),
            row(regional=2**63),
            row(regional=2**80),
            row("i" * (4 * NAME_LENGTH_MAX + 1)),
        ]


class OpenLedger(Protocol):
    """The type of the fixture `open_ledger`: an open ledger for one more node, closed after the test."""

    async def __call__(self) -> Ledger: ...


class LedgerContract:
    """The tests for all ledgers."""

    @pytest.fixture
    def place(self) -> LedgerPlace:
        raise NotImplementedError("define the fixture `place` in your subclass")

    @pytest.fixture
    async def open_ledger(self, place: LedgerPlace) -> AsyncIterator[OpenLedger]:
        opened: list[Ledger] = []

        async def open_ledger() -> Ledger:
            ledger = place.ledger()
            opened.append(ledger)
            await ledger.open(timeout_s=TIMEOUT_S)
            return ledger

        yield open_ledger
        for ledger in opened:
            await ledger.close()

    @pytest.fixture
    async def ledger(self, open_ledger: OpenLedger) -> Ledger:
        return await open_ledger()

    # ---- merging

    async def test_a_new_ledger_is_empty(self, ledger: Ledger) -> None:
        changes = await ledger.changes(None, now_ms=NOW_MS, timeout_s=TIMEOUT_S)
        assert (changes.rows, dict(changes.lag_ms), changes.more) == ([], {}, False)

    async def test_publishing_nothing_changes_nothing(self, ledger: Ledger) -> None:
        await ledger.publish([], timeout_s=TIMEOUT_S)
        assert await held(ledger) == []

    async def test_what_is_published_is_read_as_it_was(self, ledger: Ledger, open_ledger: OpenLedger) -> None:
        rows = [row("a", 5), row("b", 7, region="iad"), row("b", 3), row("a", 1, sequence=SEQUENCE + 1)]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(await open_ledger()) == sorted(rows)

    async def test_a_count_only_rises(self, ledger: Ledger) -> None:
        for regional in (5, 3, 5, 9, 1):
            await ledger.publish([row(regional=regional)], timeout_s=TIMEOUT_S)
        assert await held(ledger) == [row(regional=9)]

    async def test_the_highest_of_several_rows_for_one_cell_in_one_publish_counts(
        self, ledger: Ledger
    ) -> None:
        await ledger.publish([row(regional=4), row(regional=9), row(regional=6)], timeout_s=TIMEOUT_S)
        assert await held(ledger) == [row(regional=9)]

    async def test_zero_is_a_count(self, ledger: Ledger) -> None:
        await ledger.publish([row(regional=0)], timeout_s=TIMEOUT_S)
        assert await held(ledger) == [row(regional=0)]

    async def test_each_part_of_the_key_distinguishes_rows(self, ledger: Ledger) -> None:
        rows = [
            *(row(), row("other"), row(namespace="other"), row(workspace="other"), row(region="other")),
            *(row(sequence=SEQUENCE + 1), row(duration_ms=2 * DURATION_MS)),
            # The same letters, split differently.
            *(row("bc", namespace="a"), row("c", namespace="ab"), row("c", namespace="a", workspace="b")),
        ]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted(rows)

    @_quick
    @given(
        deliveries=st.lists(
            st.lists(
                st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, COUNT_MAX)),
                min_size=1,
                max_size=6,
            ),
            min_size=1,
            max_size=8,
        ),
        chance=st.randoms(use_true_random=False),
    )
    async def test_any_order_and_any_repetition_of_publishes_gives_the_same_rows(
        self, ledger: Ledger, deliveries: list[list[tuple[int, str, int]]], chance: random.Random
    ) -> None:
        namespace = new_namespace()
        chunks = [
            [
                row(f"user-{cell}", regional, region=region, namespace=namespace)
                for cell, region, regional in chunk
            ]
            for chunk in deliveries
        ]
        repeated = chunks + chance.choices(chunks, k=len(chunks))
        chance.shuffle(repeated)
        for chunk in repeated:
            await ledger.publish(chunk, timeout_s=TIMEOUT_S)
        assert await held(ledger, namespace=namespace) == merged(itertools.chain(*chunks))

    # ---- names and numbers

    async def test_names_are_kept_to_the_byte(self, ledger: Ledger) -> None:
        rows = [
            *(row(name, number) for number, name in enumerate(NASTY_NAMES)),
            *(row(namespace=name, regional=number) for number, name in enumerate(NASTY_NAMES)),
            *(row(workspace=name, regional=number) for number, name in enumerate(NASTY_NAMES)),
            *(
                row(region=name, regional=number)
                for number, name in enumerate(NASTY_NAMES)
                if len(name) < 100
            ),
        ]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted(rows)

    @_quick
    @given(
        names=st.lists(
            st.text(st.characters(exclude_categories=()), min_size=1, max_size=20),
            min_size=1,
            max_size=20,
            unique=True,
        )
    )
    async def test_any_str_is_a_name(self, ledger: Ledger, names: list[str]) -> None:
        namespace = new_namespace()
        rows = [row(name, number, namespace=namespace) for number, name in enumerate(names)]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger, namespace=namespace) == sorted(rows)

    async def test_the_longest_names_fit(self, ledger: Ledger) -> None:
        longest = "\U0010ffff" * NAME_LENGTH_MAX
        rows = [
            row(longest[:-1] + last, namespace=longest, workspace=longest, region="r" * 200) for last in "ab"
        ]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted(rows)

    async def test_a_full_chunk_of_the_longest_names_fits(self, ledger: Ledger) -> None:
        longest = "\U0001f600" * (NAME_LENGTH_MAX - 4)
        rows = [
            row(f"{longest}{number:04}", namespace=longest, workspace=longest)
            for number in range(PUBLISH_ROWS_MAX)
        ]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted(rows)

    async def test_large_numbers_are_exact(self, ledger: Ledger) -> None:
        rows = [
            row("count", COUNT_MAX),
            row("more", 2**63 - 1),
            row("long", duration_ms=2**40, sequence=2**7),
            row("year", duration_ms=366 * 86_400_000, sequence=NOW_MS // (366 * 86_400_000)),
        ]
        await ledger.publish(rows, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted(rows)

    # ---- rejected rows

    async def test_a_refused_row_leaves_nothing_of_its_chunk(
        self, ledger: Ledger, place: LedgerPlace
    ) -> None:
        await ledger.publish([row("before", 1)], timeout_s=TIMEOUT_S)
        good = rows_of(2_000)  # enough for several statements, wherever the rejected row is
        for refused in place.refused_rows():
            with pytest.raises(RowsRejected):
                await ledger.publish([*good[:1_000], refused, *good[1_000:]], timeout_s=TIMEOUT_S)
            await ledger.publish([row("before", 1)], timeout_s=TIMEOUT_S)  # would commit an open transaction
            assert await held(ledger) == [row("before", 1)]
        await ledger.publish(good, timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted([row("before", 1), *good])

    # ---- changes

    async def test_a_cursor_brings_what_changed_since(self, ledger: Ledger, open_ledger: OpenLedger) -> None:
        writer = await open_ledger()
        await publish(writer, rows_of(20))
        _, cursor = await read_all(ledger)
        steps = [
            [row("user-3", 2), row("new")],
            [row("user-3", 3, region="iad")],
            [row("user-3", 5, region="iad"), row("user-4", 2)],
        ]
        for step in steps:
            await writer.publish(step, timeout_s=TIMEOUT_S)
            rows, cursor = await read_all(ledger, cursor)
            assert set(step) <= set(rows)

    async def test_a_cursor_of_an_empty_ledger_brings_everything_that_is_published_later(
        self, ledger: Ledger
    ) -> None:
        _, cursor = await read_all(ledger)
        await publish(ledger, [*rows_of(3), *rows_of(3, region="iad")])
        rows, _ = await read_all(ledger, cursor)
        assert sorted(rows) == sorted([*rows_of(3), *rows_of(3, region="iad")])

    async def test_a_cursor_may_be_used_again(self, ledger: Ledger) -> None:
        _, cursor = await read_all(ledger)
        await publish(ledger, rows_of(3))
        first, _ = await read_all(ledger, cursor)
        again, _ = await read_all(ledger, cursor)
        assert sorted(first) == sorted(again) == sorted(rows_of(3))

    async def test_two_readers_do_not_disturb_each_other(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        other = await open_ledger()
        _, here = await read_all(ledger)
        await publish(ledger, rows_of(3))
        rows, here = await read_all(ledger, here)
        assert sorted(rows) == sorted(rows_of(3))
        _, there = await read_all(other)
        await publish(other, rows_of(2, regional=2))
        for reader, cursor in ((ledger, here), (other, there)):
            rows, _ = await read_all(reader, cursor)
            assert set(rows_of(2, regional=2)) <= set(rows)

    async def test_the_lag_of_a_region_is_the_age_of_its_newest_row(self, ledger: Ledger) -> None:
        await publish(ledger, [row(), row(region="iad")])
        changes = await ledger.changes(None, now_ms=NOW_MS, timeout_s=TIMEOUT_S)
        assert set(changes.lag_ms) == {"fra", "iad"}
        assert all(0 <= lag_ms < 60_000 for lag_ms in changes.lag_ms.values())

    async def test_expired_rows_are_not_read(self, ledger: Ledger) -> None:
        _, cursor = await read_all(ledger)
        old, last, live = row(sequence=SEQUENCE - 3), row(sequence=SEQUENCE - 2), row(sequence=SEQUENCE - 1)
        assert old.expires_at_ms < last.expires_at_ms == NOW_MS < live.expires_at_ms
        await publish(ledger, [old, last, live])
        assert await held(ledger) == [live]
        rows, _ = await read_all(ledger, cursor)
        assert rows == [live]
        rows, _ = await read_all(ledger, now_ms=NOW_MS - 1)
        assert sorted(rows) == [last, live]

    @pytest.mark.slow
    async def test_more_rows_than_fit_in_one_answer_come_in_several(self, ledger: Ledger) -> None:
        _, start = await read_all(ledger)
        rows = [*rows_of(ANSWER_ROWS_MAX - 2_000), *rows_of(2_001, region="iad")]
        await publish(ledger, rows)
        for cursor in (None, start):
            changes = await ledger.changes(cursor, now_ms=NOW_MS, timeout_s=TIMEOUT_S)
            assert changes.more
            # A row raised between two reads is not missed.
            raised = [row("user-0", 2), row("user-1999", 2, region="iad"), row("late", 7, region="syd")]
            await publish(ledger, raised)
            rest, end = await read_all(ledger, changes.cursor)
            newer, _ = await read_all(ledger, end)
            assert merged([*changes.rows, *rest, *newer]) == merged([*rows, *raised])

    # ---- concurrency

    async def test_publishers_of_the_same_cells_all_succeed(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        chance = random.Random(7)
        publishers = [ledger, *[await open_ledger() for _ in range(5)]]
        sent: list[LedgerRow] = []

        async def work(publisher: Ledger, region: str) -> None:
            for turn in range(1, 6):
                rows = [
                    row(f"user-{cell}", chance.randrange(100) + turn, region=region)
                    for cell in chance.sample(range(150), 100)
                ]
                sent.extend(rows)
                await publisher.publish(rows, timeout_s=TIMEOUT_S)

        await asyncio.gather(
            *(work(one, ("fra", "iad")[number % 2]) for number, one in enumerate(publishers))
        )
        assert await held(ledger) == merged(sent)

    async def test_an_import_beside_publishers_misses_nothing(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        publishers = [await open_ledger() for _ in range(4)]
        seen: list[LedgerRow] = []
        sent: list[LedgerRow] = []

        async def work(publisher: Ledger, number: int) -> None:
            for turn in range(1, 16):
                rows = rows_of(20, regional=10 * turn + number, region=("fra", "iad")[number % 2])
                sent.extend(rows)
                await publisher.publish(rows, timeout_s=TIMEOUT_S)

        publishing = asyncio.gather(*(work(one, number) for number, one in enumerate(publishers)))
        cursor: str | None = None
        is_last = False
        while not is_last:
            await asyncio.sleep(0)  # a ledger in memory never waits: let the publishers run
            is_last = publishing.done()
            rows, cursor = await read_all(ledger, cursor)
            seen += rows
        await publishing
        assert merged(seen) == merged(sent)

    # ---- heartbeats, cleanup, overview

    async def test_a_heartbeat_answers_every_region_that_ever_beat(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        (first,) = await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
        assert first.region == "fra"
        beats = await (await open_ledger()).heartbeat("iad ", timeout_s=TIMEOUT_S)
        assert [beat.region for beat in beats] == ["fra", "iad "]
        assert beats[0] == first
        assert beats[1].beat_at_ms >= first.beat_at_ms
        again = await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
        assert again[0].beat_at_ms >= first.beat_at_ms
        assert again[1] == beats[1]

    async def test_publishing_is_not_a_heartbeat(self, ledger: Ledger) -> None:
        await publish(ledger, [row(region="fra")])
        assert [beat.region for beat in await ledger.heartbeat("iad", timeout_s=TIMEOUT_S)] == ["iad"]

    async def test_cleanup_deletes_what_expired_before_the_cutoff_and_no_more_than_its_bound(
        self, ledger: Ledger
    ) -> None:
        old = [row(f"user-{number}", sequence=SEQUENCE - 3) for number in range(7)]
        edge, live = row(sequence=SEQUENCE - 2), row()
        await publish(ledger, [*old, edge, live])
        cutoff_ms = edge.expires_at_ms
        deleted = [await ledger.cleanup(cutoff_ms, rows_max=3, timeout_s=TIMEOUT_S) for _ in range(4)]
        assert deleted == [3, 3, 1, 0]
        rows, _ = await read_all(ledger, now_ms=0)
        assert sorted(rows) == sorted([edge, live])

    async def test_cleanup_may_delete_many_rows(self, ledger: Ledger) -> None:
        await publish(ledger, [row(f"user-{number}", sequence=SEQUENCE - 3) for number in range(2_500)])
        assert await ledger.cleanup(NOW_MS, rows_max=2_200, timeout_s=TIMEOUT_S) == 2_200
        assert await ledger.cleanup(NOW_MS, rows_max=2_200, timeout_s=TIMEOUT_S) == 300

    async def test_a_row_that_was_cleaned_up_may_come_again(self, ledger: Ledger) -> None:
        _, cursor = await read_all(ledger)
        await publish(ledger, [row(regional=9)])
        assert await ledger.cleanup(NOW_MS * 2, rows_max=10, timeout_s=TIMEOUT_S) == 1
        await publish(ledger, [row(regional=2)])
        rows, _ = await read_all(ledger, cursor)
        assert rows == [row(regional=2)]

    async def test_the_overview_has_regions_rows_and_the_hottest_cells(self, ledger: Ledger) -> None:
        hot = [row("hot", 100), row("warm", 50, region="iad"), row("mild", 20)]
        await publish(ledger, [*hot, *rows_of(5), row("gone", 999, sequence=SEQUENCE - 2)])
        beats = await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
        overview = await ledger.overview(now_ms=NOW_MS, hottest_max=3, timeout_s=TIMEOUT_S)
        assert overview.regions == beats
        assert dict(overview.rows) == {"fra": 7, "iad": 1}
        assert overview.expired_rows == 1
        assert overview.hottest == hot
        assert overview.clock_ms >= beats[0].beat_at_ms

    async def test_resets_and_the_cells_after_them_are_rows_like_others(self, ledger: Ledger) -> None:
        name = cell_name(SEQUENCE, GENERATION, DURATION_MS)
        expires_at_ms = reset_expires_at_ms(GENERATION, DURATION_MS)
        made = row(regional=GENERATION, sequence=RESET_NAME)._replace(expires_at_ms=expires_at_ms)
        counted = row(regional=7)._replace(sequence=name)
        await ledger.publish([row(regional=9), made, counted], timeout_s=TIMEOUT_S)
        for again in (made._replace(regional=GENERATION - 1), counted._replace(regional=3)):
            await ledger.publish([again], timeout_s=TIMEOUT_S)
        assert await held(ledger) == sorted([row(regional=9), made, counted])
        later = made._replace(regional=GENERATION + 5)
        cursor = (await ledger.changes(None, now_ms=NOW_MS, timeout_s=TIMEOUT_S)).cursor
        await ledger.publish([later], timeout_s=TIMEOUT_S)
        changes = await ledger.changes(cursor, now_ms=NOW_MS, timeout_s=TIMEOUT_S)
        assert later in changes.rows
        overview = await ledger.overview(now_ms=NOW_MS, hottest_max=3, timeout_s=TIMEOUT_S)
        assert [one.regional for one in overview.hottest] == [9, 7], "a generation is not a count"

    async def test_the_overview_of_an_empty_ledger_is_empty(self, ledger: Ledger) -> None:
        overview = await ledger.overview(now_ms=NOW_MS, hottest_max=3, timeout_s=TIMEOUT_S)
        assert (overview.regions, dict(overview.rows), overview.expired_rows, overview.hottest) == (
            [],
            {},
            0,
            [],
        )

    # ---- close and statistics

    async def test_closing_twice_is_harmless_and_loses_nothing(
        self, place: LedgerPlace, open_ledger: OpenLedger
    ) -> None:
        ledger = place.ledger()
        await ledger.open(timeout_s=TIMEOUT_S)
        await publish(ledger, [row()])
        await ledger.close()
        await ledger.close()
        assert await held(await open_ledger()) == [row()]

    async def test_closing_what_was_never_opened_is_harmless(self, place: LedgerPlace) -> None:
        await place.ledger().close()

    async def test_statistics_count_statements_and_connections(self, ledger: Ledger) -> None:
        before = ledger.statistics()
        await publish(ledger, [row()])
        after = ledger.statistics()
        assert after["statements"] > before["statements"]
        assert after["connections_opened"] >= before["connections_opened"]
