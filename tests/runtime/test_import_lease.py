from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, Member, Region, clock, on_virtual_time
from tidegate import Limit
from tidegate.adapters.memory import MemoryLedger
from tidegate.core.model import LedgerRow
from tidegate.core.sharing import ImportState, Share
from tidegate.errors import DependencyTimeout
from tidegate.ports import Changes
from tidegate.sim.node_process import parts_of

THOUSAND = Limit("1000/minute", namespace="tests")
HUNDRED = Limit("100/minute", namespace="tests")
SEQUENCE = EPOCH_MS // 60_000


def row(identifier: str, regional: int, region: str = "ams") -> LedgerRow:
    return LedgerRow(
        "default", "tests", identifier, 60_000, SEQUENCE, region, regional, (SEQUENCE + 2) * 60_000
    )


async def fleet(
    count: int, kind: type[MemoryLedger] = MemoryLedger, **tuning: Any
) -> tuple[MemoryLedger, Region, list[Member]]:
    ledger = kind(clock=clock())
    region = Region(ledger=ledger, credit=True, **tuning)
    nodes = [region.node() for _ in range(count)]
    for node in nodes:
        await node.limiter.start()
    await asyncio.sleep(1)
    return ledger, region, nodes


def importers(nodes: list[Member]) -> list[Member]:
    return [node for node in nodes if node.limiter.statistics().is_importer]


def epoch_of(node: Member) -> int:
    """When the ledger last lost rows, as the node knows."""
    assert node.limiter._parts.node is not None
    return node.limiter._parts.node.ledger_sync.epoch


def imports(node: Member) -> int:
    assert node.ledger is not None
    return sum(call.operation == "changes" for call in node.ledger.calls)


def published(node: Member) -> list[LedgerRow]:
    assert node.ledger is not None
    return [
        one
        for call in node.ledger.calls
        if call.operation == "publish" and isinstance(call.argument, list)
        for one in call.argument
    ]


@on_virtual_time
async def test_one_node_imports_for_all_and_the_others_never_ask_the_ledger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ledger, region, nodes = await fleet(5)
    (holder,) = importers(nodes)
    # With the name that `tidegate ledger` shows.
    assert f"node {holder.limiter.statistics().node_id} imports for its region" in caplog.text
    before = [imports(node) for node in nodes]
    await asyncio.sleep(10)
    asked = [imports(node) - known for node, known in zip(nodes, before, strict=True)]
    # Four times a second, whether anything happens or not.
    assert 36 <= asked[nodes.index(holder)] <= 46
    assert sum(asked) == asked[nodes.index(holder)]
    ledger.publish_nowait([row("x", 400), row("x", 100, "nyc")])
    await asyncio.sleep(0.3)
    # A subject that no node of the region has ever used.
    for node in nodes:
        assert await node.seen("x", THOUSAND) == 500
    names = {node.limiter.statistics().importer for node in nodes}
    assert names == {holder.limiter.statistics().node_id}
    assert all((node.limiter.statistics().import_age_s or 9) < 1 for node in nodes)
    await region.stop()


@on_virtual_time
async def test_a_holder_that_dies_is_replaced_within_two_seconds_and_the_import_continues_from_its_cursor() -> (
    None
):
    ledger, region, nodes = await fleet(3)
    (holder,) = importers(nodes)
    ledger.publish_nowait([row(f"user {n}", 5) for n in range(50)])
    await asyncio.sleep(1)
    # It ends without a message: none of its calls reaches a store any more.
    holder.faults.fail()
    assert holder.failing_ledger is not None
    holder.failing_ledger.faults.fail()
    ledger.publish_nowait([row("x", 700)])
    rows_before = sum(node.limiter.statistics().import_rows for node in nodes if node is not holder)
    began_s = asyncio.get_running_loop().time()
    rest = [node for node in nodes if node is not holder]
    while not importers(rest):  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began_s <= 2.0
    await asyncio.sleep(0.3)
    assert await rest[0].seen("x", THOUSAND) == 700
    rows = sum(node.limiter.statistics().import_rows for node in rest) - rows_before
    assert rows == 1  # no full read
    await region.stop()


