from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.origin_places import SentinelPlace
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.model import OriginReply
from tidegate.errors import ConfigurationError, DependencyError, DependencyUnavailable
from tidegate.ports import Origin
from tidegate.testing import RedisSentinel, RedisServer, wait_until
from tidegate.testing.contracts.origin import REGION, TIMEOUT_S, OpenNode, component, new_digest
from tidegate.testing.contracts.origin_remote import RemoteOriginContract, expect_timeout

pytestmark = pytest.mark.server


class TestRedisSentinelOrigin(RemoteOriginContract):
    @pytest.fixture
    def place(self, fresh_redis_sentinel: RedisSentinel) -> SentinelPlace:
        return SentinelPlace(fresh_redis_sentinel)

    async def test_the_replica_that_takes_over_is_found(
        self, place: SentinelPlace, open_node: OpenNode
    ) -> None:
        here, there = await open_node(), await open_node()
        digest = new_digest()
        await self.merged(here, component(digest, 5, writer="here"))
        await self.merged(there, component(digest, 8, writer="there"))
        old = place.group.master
        _replicated(place.group)
        old.kill()
        with pytest.raises(DependencyError):
            await self.merged(here, component(digest, 6, writer="here"))
        place.group.wait_for_failover(old)
        probe = component(new_digest(), 1)
        for node in (here, there):
            await self.recovered(node, probe)
            pulse = await node.pulse(REGION, timeout_s=TIMEOUT_S)
            assert (pulse.region, pulse.was_empty) == (REGION, True), (
                "it has the name, and may have been behind"
            )
            assert not (await node.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        assert await self.merged(here, component(digest, 6, writer="here")) == OriginReply(14, 5)
        assert await self.merged(there, component(digest, 9, writer="there")) == OriginReply(15, 8)

    async def test_a_replica_that_was_behind_is_recognised_by_the_component_before_the_merge(
        self, place: SentinelPlace, open_node: OpenNode
    ) -> None:
        here, there = await open_node(), await open_node()
        digest = new_digest()
        await self.merged(here, component(digest, 5, writer="here"))
        await self.merged(there, component(digest, 8, writer="there"))
        old, replica = place.group.master, place.group.replica
        _replicated(place.group)
        replica.save()
        replica.kill()
        assert await self.merged(here, component(digest, 50, writer="here")) == OriginReply(58, 5)
        old.kill()
        replica.start()  # with the copy it has saved
        place.group.wait_for_failover(old)
        await self.recovered(here, component(new_digest(), 1))
        assert await self.read(here, component(digest, writer="here")) == OriginReply(13, 5), "an older copy"
        assert await self.merged(here, component(digest, 50, writer="here")) == OriginReply(58, 5), (
            "and healed"
        )

    async def test_after_a_frozen_master_the_new_one_is_used(
        self, place: SentinelPlace, open_node: OpenNode
    ) -> None:
        origin = await open_node()
        cell = component(new_digest(), 5)
        await self.merged(origin, cell)
        old = place.group.master
        _replicated(place.group)
        old.freeze()
        try:
            await expect_timeout(lambda timeout_s: origin.merge([cell], timeout_s=timeout_s))
            place.group.wait_for_failover(old)
            await self.recovered(origin, cell)
            assert await self.read(origin, cell) == OriginReply(5, 5)
        finally:
            old.thaw()

    async def test_after_a_demoted_master_the_new_one_is_used(
        self, place: SentinelPlace, origin: Origin
    ) -> None:
        cell = component(new_digest(), 5)
        await self.merged(origin, cell)
        old = place.group.master
        _replicated(place.group)
        place.group.sentinels[0].command("SENTINEL", "FAILOVER", place.group.master_name)
        place.group.wait_for_failover(old)
        wait_until(
            lambda: _is_replica(old),
            timeout_s=TIMEOUT_S,
            what="the old master to become a replica",
        )
        await self.recovered(origin, cell._replace(own=6))
        assert await self.read(origin, cell) == OriginReply(6, 6)
        new = RedisOrigin(place.group.master.url)
        assert await self.read(new, cell) == OriginReply(6, 6), (
            "it went to the new master, not to the old one"
        )
        await new.close()

    async def test_a_dead_sentinel_among_them_does_not_matter(self, place: SentinelPlace) -> None:
        origin = RedisOrigin(place.url.replace("://", "://127.0.0.1:1,"))
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_the_database_may_be_an_option(self, place: SentinelPlace) -> None:
        origin = RedisOrigin(f"{place.url.removesuffix('/0')}?db=2")
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        assert place.group.master.info("keyspace").keys() == {"db2"}
        await origin.close()

    async def test_a_service_that_no_sentinel_knows_is_a_configuration_error(
        self, place: SentinelPlace
    ) -> None:
        origin = RedisOrigin(place.url.replace("/tidegate/0", "/somebody"))
        with pytest.raises(ConfigurationError, match="no service named 'somebody'"):
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_a_sentinel_under_a_url_for_a_single_server_is_refused(self, place: SentinelPlace) -> None:
        origin = RedisOrigin(place.group.sentinels[0].url)
        with pytest.raises(ConfigurationError):
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_sentinels_that_are_all_dead_are_named(self) -> None:
        origin = RedisOrigin("redis+sentinel://127.0.0.1:1,127.0.0.1:2/tidegate")
        with pytest.raises(DependencyUnavailable, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2"):
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()


def _is_replica(server: RedisServer) -> bool:
    try:
        return server.info("replication")["role"] == "slave"
    except ConnectionError:
        # A master that becomes a replica closes the connections of its clients.
        return False


def _replicated(group: RedisSentinel) -> None:
    """Return when the replica has everything that the master has now."""
    written = int(group.master.info("replication")["master_repl_offset"])
    replica = group.replica
    wait_until(
        lambda: int(replica.info("replication")["slave_repl_offset"]) >= written,
        timeout_s=TIMEOUT_S,
        what="the replica to catch up",
    )


@pytest.fixture
def three_sentinels() -> Iterator[RedisSentinel]:
    with RedisSentinel(sentinels=3, quorum=2) as group:
        yield group


async def test_a_frozen_sentinel_is_outvoted(three_sentinels: RedisSentinel) -> None:
    origin = RedisOrigin(three_sentinels.url)
    three_sentinels.sentinels[0].freeze()
    await origin.open(REGION, timeout_s=TIMEOUT_S)
    cell = component(new_digest(), 5)
    await RemoteOriginContract.recovered(origin, cell)
    await origin.close()
