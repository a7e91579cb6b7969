"""The contract of `Origin.share` and `Origin.lease` as tests: what the nodes of a region share about the ledger.

A part of `.origin`, whose fixtures they use.
"""

from __future__ import annotations

import asyncio
import random
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.core.grants import CellPart, CreditRequest, Run
from tidegate.core.model import DURATION_MS_MAX, TIME_MS_MAX
from tidegate.core.resets import Reset
from tidegate.core.sharing import DUE, NOT_DUE, PRESSED, ImportState, OriginUsage, Share, ShareReply
from tidegate.ports import Origin

if TYPE_CHECKING:
    from tidegate.testing.contracts.origin import OpenNode, OriginPlace

__all__ = ["SharingContract"]

TIMEOUT_S: Final = 10.0
REGION: Final = "fra"
DURATION_MS: Final = 60_000
# Long enough for a busy machine, short enough to wait for.
LIFE_MS: Final = 300

_numbers = count()


class Cells:
    """The cells of a new subject, as of the origin's clock."""

    def __init__(self, time_ms: int) -> None:
        self.digest = blake2b(b"sharing %d" % next(_numbers), digest_size=16).digest()
        self.sequence = time_ms // DURATION_MS
        self._number = 0

    def entry(self, region: str, counted: int, *, owner: str = "a", epoch: int = 0, back: int = 0) -> Share:
        return Share(self.digest, DURATION_MS, self.sequence - back, region, counted, owner, epoch)

    def message(
        self, own: int, *, writer: str = "a", quota: int = 100, want: int = 0, floor: int = 0, step: int = 0
    ) -> CreditRequest:
        self._number += 1
        cells = (CellPart(self.sequence, own), CellPart(self.sequence - 1, 0))
        # As late in the window as may be: the test must not depend on when it runs.
        as_of_ms = (self.sequence + 1) * DURATION_MS - 1
        runs = (Run(as_of_ms, 1, 1),) if want == 1 else ()
        return CreditRequest(
            self.digest,
            writer,
            self._number,
            DURATION_MS,
            cells,
            quota,
            as_of_ms,
            runs,
            want,
            0,
            5_000,
            floor,
            step,
        )


async def new_cells(origin: Origin) -> Cells:
    """Of a window that does not end during the test."""
    while True:
        time_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        if DURATION_MS - time_ms % DURATION_MS > 2_000:
            return Cells(time_ms)
        await asyncio.sleep(0.1)


async def share(origin: Origin, *entries: Share) -> list[ShareReply]:
    return await origin.share(entries, timeout_s=TIMEOUT_S)