@on_virtual_time
async def test_a_holder_that_stops_hands_over_at_once() -> None:
    _, _, nodes = await fleet(3)
    (holder,) = importers(nodes)
    await holder.limiter.stop()
    await asyncio.sleep(0.5)
    rest = [node for node in nodes if node is not holder]
    assert len(importers(rest)) == 1
    for node in rest:
        await node.limiter.stop()


@on_virtual_time
async def test_a_node_that_lost_the_lease_with_the_ledger_notices_that_the_ledger_is_back() -> None:
    _, region, nodes = await fleet(2)
    (holder,) = importers(nodes)
    assert holder.failing_ledger is not None

    def is_well() -> bool:
        return all(health.ok for health in holder.limiter.health() if health.name == "ledger")

    holder.failing_ledger.faults.fail()
    await asyncio.sleep(4)
    assert importers(nodes) != [holder] and not is_well()
    holder.failing_ledger.faults.heal()
    await asyncio.sleep(8)
    assert importers(nodes) != [holder], "the other node keeps the lease"
    assert is_well()
    await region.stop()


@on_virtual_time
async def test_a_holder_that_cannot_reach_the_ledger_leaves_the_import_to_another() -> None:
    _, region, nodes = await fleet(3)
    (holder,) = importers(nodes)
    assert holder.failing_ledger is not None
    holder.failing_ledger.faults.fail()
    await asyncio.sleep(2)
    rest = [node for node in nodes if node is not holder]
    assert len(importers(rest)) == 1
    await region.stop()


@on_virtual_time
async def test_two_holders_are_harmless() -> None:
    ledger, region, nodes = await fleet(2)
    (holder,) = importers(nodes)
    region.store.drop_lease()
    other = next(node for node in nodes if node is not holder)
    import_lease = other.limiter._parts.node.import_lease  # type: ignore[union-attr]  # it has a node with a lease
    assert import_lease is not None
    await import_lease.run_once()
    assert len(importers(nodes)) == 2  # until the first one asks again
    ledger.publish_nowait([row("x", 400), row("x", 100, "nyc")])
    await asyncio.sleep(2)
    assert len(importers(nodes)) == 1
    for node in nodes:
        assert await node.seen("x", THOUSAND) == 500
    await region.stop()


@on_virtual_time
async def test_without_its_origin_every_node_imports_and_publishes_for_itself() -> None:
    ledger, region, nodes = await fleet(3)
    for node in nodes:
        node.faults.fail()
    await asyncio.sleep(4)
    ledger.publish_nowait([row("x", 300)])
    before = [imports(node) for node in nodes]
    await asyncio.sleep(12)
    assert all(imports(node) > known for node, known in zip(nodes, before, strict=True))
    for node in nodes:
        assert await node.seen("x", THOUSAND) == 300
    assert await nodes[0].accept("y", 60, HUNDRED) == 60
    await asyncio.sleep(6)
    assert [one.regional for one in ledger.rows() if one.identifier == "y"] == [60]
    for node in nodes:
        node.faults.heal()
    await asyncio.sleep(15)
    assert len(importers(nodes)) == 1
    await region.stop()


@on_virtual_time
async def test_each_change_is_published_by_one_node() -> None:
    ledger, region, nodes = await fleet(4)
    for _ in range(12):
        for node in nodes:
            assert await node.accept("x", 1, HUNDRED) == 1
        await asyncio.sleep(1)
    await asyncio.sleep(6)
    counts = [one.regional for node in nodes for one in published(node) if one.identifier == "x"]
    assert max(counts) == 48
    assert len(counts) == len(set(counts))  # no count was published twice
    assert len(counts) <= 14
    (written,) = [one for one in ledger.rows() if one.identifier == "x"]
    assert (written.region, written.regional) == ("fra", 48)
    await region.stop()


