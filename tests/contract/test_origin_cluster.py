from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.contract.origin_places import ClusterPlace
from tidegate.adapters.redis.cluster import owners_of
from tidegate.adapters.redis.layout import BUCKETS, SLOTS, TAGS, Layout, slot_of
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.model import Component, OriginReply
from tidegate.errors import ConfigurationError, DependencyError, DependencyUnavailable, RegionMismatch
from tidegate.ports import Origin
from tidegate.testing import RedisCluster, wait_until
from tidegate.testing.contracts.origin import REGION, TIMEOUT_S, OpenNode, component, new_digest
from tidegate.testing.contracts.origin_remote import RemoteOriginContract, expect_timeout
from tidegate.testing.servers.redis import RedisServer
from tidegate.testing.servers.redis_cluster import ClusterNode

pytestmark = pytest.mark.server


class TestRedisClusterOrigin(RemoteOriginContract):
    @pytest.fixture
    def place(self, fresh_redis_cluster: RedisCluster) -> ClusterPlace:
        return ClusterPlace(fresh_redis_cluster)

    async def test_cells_spread_evenly_over_all_masters(self, origin: Origin, place: ClusterPlace) -> None:
        cells = [component(new_digest(), 1) for _ in range(3_000)]
        for start in range(0, 3_000, 500):
            await origin.merge(cells[start : start + 500], timeout_s=TIMEOUT_S)
        shares = [int(str(master.command("DBSIZE"))) / 3_000 for master in place.masters]
        assert all(0.28 < share < 0.39 for share in shares), shares

    async def test_a_call_is_one_round_trip_whatever_number_of_masters_it_concerns(
        self, origin: Origin
    ) -> None:
        cells = [component(new_digest(), 1) for _ in range(250)]
        await origin.merge(cells, timeout_s=TIMEOUT_S)
        before = origin.statistics()
        await origin.merge(cells, timeout_s=TIMEOUT_S)
        await origin.read(cells, timeout_s=TIMEOUT_S)
        after = origin.statistics()
        assert after["round_trips"] - before["round_trips"] == 2
        assert after["commands"] - before["commands"] <= BUCKETS + 250
        assert after["redirections"] == 0

    async def test_any_one_node_is_enough_to_find_the_others(self, place: ClusterPlace) -> None:
        for node in place.cluster.nodes:
            origin = RedisOrigin(f"redis+cluster://127.0.0.1:1,{node.host}:{node.port}")
            cells = [component(new_digest(), 2) for _ in range(100)]
            assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(2, 0)] * 100
            await origin.close()

    @pytest.mark.parametrize("wiped", [0, 1, 2])
    async def test_every_node_notices_that_one_master_was_wiped(
        self, place: ClusterPlace, open_node: OpenNode, wiped: int
    ) -> None:
        nodes = [await open_node() for _ in range(2)]
        place.masters[wiped].flush()
        for node in nodes:
            assert (await node.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        for node in nodes:
            assert not (await node.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty

    @pytest.mark.parametrize("wiped", [0, 1, 2])
    async def test_another_region_cannot_take_a_cluster_of_which_one_master_was_wiped(
        self, place: ClusterPlace, origin: Origin, wiped: int
    ) -> None:
        place.masters[wiped].flush()
        other = place.node()
        with pytest.raises(RegionMismatch):
            await other.open("lhr", timeout_s=TIMEOUT_S)
        await other.close()
        assert (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).region == REGION

    async def test_a_script_that_one_master_forgot_is_loaded_again(
        self, origin: Origin, place: ClusterPlace
    ) -> None:
        cells = [component(new_digest(), 3) for _ in range(200)]
        await origin.merge(cells, timeout_s=TIMEOUT_S)
        place.masters[1].command("SCRIPT", "FLUSH", "SYNC")
        assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(3, 3)] * 200

    async def test_a_frozen_master_delays_only_its_own_cells(
        self, origin: Origin, place: ClusterPlace
    ) -> None:
        cells = {bucket: self.cell_in(bucket) for bucket in range(BUCKETS)}
        await origin.merge(list(cells.values()), timeout_s=TIMEOUT_S)
        frozen, alive = cells[0], cells[BUCKETS - 1]
        place.masters[0].freeze()
        try:
            await expect_timeout(lambda timeout_s: origin.read([frozen], timeout_s=timeout_s))
            await expect_timeout(lambda timeout_s: origin.merge([frozen, alive], timeout_s=timeout_s))
            assert await self.read(origin, alive) == OriginReply(1, 1)
        finally:
            place.masters[0].thaw()
        await self.recovered(origin, frozen)
        assert await self.read(origin, frozen) == OriginReply(1, 1)

    async def test_a_slot_that_moves_to_another_master_is_followed(
        self, origin: Origin, place: ClusterPlace
    ) -> None:
        """Old cells and new ones, in one call: before, during and after the move."""
        bucket = 3
        source, target = place.cluster.nodes[0], place.cluster.nodes[2]
        old = [self.cell_in(bucket, own=5, number=number) for number in range(20)]
        await origin.merge(old, timeout_s=TIMEOUT_S)
        move = SlotMove(place.cluster, slot_of(TAGS[bucket]), source, target)
        move.begin()
        try:
            new = [self.cell_in(bucket, own=6, number=number) for number in range(20, 40)]
            grown = [cell._replace(own=7) for cell in old[:10]]
            assert await origin.merge([*new, *grown, *old[10:]], timeout_s=TIMEOUT_S) == (
                [OriginReply(6, 0)] * 20 + [OriginReply(7, 5)] * 10 + [OriginReply(5, 5)] * 10
            )
            move.migrate_keys()
            assert await origin.merge([*old, *new], timeout_s=TIMEOUT_S) == (
                [OriginReply(7, 7)] * 10 + [OriginReply(5, 5)] * 10 + [OriginReply(6, 6)] * 20
            )
        finally:
            move.finish()
        redirected = origin.statistics()["redirections"]
        assert redirected > 0
        assert await origin.merge([*old, *new], timeout_s=TIMEOUT_S) == (
            [OriginReply(7, 7)] * 10 + [OriginReply(5, 5)] * 10 + [OriginReply(6, 6)] * 20
        )
        assert await origin.read([new[0], old[0]], timeout_s=TIMEOUT_S) == [
            OriginReply(6, 6),
            OriginReply(7, 7),
        ]
        learned = origin.statistics()["redirections"]
        await origin.merge([*old, *new], timeout_s=TIMEOUT_S)
        assert origin.statistics()["redirections"] == learned, "the new master is known by now"
        back = SlotMove(
            place.cluster, move.slot, target, source
        )  # the cluster is that of the other tests too
        back.begin()
        back.finish()
        assert await origin.merge(new, timeout_s=TIMEOUT_S) == [OriginReply(6, 6)] * 20

    async def test_a_slot_without_a_master_is_unavailable(self, origin: Origin, place: ClusterPlace) -> None:
        node = place.cluster.nodes[0]
        slot = slot_of(TAGS[0])
        cell = self.cell_in(0)
        node.command("CLUSTER", "DELSLOTS", slot)
        try:
            with pytest.raises(DependencyUnavailable, match="CLUSTERDOWN"):
                await self.merged(origin, cell)
        finally:
            node.command("CLUSTER", "ADDSLOTS", slot)
            place.cluster.recover()
        await self.recovered(origin, cell)

    async def test_a_cluster_node_under_a_url_for_a_single_server_is_refused(
        self, place: ClusterPlace
    ) -> None:
        origin = RedisOrigin(place.cluster.urls[0])
        with pytest.raises(ConfigurationError, match=r"redis\+cluster://"):
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    def test_the_slots_of_the_tags_are_those_of_the_server(self, place: ClusterPlace) -> None:
        layout = Layout("tg", script_sha="", spreads=True)
        node = place.masters[0]
        for bucket, tag in enumerate(TAGS):
            digest = bytes([bucket]) + b"{x}{}}{{"
            key = layout.key(digest + b"0" * 7, 1).decode()
            assert node.command("CLUSTER", "KEYSLOT", key) == slot_of(tag)

    @staticmethod
    def cell_in(bucket: int, *, own: int = 1, number: int = 0) -> Component:
        """A cell of the bucket."""
        return component(bytes([bucket]) + new_digest()[:13] + number.to_bytes(2, "big"), own)


class SlotMove:
    """A slot on its way from one master to another, step by step, as `redis-cli --cluster reshard` does it."""

    def __init__(self, cluster: RedisCluster, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        self.cluster, self.slot, self.source, self.target = cluster, slot, source, target

    def begin(self) -> None:
        self.target.command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", _id(self.source))
        self.source.command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", _id(self.target))

    def migrate_keys(self) -> None:
        # In Lua, because keys hold bytes that are not text.
        script = f"""
            local keys = redis.call('CLUSTER', 'GETKEYSINSLOT', {self.slot}, 1000)
            if #keys == 0 then return 0 end
            redis.call('MIGRATE', '{self.target.host}', {self.target.port}, '', 0, 5000, 'KEYS', unpack(keys))
            return #keys
        """
        self.source.command("EVAL", script, 0)

    def finish(self) -> None:
        self.migrate_keys()
        for node in (self.target, self.source, *self.cluster.nodes):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", _id(self.target))


def _id(node: RedisServer) -> str:
    return str(node.command("CLUSTER", "MYID"))


def test_tags_lie_evenly_over_the_slots() -> None:
    slots = [slot_of(tag) for tag in TAGS]
    assert len(TAGS) == BUCKETS == len(set(TAGS))
    assert {len(tag) for tag in TAGS} == {3}, "keys of equal length never share a prefix by accident"
    step = SLOTS // BUCKETS
    assert all(abs(slot - (step * bucket + step // 2)) <= 1 for bucket, slot in enumerate(slots))


@pytest.mark.parametrize("masters", range(1, 22))
def test_every_master_of_a_cluster_gets_its_share_of_the_buckets(masters: int) -> None:
    bounds = [SLOTS * index // masters for index in range(masters + 1)]
    slots = [
        [first, last - 1, [b"host", 1000 + index, b"id"]]
        for index, (first, last) in enumerate(pairwise(bounds))
    ]
    shares = Counter(owners_of(slots, ("asked", 1)))
    assert len(shares) == masters
    assert max(shares.values()) - min(shares.values()) <= 1


def test_a_description_without_a_host_means_the_node_that_was_asked() -> None:
    slots = [[0, 8191, [b"", 7001, b"id"]], [8192, 16383, [None, 7002, b"id"]]]
    owners = owners_of(slots, ("asked", 7001))
    assert set(owners) == {("asked", 7001), ("asked", 7002)}


@pytest.fixture
def cluster_with_replica() -> Iterator[tuple[RedisCluster, ClusterNode]]:
    """Three masters, and a replica of the first."""
    with RedisCluster(node_timeout_ms=1_000) as cluster, ClusterNode(node_timeout_ms=1_000) as replica:
        master = cluster.nodes[0]
        replica.command("CLUSTER", "MEET", master.host, master.port, master.bus_port)
        wait_until(
            lambda: (
                _id(master) in str(replica.command("CLUSTER", "NODES"))
                and all(node.is_part_of(4) for node in (*cluster.nodes, replica))
            ),
            timeout_s=TIMEOUT_S,
            what="the replica to know the cluster",
        )
        replica.command("CLUSTER", "REPLICATE", _id(master))
        wait_until(
            lambda: replica.info("replication").get("master_link_status") == "up",
            timeout_s=TIMEOUT_S,
            what="the replica to follow",
        )
        yield cluster, replica


async def test_a_replica_that_takes_over_is_followed(
    cluster_with_replica: tuple[RedisCluster, ClusterNode],
) -> None:
    cluster, replica = cluster_with_replica
    origin = ClusterPlace(cluster).node()
    await origin.open(REGION, timeout_s=TIMEOUT_S)
    cells = [component(new_digest(), 5) for _ in range(200)]
    await origin.merge(cells, timeout_s=TIMEOUT_S)
    written = int(cluster.nodes[0].info("replication")["master_repl_offset"])
    wait_until(
        lambda: int(replica.info("replication")["slave_repl_offset"]) >= written,
        timeout_s=TIMEOUT_S,
        what="the replica to catch up",
    )
    cluster.nodes[0].kill()
    with pytest.raises(DependencyError):
        await origin.merge(cells, timeout_s=0.5)
    wait_until(
        lambda: replica.info("replication")["role"] == "master",
        timeout_s=30,
        what="the replica to become a master",
    )
    for cell in cells:  # the other masters learn of the new one a little later than it does itself
        await RemoteOriginContract.recovered(origin, cell)
    assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(5, 5)] * 200
    pulse = await origin.pulse(REGION, timeout_s=TIMEOUT_S)
    assert (pulse.region, pulse.was_empty) == (REGION, True), "it has the name, and may have been behind"
    assert not (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
    await origin.close()
