from __future__ import annotations

import pytest

from tidegate.testing import RedisCluster, RedisReplyError, RedisSentinel, wait_until

pytestmark = pytest.mark.server


def test_a_cluster_spreads_all_slots_and_every_node_knows_it(fresh_redis_cluster: RedisCluster) -> None:
    shards = fresh_redis_cluster.nodes[2].command("CLUSTER", "SLOTS")
    assert isinstance(shards, list)
    ports = {shard[2][1] for shard in shards if isinstance(shard, list) and isinstance(shard[2], list)}
    assert ports == {node.port for node in fresh_redis_cluster.nodes}
    assert len(fresh_redis_cluster.urls) == 3


def test_a_key_is_on_one_node_and_the_others_redirect_to_it(fresh_redis_cluster: RedisCluster) -> None:
    answers: list[object] = []
    for node in fresh_redis_cluster.nodes:
        try:
            answers.append(node.command("SET", "key", "1"))
        except RedisReplyError as error:
            answers.append(str(error).split()[0])
    assert sorted(map(str, answers)) == ["MOVED", "MOVED", "OK"]
    fresh_redis_cluster.flush()
    assert [node.command("DBSIZE") for node in fresh_redis_cluster.nodes] == [0, 0, 0]


def test_a_node_of_a_cluster_comes_back_to_its_slots_empty(fresh_redis_cluster: RedisCluster) -> None:
    node = fresh_redis_cluster.nodes[0]  # slots 0 to 5460: {a} would be 15495, {b} is 3300
    node.command("SET", "{b}", "1")
    node.restart(empty=True)
    fresh_redis_cluster.recover()
    assert node.command("GET", "{b}") is None


@pytest.mark.parametrize("hurt", ["kill", "freeze"])
def test_a_cluster_recovers_as_a_whole(fresh_redis_cluster: RedisCluster, hurt: str) -> None:
    urls = fresh_redis_cluster.urls
    getattr(fresh_redis_cluster, hurt)()
    fresh_redis_cluster.recover()
    assert fresh_redis_cluster.is_running
    assert fresh_redis_cluster.urls == urls
    assert fresh_redis_cluster.nodes[0].command("SET", "{b}", "1") == "OK"


def test_sentinels_make_the_replica_master_when_the_master_is_killed(
    fresh_redis_sentinel: RedisSentinel,
) -> None:
    old_master, replica = fresh_redis_sentinel.master, fresh_redis_sentinel.replica
    old_master.command("SET", "key", "1")
    fresh_redis_sentinel.wait_for_replica()
    old_master.kill()
    assert fresh_redis_sentinel.wait_for_failover(old_master) is replica
    assert replica.command("GET", "key") == "1"
    assert replica.command("SET", "key", "2") == "OK"


def test_a_flush_is_over_when_the_replica_is_empty_too(fresh_redis_sentinel: RedisSentinel) -> None:
    master, replica = fresh_redis_sentinel.master, fresh_redis_sentinel.replica
    for number in range(20):
        words = [word for key in range(1_000) for word in (f"key {key}", number)]
        master.command("MSET", *words)
        fresh_redis_sentinel.wait_for_replica()
        assert replica.command("DBSIZE") == 1_000
        fresh_redis_sentinel.flush()
        assert replica.command("DBSIZE") == 0


def test_sentinels_replace_a_frozen_master_and_take_it_back_as_replica(
    fresh_redis_sentinel: RedisSentinel,
) -> None:
    old_master = fresh_redis_sentinel.master
    old_master.freeze()
    new_master = fresh_redis_sentinel.wait_for_failover(old_master)
    fresh_redis_sentinel.recover()
    assert fresh_redis_sentinel.master is new_master
    assert fresh_redis_sentinel.replica is old_master
    assert old_master.info("replication")["role"] == "slave"


def test_flush_empties_the_replica_as_well(fresh_redis_sentinel: RedisSentinel) -> None:
    fresh_redis_sentinel.master.command("SET", "key", "1")
    replica = fresh_redis_sentinel.replica
    wait_until(lambda: replica.command("DBSIZE") == 1, timeout_s=20, what="the key to reach the replica")
    fresh_redis_sentinel.flush()
    assert [node.command("DBSIZE") for node in fresh_redis_sentinel.nodes] == [0, 0]


def test_the_url_of_a_sentinel_set_up_names_sentinels_and_master(fresh_redis_sentinel: RedisSentinel) -> None:
    [(host, port)] = fresh_redis_sentinel.addresses
    assert fresh_redis_sentinel.url == f"redis+sentinel://{host}:{port}/tidegate/0"


def test_three_sentinels_with_a_quorum_of_two_agree() -> None:
    with RedisSentinel(sentinels=3, quorum=2) as group:
        old_master = group.master
        old_master.kill()
        new_master = group.wait_for_failover(old_master)
        assert {sentinel.master_port() for sentinel in group.sentinels} == {new_master.port}