async def rows_written(count: int) -> list[list[LedgerRow]]:
    """The publishes of a region of `nodes` nodes, which count 10 a second for 10 s, next to another region."""
    ledger, region, nodes = await fleet(count)
    ledger.publish_nowait([row("x", 5)])
    for number in range(100):
        assert await nodes[number % count].accept("x", 1, THOUSAND) == 1
        ledger.publish_nowait([row("x", 6 + number)])
        await asyncio.sleep(0.1)
    await asyncio.sleep(6)
    counts = {one.region: one.regional for one in ledger.rows()}
    assert counts == {"ams": 105, "fra": 100}
    await region.stop()
    return [
        call.argument
        for node in nodes
        if node.ledger is not None
        for call in node.ledger.calls
        if call.operation == "publish" and isinstance(call.argument, list)
    ]


@on_virtual_time
async def test_a_cell_that_grows_while_it_is_imported_is_in_a_publish_once() -> None:
    publishes = await rows_written(1)
    assert {len(rows) for rows in publishes} == {1}
    assert len(publishes) <= 30


@on_virtual_time
async def test_rows_written_do_not_grow_with_nodes() -> None:
    assert sum(len(rows) for rows in await rows_written(8)) <= 30


@on_virtual_time
async def test_a_node_that_expects_growth_of_other_regions_asks_whether_it_came() -> None:
    ledger, region, nodes = await fleet(1)
    await nodes[0].accept("x", 1, HUNDRED)
    for number in range(1, 9):
        ledger.publish_nowait([row("x", 10 * number)])
        await asyncio.sleep(0.3)
        await nodes[0].accept("x", 1, HUNDRED)
    # They have stopped at 80, and only denials still send messages to the origin.
    passed = 0
    for _ in range(40):
        passed += await nodes[0].accept("x", 1, HUNDRED)
        await asyncio.sleep(0.05)
    assert nodes[0].limiter.statistics().denied > 0
    assert await nodes[0].seen("x", HUNDRED) == 100
    await region.stop()


@pytest.mark.parametrize("dies", [False, True])
@on_virtual_time
async def test_a_node_that_cannot_publish_or_dies_before_it_is_replaced(dies: bool) -> None:
    ledger, region, nodes = await fleet(3)
    assert await nodes[0].accept("x", 30, HUNDRED) == 30
    await asyncio.sleep(2)
    assert nodes[1].failing_ledger is not None
    nodes[1].failing_ledger.faults.fail("publish")
    # The origin has its counts, but its row is never published.
    assert await nodes[1].accept("x", 40, HUNDRED) == 40
    assert await nodes[0].accept("x", 1, HUNDRED) == 1
    if dies:
        nodes[1].faults.fail()
    # Otherwise it asks the origin again with every tick, a moment before the other node.
    await asyncio.sleep(15)
    (written,) = [one for one in ledger.rows() if one.identifier == "x"]
    assert written.regional == 71
    await region.stop()


@on_virtual_time
async def test_a_node_that_dies_before_it_publishes_is_responsible_for_two_seconds() -> None:
    ledger, region, nodes = await fleet(3)
    assert await nodes[0].accept("x", 30, HUNDRED) == 30
    await asyncio.sleep(2)
    assert nodes[1].failing_ledger is not None
    nodes[1].failing_ledger.faults.fail("publish")
    assert await nodes[1].accept("x", 40, HUNDRED) == 40
    nodes[1].faults.fail()
    await asyncio.sleep(2)
    assert await nodes[0].accept("x", 1, HUNDRED) == 1
    await asyncio.sleep(1)
    (written,) = [one for one in ledger.rows() if one.identifier == "x"]
    assert written.regional >= 70
    await region.stop()


@on_virtual_time
async def test_what_was_below_the_threshold_is_published_when_another_region_publishes() -> None:
    ledger, region, nodes = await fleet(2)
    assert await nodes[0].accept("x", 3, HUNDRED) == 3
    await asyncio.sleep(6)
    assert not [one for one in ledger.rows() if one.identifier == "x"]
    ledger.publish_nowait([row("x", 60)])
    await asyncio.sleep(1)
    assert {one.region: one.regional for one in ledger.rows() if one.identifier == "x"} == {
        "ams": 60,
        "fra": 3,
    }
    await region.stop()


