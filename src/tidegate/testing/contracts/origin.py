"""The contract of `tidegate.ports.Origin` as tests, for every origin.

Subclasses define the fixture `place`. The suite does not know a particular store. `.origin_remote` adds tests for a
store in another process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Final, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.core.grants import CellPart, CellTotals, CreditRequest
from tidegate.core.model import Component, OriginReply, subject_digest
from tidegate.errors import RegionMismatch
from tidegate.ports import Origin
from tidegate.testing.contracts.origin_reserving import ReservingContract
from tidegate.testing.contracts.origin_resets import ResetsContract
from tidegate.testing.contracts.origin_sharing import SharingContract

__all__ = ["OpenNode", "OriginContract", "OriginPlace", "check_cancelled_calls", "component", "new_digest"]

REGION: Final = "fra"
# Generous where a reply is expected: the machine may be busy.
TIMEOUT_S: Final = 10.0
# In the year 2100: nothing expires during a test.
FAR_MS: Final = 4_102_444_800_000
DURATION_MS: Final = 86_400_000
SEQUENCE: Final = FAR_MS // DURATION_MS
COUNT_MAX: Final = 2**53
INT64_MAX: Final = 2**63 - 1

_numbers = itertools.count()


def new_digest() -> bytes:
    """A subject that no test has used before."""
    return blake2b(b"contract %d" % next(_numbers), digest_size=16).digest()


def component(
    digest: bytes, own: int = 0, *, writer: str = "node-a", sequence: int = 1, expires_at_ms: int = FAR_MS
) -> Component:
    return Component(digest, sequence, writer, own, expires_at_ms)


class OriginPlace(ABC):
    """The store behind the origins of one test."""

    @abstractmethod
    def node(self) -> Origin:
        """An origin for one more node on this store, not yet opened."""

    @abstractmethod
    def wipe(self) -> None:
        """Delete everything, including the name of the region."""

    @abstractmethod
    def entries(self) -> int:
        """How many cells or components the store holds, in any unit, without region names."""

    async def wait_until(self, at_ms: int, origin: Origin) -> None:
        """Wait until the clock of the store is past `at_ms`. A store with a manual clock sets it."""
        while (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms <= at_ms:  # noqa: ASYNC110 - a remote clock sets no event
            await asyncio.sleep(0.005)


class OpenNode(Protocol):
    """The type of the fixture `open_node`: an open origin for one more node, closed after the test."""

    async def __call__(self, region: str = REGION) -> Origin: ...


class OriginContract(ReservingContract, ResetsContract, SharingContract):
    """The tests for all origins."""

    @pytest.fixture
    def place(self) -> OriginPlace:
        raise NotImplementedError("define the fixture `place` in your subclass")

    @pytest.fixture
    async def open_node(self, place: OriginPlace) -> AsyncIterator[OpenNode]:
        opened: list[Origin] = []

        async def open_node(region: str = REGION) -> Origin:
            origin = place.node()
            opened.append(origin)
            await origin.open(region, timeout_s=TIMEOUT_S)
            return origin

        yield open_node
        for origin in opened:
            await origin.close()

    @pytest.fixture
    async def origin(self, open_node: OpenNode) -> Origin:
        return await open_node()

    # ---- merging and reading

    async def test_an_unknown_cell_answers_zero(self, origin: Origin) -> None:
        assert await origin.read([component(new_digest())], timeout_s=TIMEOUT_S) == [OriginReply(0, 0)]

    async def test_asking_for_nothing_answers_nothing(self, origin: Origin) -> None:
        assert await origin.read([], timeout_s=TIMEOUT_S) == []
        assert await origin.merge([], timeout_s=TIMEOUT_S) == []

    async def test_a_merge_answers_the_total_after_it_and_the_component_before_it(
        self, origin: Origin
    ) -> None:
        digest = new_digest()
        assert await self.merged(origin, component(digest, 5)) == OriginReply(5, 0)
        assert await self.merged(origin, component(digest, 7)) == OriginReply(7, 5)

    async def test_a_merge_keeps_the_maximum(self, origin: Origin) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 7))
        assert await self.merged(origin, component(digest, 3)) == OriginReply(7, 7)
        assert await self.read(origin, component(digest)) == OriginReply(7, 7)

    async def test_the_total_is_the_sum_of_all_writers(self, open_node: OpenNode) -> None:
        here, there = await open_node(), await open_node()
        digest = new_digest()
        assert await self.merged(here, component(digest, 5, writer="a")) == OriginReply(5, 0)
        assert await self.merged(there, component(digest, 8, writer="b")) == OriginReply(13, 0)
        assert await self.merged(here, component(digest, 6, writer="a")) == OriginReply(14, 5)
        assert await self.read(there, component(digest, writer="b")) == OriginReply(14, 8)
        assert await self.read(there, component(digest, writer="c")) == OriginReply(14, 0)

    async def test_repeating_a_merge_changes_nothing(self, origin: Origin) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 4))
        for _ in range(3):
            assert await self.merged(origin, component(digest, 4)) == OriginReply(4, 4)

    async def test_cells_of_one_subject_are_counted_separately(self, origin: Origin) -> None:
        digest = new_digest()
        cells = [
            component(digest, own, sequence=sequence)
            for own, sequence in ((1, 0), (2, 1), (3, 10), (4, 2**40))
        ]
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(own, 0) for own in (1, 2, 3, 4)]
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
            OriginReply(own, own) for own in (1, 2, 3, 4)
        ]

    async def test_answers_are_in_the_order_of_the_questions(self, origin: Origin) -> None:
        order = random.Random(1)
        cells = [component(new_digest(), own) for own in range(1, 301)]
        order.shuffle(cells)
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(cell.own, 0) for cell in cells]
        order.shuffle(cells)
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
            OriginReply(cell.own, cell.own) for cell in cells
        ]

    async def test_a_thousand_cells_go_in_one_call(self, origin: Origin) -> None:
        cells = [component(new_digest(), own) for own in range(1, 1_001)]
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(cell.own, 0) for cell in cells]
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [
            OriginReply(cell.own, cell.own) for cell in cells
        ]
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
            OriginReply(cell.own, cell.own) for cell in cells
        ]

    async def test_components_of_one_cell_in_one_call_are_merged_together(self, origin: Origin) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 1, writer="a"))
        # More than fits in one command: splitting the call must not split the cell.
        others = [component(new_digest(), 1) for _ in range(600)]
        cells = [
            component(digest, 2, writer="a"),
            *others,
            component(digest, 5, writer="b"),
            component(digest, 3, writer="a"),
        ]
        answers = await origin.merge(cells, timeout_s=TIMEOUT_S)
        assert (answers[0], answers[601], answers[602]) == (
            OriginReply(8, 1),
            OriginReply(8, 0),
            OriginReply(8, 1),
        )
        assert answers[1:601] == [OriginReply(1, 0)] * 600
        assert await self.read(origin, component(digest, writer="b")) == OriginReply(8, 5)

    @pytest.mark.parametrize(
        "own",
        [COUNT_MAX - 1, COUNT_MAX - 2, 10**15, 10**15 + 1, 123_456_789_012_345, 2**31, 2**32 + 1, 99_999],
    )
    async def test_totals_are_exact_up_to_2_to_the_53(self, origin: Origin, own: int) -> None:
        digest = new_digest()
        assert await self.merged(origin, component(digest, own - 1, writer="a")) == OriginReply(own - 1, 0)
        assert await self.merged(origin, component(digest, own, writer="a")) == OriginReply(own, own - 1)
        assert await self.merged(origin, component(digest, 1, writer="b")) == OriginReply(own + 1, 0)
        assert await self.read(origin, component(digest, writer="a")) == OriginReply(own + 1, own)

    async def test_counts_beyond_2_to_the_53_never_come_back_as_more_than_was_sent(
        self, origin: Origin
    ) -> None:
        huge, small = component(new_digest(), COUNT_MAX - 1), component(new_digest())
        await self.merged(origin, huge)
        held = [huge.own]
        for step, own in enumerate(
            (COUNT_MAX + 1, COUNT_MAX + 2, COUNT_MAX + 3, COUNT_MAX + 1_001, 2**60 + 1, INT64_MAX), start=1
        ):
            sent = [huge._replace(own=own), small._replace(own=step)]
            first, other = await origin.merge(sent, timeout_s=TIMEOUT_S)
            assert held[-1] <= first.component <= own, "more would be counted twice, less would be sent again"
            assert first.total >= COUNT_MAX
            assert other == OriginReply(step, step - 1)
            for call in (origin.merge, origin.read):
                again, other = await call(sent, timeout_s=TIMEOUT_S)
                assert again.component == own
                assert again.total >= COUNT_MAX
                assert other == OriginReply(step, step)
            held.append(own)

    async def test_what_others_counted_shows_beside_a_count_beyond_2_to_the_53(self, origin: Origin) -> None:
        huge = component(new_digest(), COUNT_MAX + 5, writer="a")
        await self.merged(origin, component(huge.digest, 1_000, writer="b"))
        reply = await self.merged(origin, huge)
        assert reply.component == 0
        assert 1_000 <= reply.total - huge.own <= 1_002, "of such a total the last digits may be rounded"
        seen = await self.read(origin, component(huge.digest, 1_000, writer="b"))
        assert seen.component == 1_000
        assert seen.total - 1_000 >= COUNT_MAX - 2

    async def test_huge_counts_of_several_writers_spoil_neither_their_cell_nor_others(
        self, origin: Origin
    ) -> None:
        await self.check_huge_counts(origin, writers=40)

    @settings(
        max_examples=30,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
        derandomize=True,
    )
    @given(
        deliveries=st.lists(
            st.lists(
                st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, COUNT_MAX // 8)),
                min_size=1,
                max_size=5,
            ),
            min_size=1,
            max_size=8,
        ),
        chance=st.randoms(use_true_random=False),
    )
    async def test_any_order_and_any_repetition_of_deliveries_gives_the_same_totals(
        self, origin: Origin, deliveries: list[list[tuple[int, str, int]]], chance: random.Random
    ) -> None:
        digests = [new_digest() for _ in range(3)]
        held: dict[tuple[int, str], int] = {}
        for cell, writer, own in itertools.chain.from_iterable(deliveries):
            held[cell, writer] = max(own, held.get((cell, writer), 0))
        totals = [sum(own for (cell, _), own in held.items() if cell == index) for index in range(3)]
        delivered = deliveries + chance.choices(deliveries, k=3)
        chance.shuffle(delivered)
        for call in delivered:
            answers = await origin.merge(
                [component(digests[cell], own, writer=writer) for cell, writer, own in call],
                timeout_s=TIMEOUT_S,
            )
            for (cell, writer, own), reply in zip(call, answers, strict=True):
                assert own <= reply.total <= totals[cell]
                assert reply.component <= held[cell, writer]
        wanted = [component(digest, writer="a") for digest in digests]
        assert await origin.read(wanted, timeout_s=TIMEOUT_S) == [
            OriginReply(totals[cell], held.get((cell, "a"), 0)) for cell in range(3)
        ]

    async def test_nodes_that_merge_at_the_same_time_lose_nothing(self, open_node: OpenNode) -> None:
        digests = [new_digest() for _ in range(20)]
        nodes = [await open_node() for _ in range(3)]

        async def count(node: Origin, writer: str) -> None:
            for own in range(1, 16):
                cells = [component(digest, own, writer=writer) for digest in digests]
                for reply in await node.merge(cells, timeout_s=TIMEOUT_S):
                    assert reply.component == own - 1
                    assert own <= reply.total <= own + 30

        await asyncio.gather(*(count(node, f"node-{index}") for index, node in enumerate(nodes)))
        wanted = [component(digest, writer="node-0") for digest in digests]
        assert await nodes[0].read(wanted, timeout_s=TIMEOUT_S) == [OriginReply(45, 15)] * 20

    async def test_calls_at_the_same_time_on_one_origin_get_their_own_answers(self, origin: Origin) -> None:
        cells = [component(new_digest(), own) for own in range(1, 41)]

        async def both(cell: Component) -> list[OriginReply]:
            first = await origin.merge([cell], timeout_s=TIMEOUT_S)
            return first + await origin.read([cell], timeout_s=TIMEOUT_S)

        answers = await asyncio.gather(*(both(cell) for cell in cells))
        assert answers == [[OriginReply(cell.own, 0), OriginReply(cell.own, cell.own)] for cell in cells]

    async def test_reading_writes_nothing(self, origin: Origin, place: OriginPlace) -> None:
        before = place.entries()
        cells = [component(new_digest(), own=9) for _ in range(50)]
        await origin.read(cells, timeout_s=TIMEOUT_S)
        assert place.entries() == before
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [OriginReply(0, 0)] * 50

    # ---- keys

    async def test_subjects_that_look_alike_never_share_a_cell(self, origin: Origin) -> None:
        names = [
            "a",
            "b",
            "a-b",
            "b-a",
            "a:b",
            "A",
            "á",
            "a\u0301",
            "a ",
            "a\x00",
            "\x00",
            "{a}",
            "}",
            "\r\n",
            "1",
            "11",
        ]
        subjects = [
            (workspace, namespace, identifier, duration_ms)
            for workspace, namespace, identifier in itertools.product(names[:6], names[2:8], names)
            for duration_ms in (1_000, 11_000)
        ]
        cells = [component(subject_digest(*subject), own) for own, subject in enumerate(subjects, start=1)]
        for start in range(0, len(cells), 500):
            await origin.merge(cells[start : start + 500], timeout_s=TIMEOUT_S)
        for start in range(0, len(cells), 500):
            part = cells[start : start + 500]
            assert await origin.read(part, timeout_s=TIMEOUT_S) == [
                OriginReply(cell.own, cell.own) for cell in part
            ]

    async def test_no_byte_of_a_digest_confuses_the_store(self, origin: Origin) -> None:
        digests = [bytes([byte]) * 16 for byte in range(256)]
        digests += [bytes([byte]) + b"}:{}:1\r\n$-1\r\n\x00\x00" for byte in range(256)]
        digests += [b":1:1:1:1:1:1:1:" + bytes([byte]) for byte in range(256)]
        cells = [
            component(digest, own, sequence=sequence)
            for own, (digest, sequence) in enumerate(itertools.product(digests, (1, 11)), start=1)
        ]
        assert len({(cell.digest, cell.sequence) for cell in cells}) == len(cells)
        for start in range(0, len(cells), 500):
            await origin.merge(cells[start : start + 500], timeout_s=TIMEOUT_S)
        for start in range(0, len(cells), 500):
            part = cells[start : start + 500]
            assert await origin.read(part, timeout_s=TIMEOUT_S) == [
                OriginReply(cell.own, cell.own) for cell in part
            ]

    async def test_any_name_of_a_writer_is_only_a_name(self, origin: Origin) -> None:
        digest = new_digest()
        writers = ["total", "0", "=", " ", "''", "a,b", "ä", "node-a~1", "x" * 200]
        cells = [component(digest, 2**index, writer=writer) for index, writer in enumerate(writers)]
        await origin.merge(cells, timeout_s=TIMEOUT_S)
        total = 2 ** len(writers) - 1
        assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
            OriginReply(total, cell.own) for cell in cells
        ]

    # ---- expiry

    async def test_a_cell_expires_by_itself(self, origin: Origin, place: OriginPlace) -> None:
        before = place.entries()
        now_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        short = component(new_digest(), 5, expires_at_ms=now_ms + 300)
        long = component(new_digest(), 6)
        assert await origin.merge([short, long], timeout_s=TIMEOUT_S) == [
            OriginReply(5, 0),
            OriginReply(6, 0),
        ]
        # Merging again must not remove the expiry.
        await origin.merge(
            [short._replace(own=7), short._replace(writer="node-b", own=1)], timeout_s=TIMEOUT_S
        )
        await place.wait_until(short.expires_at_ms, origin)
        assert await origin.read([short, long], timeout_s=TIMEOUT_S) == [OriginReply(0, 0), OriginReply(6, 6)]
        await self.merged(
            origin, component(long.digest, 7)
        )  # some stores remove expired cells when they write
        assert place.entries() == before + 1

    async def test_what_expired_before_it_was_merged_is_not_kept(self, origin: Origin) -> None:
        now_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        late = component(new_digest(), 5, expires_at_ms=now_ms - 1)
        assert (await self.merged(origin, late)).total == 5
        assert await self.read(origin, late) == OriginReply(0, 0)

    @pytest.mark.parametrize("duration_ms", [2**53, 2**60, 2**61, 2**62, INT64_MAX])
    async def test_an_expiry_that_no_clock_will_reach_is_taken(
        self, origin: Origin, duration_ms: int
    ) -> None:
        cells = [
            component(new_digest(), 1),
            component(new_digest(), 2, sequence=0, expires_at_ms=3 * duration_ms),
            component(new_digest(), 3),
        ]
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(own, 0) for own in (1, 2, 3)]
        more = [cell._replace(own=cell.own + 1) for cell in cells]
        assert await origin.merge(more, timeout_s=TIMEOUT_S) == [
            OriginReply(own + 1, own) for own in (1, 2, 3)
        ]
        assert await origin.read(more, timeout_s=TIMEOUT_S) == [OriginReply(own, own) for own in (2, 3, 4)]

    # ---- the region

    async def test_the_first_node_claims_the_origin_and_the_others_find_its_name(
        self, place: OriginPlace
    ) -> None:
        first, second = place.node(), place.node()
        pulse = await first.pulse(REGION, timeout_s=TIMEOUT_S)
        assert (pulse.region, pulse.was_empty) == (REGION, True)
        for node in (second, first, second):
            pulse = await node.pulse(REGION, timeout_s=TIMEOUT_S)
            assert (pulse.region, pulse.was_empty) == (REGION, False)
        await first.close()
        await second.close()

    async def test_an_origin_of_another_region_is_refused_with_both_names(
        self, place: OriginPlace, open_node: OpenNode
    ) -> None:
        ours = await open_node("fra")
        theirs = place.node()
        with pytest.raises(RegionMismatch) as refusal:
            await theirs.open("lhr", timeout_s=TIMEOUT_S)
        assert (refusal.value.configured, refusal.value.held) == ("lhr", "fra")
        assert (await theirs.pulse("lhr", timeout_s=TIMEOUT_S)).region == "fra"
        assert (await ours.pulse("fra", timeout_s=TIMEOUT_S)).region == "fra"
        await theirs.close()

    async def test_every_node_notices_a_wipe_once(self, place: OriginPlace, open_node: OpenNode) -> None:
        nodes = [await open_node() for _ in range(3)]
        place.wipe()
        for node in nodes:
            assert (await node.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        for node in nodes:
            assert not (await node.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty

    async def test_a_wiped_origin_is_recognised_by_the_component_before_the_merge(
        self, place: OriginPlace, origin: Origin
    ) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 5))
        place.wipe()
        assert await self.read(origin, component(digest)) == OriginReply(0, 0)
        assert await self.merged(origin, component(digest, 6)) == OriginReply(6, 0)

    async def test_counts_of_departed_nodes_that_a_wiped_origin_lost_come_back_once(
        self, place: OriginPlace, origin: Origin
    ) -> None:
        """One node has left 50. Another one, with 5 of its own, knows of it; a third one has counted nothing."""
        digest, part = new_digest(), CellPart(SEQUENCE, 0)
        await self.report(origin, digest, "gone", part._replace(own=50, known=50))
        reply = await self.report(origin, digest, "b", part._replace(own=5, known=5))
        assert reply.total == 55
        place.wipe()
        knows = part._replace(known=55, total=55, id=reply.id)
        assert (await self.report(origin, digest, "c", knows)).total == 55
        again = await self.report(origin, digest, "b", knows._replace(own=8, known=58, acked=5, sent=5))
        assert again.total == 58
        assert again.id > reply.id
        assert (await self.report(origin, digest, "c", knows)).total == 58
        assert (await self.report(origin, digest, "b", knows._replace(own=8, known=58, acked=5, sent=8))) == (
            again._replace(component=8)
        )

    async def test_an_older_copy_gets_another_name_and_what_it_lost_once(self, origin: Origin) -> None:
        """10 of a node that has left and 10 of b are in the copy; 5 more of each and 10 of c are lost."""
        digest, part = new_digest(), CellPart(SEQUENCE, 0)
        await self.report(origin, digest, "gone", part._replace(own=10, known=10))
        reply = await self.report(origin, digest, "b", part._replace(own=10, known=10))
        assert reply.total == 20
        knows = part._replace(known=40, total=40, id=reply.id)
        lost = knows._replace(own=15, acked=15, sent=15)
        again = await self.report(origin, digest, "b", lost)
        assert (again.total, again.component, again.id > reply.id) == (40, 10, True)
        # One that had read less, and reports its part again; and one that finds a lower total than it knows.
        late = knows._replace(own=10, known=35, acked=10, sent=10, total=35)
        assert (await self.report(origin, digest, "c", late)).total == 40
        copy = knows._replace(known=50, total=50, id=again.id)
        newer = await self.report(origin, digest, "d", copy)
        assert (newer.total, newer.id > again.id) == (50, True)
        assert (
            await self.report(origin, digest, "b", lost._replace(own=18, id=newer.id, total=50))
        ).total == 53

    async def test_the_row_of_the_ledger_raises_the_total_to_at_least_that_once(self, origin: Origin) -> None:
        digest, part = new_digest(), CellPart(SEQUENCE, 0)
        for writer in ("a", "b", "a"):
            assert (await self.report(origin, digest, writer, part._replace(known=60))).total == 60
        assert (await self.report(origin, digest, "a", part._replace(own=7, known=67))).total == 67
        # What the writer itself had published before the origin had it is not counted a second time.
        late = part._replace(own=5, known=5, published=5)
        assert (await self.report(origin, digest, "c", late)).total == 67

    async def test_a_message_that_arrives_after_its_writer_may_have_published_counts_nothing_of_its_row_twice(
        self, origin: Origin
    ) -> None:
        digest, part = new_digest(), CellPart(SEQUENCE, 0)
        time_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        assert (await self.report(origin, digest, "a", part._replace(known=60))).total == 60
        counted = part._replace(own=5, known=5)
        reply = await self.report(origin, digest, "b", counted, alone_at_ms=time_ms + 60_000)
        assert (reply.total, reply.component) == (65, 0), "in time"
        for alone_at_ms in (time_ms, 1):
            reply = await self.report(origin, digest, f"c{alone_at_ms}", counted, alone_at_ms=alone_at_ms)
            assert (reply.total, reply.component) == (65, 0), "late"
            reply = await self.report(origin, digest, f"c{alone_at_ms}", counted, alone_at_ms=alone_at_ms)
            assert (reply.total, reply.component) == (65, 5), "again"

    async def test_incarnations_of_a_subject_leave_one_entry_and_all_their_counts(
        self, place: OriginPlace, origin: Origin
    ) -> None:
        digest, part = new_digest(), CellPart(SEQUENCE, 2, 2)
        await self.report(origin, digest, "n", part)
        for life in (3, 20, 100):
            assert (await self.report(origin, digest, f"n~{life}", part)).component == 0
        entries = place.entries()
        for life in range(101, 120):
            await self.report(origin, digest, f"n~{life}", part)
        assert place.entries() == entries
        assert (await self.report(origin, digest, "n~20", part)).total == 46, (
            "a late message of an earlier life"
        )

    async def report(
        self, origin: Origin, digest: bytes, writer: str, part: CellPart, *, alone_at_ms: int = 0
    ) -> CellTotals:
        """Send one message about one cell, and return what the origin answers of it."""
        parts = (part, CellPart(part.sequence - 1, 0))
        self.number = getattr(self, "number", 0) + 1
        as_of_ms = part.sequence * DURATION_MS
        request = CreditRequest(digest, writer, self.number, DURATION_MS, parts, 100, as_of_ms, (), 0, 0, 1)
        request = request._replace(alone_at_ms=alone_at_ms)
        (reply,) = await origin.exchange([request], timeout_s=TIMEOUT_S)
        return reply.cells[0]

    async def test_the_clock_of_the_origin_does_not_go_back(self, origin: Origin) -> None:
        first = await origin.pulse(REGION, timeout_s=TIMEOUT_S)
        second = await origin.pulse(REGION, timeout_s=TIMEOUT_S)
        assert 0 < first.time_ms <= second.time_ms

    # ---- open and close

    async def test_a_cancelled_call_never_answers_a_later_question(self, origin: Origin) -> None:
        await check_cancelled_calls(origin, seed=1)

    async def test_closing_twice_is_harmless(self, open_node: OpenNode) -> None:
        origin = await open_node()
        await origin.close()
        await origin.close()

    async def test_closing_what_was_never_opened_is_harmless(self, place: OriginPlace) -> None:
        await place.node().close()

    async def test_statistics_count_commands_and_connections(self, origin: Origin) -> None:
        before = origin.statistics()
        await self.merged(origin, component(new_digest(), 1))
        after = origin.statistics()
        assert after["commands"] > before["commands"]
        assert after["connections_opened"] == before["connections_opened"]

    # ---- helpers

    @staticmethod
    async def check_huge_counts(origin: Origin, *, writers: int) -> None:
        """Counts in one cell of which two overflow 64 bits."""
        digest, small = new_digest(), component(new_digest(), 7)
        owns = itertools.islice(itertools.cycle((2**62, 2**62 + 1, INT64_MAX - 1, INT64_MAX)), writers)
        huge = [component(digest, own, writer=f"node-{index}") for index, own in enumerate(owns)]
        for one in huge[:3]:
            await origin.merge([one, small], timeout_s=TIMEOUT_S)
        for start in range(0, writers, 400):
            await origin.merge([*huge[start : start + 400], small], timeout_s=TIMEOUT_S)
        for call in (origin.read, origin.merge):
            for one in (huge[0], huge[-1]):
                reply, other = await call([one, small], timeout_s=TIMEOUT_S)
                assert reply.component == one.own
                assert reply.total > COUNT_MAX
                assert other == OriginReply(7, 7)

    @staticmethod
    async def merged(origin: Origin, one: Component) -> OriginReply:
        (reply,) = await origin.merge([one], timeout_s=TIMEOUT_S)
        return reply

    @staticmethod
    async def read(origin: Origin, one: Component) -> OriginReply:
        (reply,) = await origin.read([one], timeout_s=TIMEOUT_S)
        return reply


async def check_cancelled_calls(origin: Origin, *, seed: int, rounds: int = 20) -> None:
    """Cancel calls after a few iterations of the loop; every later reply must belong to its own call."""
    chance = random.Random(seed)
    cells = [component(new_digest(), own) for own in range(1, 31)]
    await origin.merge(cells, timeout_s=TIMEOUT_S)

    async def ask(cell: Component, *, merging: bool) -> None:
        call = origin.merge if merging else origin.read
        assert await call([cell], timeout_s=TIMEOUT_S) == [OriginReply(cell.own, cell.own)]

    for _ in range(rounds):
        tasks = [
            asyncio.ensure_future(ask(cell, merging=chance.random() < 0.5))
            for cell in chance.sample(cells, 10)
        ]
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        for task in tasks:
            if chance.random() < 0.6:
                task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            assert answer is None or isinstance(answer, asyncio.CancelledError), answer
    for cell in cells:
        await ask(cell, merging=False)