class SharingContract:
    """The tests for all origins."""

    async def test_counts_of_other_regions_reach_every_message(self, open_node: OpenNode) -> None:
        importer, other = await open_node(), await open_node()
        cells = await new_cells(importer)
        await share(importer, cells.entry("us", 30), cells.entry("ap", 5), cells.entry("us", 7, back=1))
        (reply,) = await other.exchange([cells.message(0, writer="b", want=1_000)], timeout_s=TIMEOUT_S)
        assert [(one.foreign, one.regions) for one in reply.cells] == [(35, 2), (7, 1)]
        assert 58 <= reply.granted <= 65

    async def test_counts_of_other_regions_merge_by_maximum_in_any_order(self, origin: Origin) -> None:
        cells = await new_cells(origin)
        entries = [cells.entry(region, n) for region in ("us", "ap", "\N{SNOWMAN}") for n in (1, 5, 9)]
        random.Random(7).shuffle(entries)
        await share(origin, *entries)
        (last,) = await share(origin, entries[0])
        assert last.foreign == 27

    async def test_the_largest_numbers_of_a_row_keep_no_other_row_out(self, origin: Origin) -> None:
        """What the reader of ledger rows lets through: times up to the year 9999, counts of 64 bits."""
        cells, far = await new_cells(origin), await new_cells(origin)
        entries = [
            Share(far.digest, duration_ms, TIME_MS_MAX // duration_ms, "us", 2**63 - 1, "a", 0, generation)
            for duration_ms in (1, DURATION_MS, DURATION_MS_MAX)
            for generation in (0, TIME_MS_MAX)
        ]
        *_, last = await share(origin, *entries, cells.entry("us", 7))
        assert last.foreign == 7
        reset = Reset("acme", "email", "x", DURATION_MS_MAX, TIME_MS_MAX)
        assert reset in (await origin.resets([reset], since=0, timeout_s=TIMEOUT_S)).resets

    async def test_usage_names_each_region_and_how_long_ago_its_count_was_learned(
        self, open_node: OpenNode, place: OriginPlace
    ) -> None:
        importer, other = await open_node(), await open_node()
        cells = await new_cells(importer)
        await importer.exchange([cells.message(3)], timeout_s=TIMEOUT_S)
        await share(importer, cells.entry("us", 30), cells.entry("\N{SNOWMAN}", 5))
        learned_ms = (await importer.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        await place.wait_until(learned_ms + 20, importer)
        await share(importer, cells.entry("us", 31), cells.entry("\N{SNOWMAN}", 4))
        found = await other.usage(cells.digest, cells.sequence, timeout_s=TIMEOUT_S)
        ages = {region: age_ms for region, _, age_ms in found.regions}
        assert {region: count for region, count, _ in found.regions} == {"us": 31, "\N{SNOWMAN}": 5}
        assert found.total == 3
        assert 0 <= ages["us"] < ages["\N{SNOWMAN}"]

    async def test_usage_of_an_unknown_cell_is_nothing_and_keeps_nothing(
        self, origin: Origin, place: OriginPlace
    ) -> None:
        cells = await new_cells(origin)
        before = place.entries()
        found = await origin.usage(cells.digest, cells.sequence, timeout_s=TIMEOUT_S)
        assert found == OriginUsage(0, 0, [])
        assert place.entries() == before

    async def test_asking_about_an_unknown_cell_keeps_nothing(
        self, origin: Origin, place: OriginPlace
    ) -> None:
        cells = await new_cells(origin)
        before = place.entries()
        assert await share(origin, cells.entry("", 0)) == [ShareReply(0, 0, 0, NOT_DUE)]
        assert place.entries() == before
        assert await share(origin) == []

    async def test_exactly_one_node_has_to_publish_a_change(self, open_node: OpenNode) -> None:
        nodes = [await open_node() for _ in range(4)]
        cells = await new_cells(nodes[0])
        replies = await asyncio.gather(
            *(
                node.exchange([cells.message(10, writer=f"n{i}", floor=25)], timeout_s=TIMEOUT_S)
                for i, node in enumerate(nodes)
            )
        )
        dues = [reply.cells[0].due for (reply,) in replies]
        assert sorted(dues) == [NOT_DUE, NOT_DUE, NOT_DUE, PRESSED]
        # The node that has to publish gets the same answer again, and no other does.
        owner = dues.index(PRESSED)
        for i, node in enumerate(nodes):
            (again,) = await share(node, cells.entry("", 0, owner=f"n{i}"))
            assert again.due == (DUE if i == owner else NOT_DUE)
            assert again.total == 40

    async def test_what_was_published_is_due_no_more_and_the_rest_stays_with_its_publisher(
        self, origin: Origin
    ) -> None:
        cells = await new_cells(origin)
        (reply,) = await origin.exchange([cells.message(10, floor=5)], timeout_s=TIMEOUT_S)
        assert reply.cells[0].due == PRESSED
        await origin.exchange([cells.message(12, writer="b", floor=5)], timeout_s=TIMEOUT_S)
        assert await share(origin, cells.entry("", 10)) == [ShareReply(22, 0, 10, DUE)]
        assert await share(origin, cells.entry("", 22)) == [ShareReply(22, 0, 22, NOT_DUE)]
        (reply,) = await origin.exchange([cells.message(10, floor=5)], timeout_s=TIMEOUT_S)
        assert (reply.cells[0].published, reply.cells[0].due) == (22, NOT_DUE)

    async def test_growth_by_the_step_goes_to_the_node_that_reports_it_after_the_pace(
        self, origin: Origin, place: OriginPlace
    ) -> None:
        cells = await new_cells(origin)

        async def due(own: int, writer: str) -> int:
            message = cells.message(own, writer=writer, floor=5, step=8)
            (reply,) = await origin.exchange([message], timeout_s=TIMEOUT_S)
            return reply.cells[0].due

        assert [await due(10, "a"), await due(3, "b")] == [PRESSED, NOT_DUE]
        now_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        await place.wait_until(now_ms + origin.rules.publish_pace_ms, origin)
        assert [await due(9, "b"), await due(11, "a")] == [PRESSED, NOT_DUE]

    async def test_a_cell_that_another_region_published_has_no_threshold(self, origin: Origin) -> None:
        cells = await new_cells(origin)
        (reply,) = await origin.exchange([cells.message(3, floor=50)], timeout_s=TIMEOUT_S)
        assert reply.cells[0].due == NOT_DUE
        # The importer has to publish what was below the threshold.
        (shared,) = await share(origin, cells.entry("us", 9, owner="importer"))
        assert (shared.due, shared.total) == (PRESSED, 3)

    async def test_a_publisher_that_dies_is_not_waited_for(self, origin: Origin, place: OriginPlace) -> None:
        cells = await new_cells(origin)
        (reply,) = await origin.exchange([cells.message(10, floor=5)], timeout_s=TIMEOUT_S)
        assert reply.cells[0].due == PRESSED
        now_ms = (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).time_ms
        await place.wait_until(now_ms + origin.rules.publish_ms, origin)
        (shared,) = await share(origin, cells.entry("", 0, owner="b"))
        assert shared.due != NOT_DUE

    async def test_a_ledger_that_lost_rows_gets_them_again(self, origin: Origin) -> None:
        cells = await new_cells(origin)
        await origin.exchange([cells.message(10, floor=5)], timeout_s=TIMEOUT_S)
        await share(origin, cells.entry("", 10))
        (shared,) = await share(origin, cells.entry("", 0, owner="b", epoch=1))
        assert (shared.published, shared.total) == (0, 10)
        assert shared.due != NOT_DUE
        # What was published before the loss does not count.
        (shared,) = await share(origin, cells.entry("", 10, owner="c", epoch=0))
        assert shared.published == 0

    async def test_a_message_of_a_node_that_knows_of_lost_rows_makes_it_publish_them(
        self, origin: Origin
    ) -> None:
        cells = await new_cells(origin)
        await origin.exchange([cells.message(10, floor=5)], timeout_s=TIMEOUT_S)
        await share(origin, cells.entry("", 10, epoch=1))
        found = []
        for floor, epoch in ((5, 0), (5, 1), (0, 2), (11, 2), (5, 2), (5, 2), (5, 1)):
            message = cells.message(0, writer="b", floor=floor)._replace(epoch=epoch)
            (reply,) = await origin.exchange([message], timeout_s=TIMEOUT_S)
            found.append((reply.cells[0].published, reply.cells[0].due))
        known, lost = (10, NOT_DUE), (0, NOT_DUE)
        assert found == [known, known, lost, lost, (0, PRESSED), (0, DUE), (0, DUE)]
        (shared,) = await share(origin, cells.entry("", 10, owner="b", epoch=2))
        assert (shared.published, shared.due) == (10, NOT_DUE)

    async def test_credit_that_an_import_leaves_no_room_for_is_asked_back(self, open_node: OpenNode) -> None:
        importer, holder = await open_node(), await open_node()
        recalled: asyncio.Future[tuple[bytes, str]] = asyncio.get_running_loop().create_future()

        def on_recall(digest: bytes, writer: str) -> None:
            if not recalled.done():
                recalled.set_result((digest, writer))

        listening = asyncio.create_task(holder.listen("b", on_recall))
        async with asyncio.timeout(TIMEOUT_S):
            while not holder.can_be_recalled:  # noqa: ASYNC110 - another's state
                await asyncio.sleep(0.01)
            cells = await new_cells(holder)
            (reply,) = await holder.exchange(
                [cells.message(0, writer="b~1", want=60, quota=100)], timeout_s=TIMEOUT_S
            )
            assert reply.granted == 60
            await share(importer, cells.entry("us", 40))
            assert not recalled.done()
            await share(importer, cells.entry("us", 41))
            assert await recalled == (cells.digest, "b~1")
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    async def test_only_one_node_takes_the_lease(self, open_node: OpenNode) -> None:
        nodes = [await open_node() for _ in range(4)]
        leases = await asyncio.gather(
            *(node.lease(f"n{i}", life_ms=60_000, timeout_s=TIMEOUT_S) for i, node in enumerate(nodes))
        )
        assert len({lease.holder for lease in leases}) == 1
        holder = int(leases[0].holder[1:])
        state = ImportState('{"places":"\N{SNOWMAN}"}', 5, 4, 3, 2, 1, leases[holder].since_ms)
        renewed = await nodes[holder].lease(f"n{holder}", life_ms=60_000, state=state, timeout_s=TIMEOUT_S)
        assert (renewed.holder, renewed.since_ms) == (f"n{holder}", leases[holder].since_ms)
        other = (holder + 1) % 4
        # Only the holder says how far the import has come; any node, that the origin has lost counts.
        seen = await nodes[other].lease(
            f"n{other}", life_ms=60_000, state=ImportState("no", 9, 9, 9, 9), timeout_s=TIMEOUT_S
        )
        assert (seen.holder, seen.state, seen.lost_at_ms) == (f"n{holder}", state, -1)
        lost = await nodes[other].lease(f"n{other}", life_ms=60_000, has_lost=True, timeout_s=TIMEOUT_S)
        renewed = await nodes[holder].lease(f"n{holder}", life_ms=60_000, timeout_s=TIMEOUT_S)
        assert seen.time_ms <= renewed.lost_at_ms == lost.lost_at_ms <= renewed.time_ms

    async def test_a_lease_that_is_given_back_is_free_at_once(self, open_node: OpenNode) -> None:
        first, second = await open_node(), await open_node()
        taken = await first.lease("a", life_ms=60_000, timeout_s=TIMEOUT_S)
        state = ImportState("here", 1, 1, 2, 0, 7, taken.since_ms)
        await first.lease("a", life_ms=0, state=state, timeout_s=TIMEOUT_S)
        # A node that does not hold it takes nothing from the one that does.
        assert (await second.lease("b", life_ms=60_000, timeout_s=TIMEOUT_S)).holder == "b"
        assert (await first.lease("a", life_ms=0, timeout_s=TIMEOUT_S)).holder == "b"
        lease = await second.lease("b", life_ms=60_000, timeout_s=TIMEOUT_S)
        assert (lease.holder, lease.state) == ("b", state._replace(since_ms=lease.since_ms))

    async def test_a_lease_that_is_not_renewed_goes_to_the_next_with_its_cursor(
        self, open_node: OpenNode, place: OriginPlace
    ) -> None:
        first, second = await open_node(), await open_node()
        taken = await first.lease("a", life_ms=60_000, timeout_s=TIMEOUT_S)
        state = ImportState("here", 1, 1, 2, 0, 7, taken.since_ms)
        held = await first.lease("a", life_ms=LIFE_MS, state=state, timeout_s=TIMEOUT_S)
        await place.wait_until(held.until_ms, second)
        taken = await second.lease("b", life_ms=60_000, timeout_s=TIMEOUT_S)
        assert (taken.holder, taken.state) == ("b", state._replace(since_ms=taken.since_ms))
        assert taken.since_ms >= held.until_ms
        # The one that froze and came back sees that it is another's.
        assert (await first.lease("a", life_ms=LIFE_MS, state=state, timeout_s=TIMEOUT_S)).holder == "b"

    async def test_a_wiped_origin_has_no_lease_and_no_cursor(
        self, open_node: OpenNode, place: OriginPlace
    ) -> None:
        first, second = await open_node(), await open_node()
        held = await first.lease("a", life_ms=60_000, timeout_s=TIMEOUT_S)
        state = ImportState("here", 1, 1, 2, 0, 7, held.since_ms)
        held = await first.lease("a", life_ms=60_000, state=state, timeout_s=TIMEOUT_S)
        assert held.state == state
        place.wipe()
        taken = await second.lease("b", life_ms=60_000, timeout_s=TIMEOUT_S)
        assert (taken.holder, taken.state) == ("b", ImportState(since_ms=taken.since_ms))

    async def test_a_holder_keeps_nothing_that_it_knew_under_an_earlier_lease(
        self, open_node: OpenNode, place: OriginPlace
    ) -> None:
        node = await open_node()
        held = await node.lease("a", life_ms=60_000, timeout_s=TIMEOUT_S)
        place.wipe()
        await place.wait_until(held.time_ms + 1, node)
        # A question of before, which comes late or whose answer is lost.
        await node.lease("a", life_ms=60_000, timeout_s=TIMEOUT_S)
        state = ImportState("here", 1, 1, 2, 0, 7, held.since_ms)
        again = await node.lease("a", life_ms=60_000, state=state, timeout_s=TIMEOUT_S)
        assert (again.holder, again.state) == ("a", ImportState(since_ms=again.since_ms))