@pytest.mark.parametrize("failing", ["origin", "ledger"])
@on_virtual_time
async def test_a_row_of_a_subject_that_no_node_has_in_memory_is_published_after_a_failure(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, region, (first, second) = await fleet(2)
    await first.accept("x", 5, HUNDRED)
    await asyncio.sleep(2)
    await first.limiter.stop()
    await asyncio.sleep(2)
    assert importers([second]) and not ledger.rows()
    assert second.failing_ledger is not None
    share = second.origin.share
    failures = 0

    async def share_or_fail(shares: Sequence[Share], **kwargs: Any) -> Any:
        nonlocal failures
        if failures == 0 and not any(one.counted for one in shares):
            failures += 1
            raise DependencyTimeout("the origin does not say who publishes")
        return await share(shares, **kwargs)

    if failing == "ledger":
        second.failing_ledger.faults.fail("publish", times=1)
    else:
        monkeypatch.setattr(second.origin, "share", share_or_fail)
    ledger.publish_nowait([row("x", 50)])
    await asyncio.sleep(10)
    assert failures or second.failing_ledger.faults.fired["publish"] == 1
    assert {one.region: one.regional for one in ledger.rows() if one.identifier == "x"} == {
        "ams": 50,
        "fra": 5,
    }
    await region.stop()


@on_virtual_time
async def test_credit_is_recalled_when_an_import_leaves_less_room() -> None:
    ledger, region, nodes = await fleet(2)
    # The first node asks often, and holds credit for the rest of the window.
    for _ in range(20):
        await nodes[0].accept("x", 1, HUNDRED)
        await asyncio.sleep(0.05)
    ledger.publish_nowait([row("x", 75)])
    await asyncio.sleep(0.4)
    assert await nodes[0].accept("x", 100, HUNDRED) + await nodes[1].accept("x", 100, HUNDRED) == 5
    await region.stop()


@on_virtual_time
async def test_a_denial_that_only_anticipation_caused_is_over_soon_after_other_regions_stopped() -> None:
    ledger, region, nodes = await fleet(2)
    for count in range(10, 90, 10):
        ledger.publish_nowait([row("x", count)])
        await asyncio.sleep(0.3)
        assert await nodes[0].accept("x", 1, HUNDRED)
    # 80 there and 8 here: 12 more fit if no other region continues.
    denial = await nodes[0].limiter.limit(HUNDRED, "x", 12)
    assert not denial and denial.effective <= 100
    assert denial.retry_after_ms is not None and denial.retry_after_ms <= 250
    before = len(nodes[0].origin.calls)
    began_s = asyncio.get_running_loop().time()
    assert await nodes[0].limiter.wait(HUNDRED, "x", 12, timeout=30)
    assert asyncio.get_running_loop().time() - began_s <= 1.25
    assert len(nodes[0].origin.calls) - before < 20
    await region.stop()


class FarLedger(MemoryLedger):
    """A ledger so far away that an import takes 300 ms."""

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        await asyncio.sleep(0.15)
        changes = await super().changes(cursor, now_ms=now_ms, timeout_s=timeout_s)
        await asyncio.sleep(0.15)
        return changes


@pytest.mark.parametrize(("kind", "least_ms", "most_ms"), [(MemoryLedger, 125, 150), (FarLedger, 300, 500)])
@on_virtual_time
async def test_nodes_know_how_old_counts_of_other_regions_are_when_they_receive_them(
    kind: type[MemoryLedger], least_ms: int, most_ms: int
) -> None:
    ledger, region, nodes = await fleet(2, kind=kind)
    for count in range(10, 90, 10):
        ledger.publish_nowait([row("x", count)])
        await asyncio.sleep(0.3)
    await asyncio.sleep(1)
    for node in nodes:
        lag_ms = node.limiter._parts.engine.global_view.import_lag_ms
        assert least_ms <= lag_ms <= most_ms
    await region.stop()


@on_virtual_time
async def test_a_client_that_repeats_a_request_denied_by_a_guess_costs_one_message_per_import() -> None:
    ledger, region, nodes = await fleet(1)
    for count in range(10, 90, 10):
        ledger.publish_nowait([row("x", count)])
        await asyncio.sleep(0.3)
        assert await nodes[0].accept("x", 1, HUNDRED)
    before = sum(call.operation == "exchange" for call in nodes[0].origin.calls)
    for _ in range(200):
        assert not await nodes[0].limiter.limit(HUNDRED, "x", 12)
        await asyncio.sleep(0.001)
    assert sum(call.operation == "exchange" for call in nodes[0].origin.calls) - before <= 3
    await region.stop()


@on_virtual_time
async def test_a_wiped_origin_gets_the_counts_of_other_regions_again() -> None:
    ledger, region, nodes = await fleet(2)
    ledger.publish_nowait([row("x", 400)])
    await asyncio.sleep(1)
    region.store.wipe()
    await asyncio.sleep(4)
    assert await nodes[0].seen("x", THOUSAND) == 400
    assert await nodes[1].seen("x", THOUSAND) == 400
    await region.stop()


@on_virtual_time
async def test_what_a_node_knows_of_its_region_from_the_ledger_only_is_reported_after_a_wipe() -> None:
    ledger = MemoryLedger(clock=clock())
    ledger.publish_nowait([row("x", 54, "fra")])
    region = Region(ledger=ledger, credit=True)
    first = region.node()
    await first.limiter.start()
    await asyncio.sleep(1)
    await first.limiter.stop()
    node = region.node()
    node.faults.fail()
    await node.limiter.start()
    await asyncio.sleep(6)  # it imports for itself
    node.faults.heal()
    await asyncio.sleep(12)
    region.store.wipe()
    await asyncio.sleep(3)
    assert [cell.total for cell in region.store.snapshot().cells.values()] == [54]
    await region.stop()


@on_virtual_time
async def test_a_region_that_restarts_with_an_empty_origin_counts_its_row_of_the_window_before() -> None:
    ledger = MemoryLedger(clock=clock())
    before = row("x", 60, "fra")._replace(sequence=SEQUENCE - 1, expires_at_ms=(SEQUENCE + 1) * 60_000)
    ledger.publish_nowait([before])
    region = Region(ledger=ledger, credit=True)
    node = region.node()
    await node.limiter.start()
    await asyncio.sleep(1)
    elapsed_ms = region.clock.now_ms() - SEQUENCE * 60_000
    assert await node.seen("x", HUNDRED) == 60 * (60_000 - elapsed_ms) // 60_000 > 20
    await region.stop()


@pytest.mark.parametrize("is_late", [False, True])
@on_virtual_time
async def test_a_holder_that_stops_before_it_knows_of_a_wipe_leaves_no_cursor_behind(is_late: bool) -> None:
    ledger, region, nodes = await fleet(2)
    ledger.publish_nowait([row("x", 400)])
    await asyncio.sleep(1)
    (holder,) = importers(nodes)
    (other,) = [node for node in nodes if node is not holder]
    await other.limiter.stop()  # no other node is left to notice it
    region.store.wipe()
    if is_late:
        # A request from before the wipe arrives after it. Then the holder asks again.
        region.store.lease_nowait(holder.limiter.statistics().node_id, 1_200, None)
        await asyncio.sleep(0.5)
    while region.store.lease_nowait("", 0, None).holder == "":  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    await holder.limiter.stop()
    after = region.node()
    await after.limiter.start()
    await asyncio.sleep(2)
    assert await after.seen("x", THOUSAND) == 400
    await after.limiter.stop()


@on_virtual_time
async def test_a_ledger_that_lost_its_rows_gets_them_again() -> None:
    ledger, region, nodes = await fleet(3)
    for node in nodes:
        await node.accept("x", 10, HUNDRED)
    await asyncio.sleep(2)
    ledger.wipe()
    # A full read within half a minute, and then the next tick.
    await asyncio.sleep(31)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    await region.stop()


@on_virtual_time
async def test_a_lost_row_that_the_origin_calls_published_is_published_again_after_it_did_not_answer() -> (
    None
):
    ledger, region, (node,) = await fleet(1, import_interval_ms=500, publish_interval_ms=2_000)
    await node.accept("x", 30, HUNDRED)
    await asyncio.sleep(3)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    epoch = epoch_of(node)
    ledger.wipe()
    # The loss is known, and no node has asked yet which node publishes the lost row. Other messages are answered.
    node.faults.fail("share")
    while epoch_of(node) == epoch:  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    for _ in range(4):
        await node.seen("x", HUNDRED)
        await asyncio.sleep(1)
    node.faults.heal()
    await asyncio.sleep(5)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    await region.stop()


@on_virtual_time
async def test_a_lost_row_of_a_counter_that_was_evicted_is_published_again_when_the_counter_returns() -> None:
    ledger, region, (node,) = await fleet(1, import_interval_ms=500, subjects_max=3)
    await node.accept("x", 30, HUNDRED)
    await asyncio.sleep(3)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    for n in range(9):
        await node.accept(f"user {n}", 1, HUNDRED)
        await asyncio.sleep(1)
    assert not parts_of(node.limiter).engine.subjects.find(HUNDRED.key, "x")
    epoch = epoch_of(node)
    ledger.wipe()
    while epoch_of(node) == epoch:  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    await asyncio.sleep(8)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == []
    assert await node.seen("x", HUNDRED) == 30
    await asyncio.sleep(8)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    await region.stop()


@on_virtual_time
async def test_a_node_waits_for_its_first_answer_before_it_publishes_for_itself() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, credit=True)
    node = region.node()
    node.faults.fail("lease", "exchange", "share")
    await node.limiter.start()
    await node.accept("x", 60, HUNDRED)
    await asyncio.sleep(2.2)
    # Its messages may only be late. If it published now, the origin would count the row and the messages.
    assert ledger.rows() == []
    await asyncio.sleep(6)
    assert [one.regional for one in ledger.rows()] == [60]
    await region.stop()


@on_virtual_time
async def test_a_message_says_from_when_on_its_node_publishes_for_itself() -> None:
    _, region, (node,) = await fleet(1)

    async def alone_in_ms(limit: Limit) -> int:
        node.origin.calls.clear()
        await node.accept("x", 1, limit)
        await asyncio.sleep(0.1)
        (first, *_) = [call.argument for call in node.origin.calls if call.operation == "exchange"]
        assert isinstance(first, list)
        alone_at_ms: int = first[0].alone_at_ms
        return alone_at_ms - region.clock.now_ms() if alone_at_ms else 0

    assert 1_800 < await alone_in_ms(HUNDRED) <= 2_400
    assert await alone_in_ms(Limit("10/second", namespace="tests")) == 0, "is never published"
    node.faults.fail("lease")
    await asyncio.sleep(3)
    assert await alone_in_ms(Limit("200/minute", namespace="other")) == 0, (
        "it does so already, and reports its rows"
    )
    await region.stop()


@on_virtual_time
async def test_rows_that_are_lost_just_before_a_full_read_are_published_again() -> None:
    ledger, region, nodes = await fleet(1, import_full_interval_ms=3_000, import_interval_ms=500)
    await nodes[0].accept("x", 30, HUNDRED)
    await asyncio.sleep(1)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    (holder,) = importers(nodes)
    assert holder.ledger is not None
    changes = holder.ledger.changes

    async def wipe_first(cursor: str | None, **kwargs: Any) -> Any:
        if cursor is None and ledger.rows():
            ledger.wipe()
        return await changes(cursor, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder.ledger, "changes", wipe_first)
        while ledger.rows():  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.01)
    await asyncio.sleep(10)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    await region.stop()


class NoticedByWhatWasRead(MemoryLedger):
    """Like a database server: a cursor from before the first row does not show that rows were lost."""

    async def changes(self, cursor: str | None, **kwargs: Any) -> Changes:
        found = await super().changes(cursor, **kwargs)
        return found._replace(lost=found.lost and cursor is not None and not cursor.startswith("0/"))


@on_virtual_time
async def test_a_node_whose_lease_ended_for_a_moment_finds_the_loss_of_rows_that_it_had_read() -> None:
    """How far it had read is newer than what the origin has of it."""
    ledger, region, (node,) = await fleet(1, NoticedByWhatWasRead)
    node.faults.fail("lease")
    await node.accept("x", 30, HUNDRED)
    await asyncio.sleep(1)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    while node.limiter.statistics().is_importer:  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    ledger.wipe()
    node.faults.heal()
    await asyncio.sleep(45)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    await region.stop()


@on_virtual_time
async def test_a_node_whose_lease_ended_reads_again_what_an_older_copy_of_the_origin_does_not_have() -> None:
    ledger, region, (node,) = await fleet(1)
    older = region.store._store.lease
    ledger.publish_nowait([row("x", 400)])
    await asyncio.sleep(1)
    assert node.limiter.statistics().import_rows == 1
    node.faults.fail("lease")
    while node.limiter.statistics().is_importer:  # noqa: ASYNC110 - another's state
        await asyncio.sleep(0.01)
    region.store._store.lease = older
    node.faults.heal()
    await asyncio.sleep(1)
    assert node.limiter.statistics().import_rows == 2
    await region.stop()


@on_virtual_time
async def test_the_next_holder_finds_a_loss_that_the_last_one_did_not_repair() -> None:
    ledger, _, nodes = await fleet(3)
    for node in nodes:
        await node.accept("x", 10, HUNDRED)
    await asyncio.sleep(2)
    ledger.wipe()
    await asyncio.sleep(1)  # the loss is seen, and the full read not due yet
    (holder,) = importers(nodes)
    await holder.limiter.stop()
    await asyncio.sleep(45)
    assert [one.regional for one in ledger.rows() if one.identifier == "x"] == [30]
    for node in nodes:
        if node is not holder:
            await node.limiter.stop()


@on_virtual_time
async def test_a_node_without_an_origin_imports_for_itself() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, credit=True)
    node = region.node(with_origin=False)
    await node.limiter.start()
    ledger.publish_nowait([row("x", 300)])
    await asyncio.sleep(6)
    assert await node.seen("x", THOUSAND) == 300
    assert node.limiter.statistics().importer == ""
    await region.stop()


@on_virtual_time
async def test_only_asking_who_imports_takes_and_changes_nothing() -> None:
    _, region, nodes = await fleet(1)
    held = region.store.lease_nowait("", 0, ImportState("wrong", 1, 1, 1, 1))
    assert held.holder == nodes[0].limiter.statistics().node_id
    assert held.state.cursor != "wrong"
    await region.stop()
    gone = region.store.lease_nowait("", 0, None)
    assert gone.holder == ""


@on_virtual_time
async def test_peeks_at_a_counter_that_is_used_up_show_what_other_regions_have_counted_since() -> None:
    """Requests for it are denied without a message, so no answer would report the new counts."""
    ledger, region, nodes = await fleet(2)
    ledger.publish_nowait([row("x", 120)])
    await asyncio.sleep(0.3)
    for node in nodes:
        assert await node.seen("x", HUNDRED) == 120
    ledger.publish_nowait([row("x", 150)])
    await asyncio.sleep(6)
    for node in nodes:
        await node.seen("x", HUNDRED)
    await asyncio.sleep(0.1)
    for node in nodes:
        assert await node.seen("x", HUNDRED) == 150
    messages = sum(node.limiter.statistics().credit_messages for node in nodes)
    for node in nodes:
        for _ in range(100):
            await node.seen("x", HUNDRED)
    assert sum(node.limiter.statistics().credit_messages for node in nodes) == messages
    await region.stop()
