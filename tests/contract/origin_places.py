"""The stores that origins are tested on, in the form that the contract suite needs."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from tidegate.adapters.redis.layout import Layout
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.model import Component
from tidegate.ports import Origin
from tidegate.testing import RedisCluster, RedisSentinel, RedisServer
from tidegate.testing.contracts.origin_remote import RemotePlace

# Counts keys without those that hold the region's name or its lease. KEYS leaves expired keys out, DBSIZE does not.
COUNT_CELLS = (
    "return #redis.call('KEYS', 'tg:*') - #redis.call('KEYS', 'tg:{???}:region') "
    "- #redis.call('KEYS', 'tg:{???}:lease')"
)


class SetClock:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.at_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms


class RedisPlace(RemotePlace):
    """One Redis."""

    def __init__(self, server: RedisServer, url: str | None = None) -> None:
        self.server = server
        self.url = url or server.url

    @property
    def masters(self) -> Sequence[RedisServer]:
        return [self.server]

    def node(self) -> Origin:
        return RedisOrigin(self.url)

    def wipe(self) -> None:
        for master in self.masters:
            master.command("FLUSHALL", "SYNC")

    def entries(self) -> int:
        return sum(int(str(master.command("EVAL", COUNT_CELLS, 0))) for master in self.masters)

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    def kill(self) -> None:
        self.server.kill()

    def start_empty(self) -> None:
        self.server.start()


class ClusterPlace(RedisPlace):
    """A Redis Cluster."""

    def __init__(self, cluster: RedisCluster) -> None:
        self.cluster = cluster
        hosts = ",".join(urlsplit(url).netloc for url in cluster.urls)
        super().__init__(cluster.nodes[0], f"redis+cluster://{hosts}")

    @property
    def masters(self) -> Sequence[RedisServer]:
        return self.cluster.nodes

    def freeze(self) -> None:
        self.cluster.freeze()

    def thaw(self) -> None:
        self.cluster.thaw()

    def kill(self) -> None:
        self.cluster.kill()

    def start_empty(self) -> None:
        self.cluster.recover()


class SentinelPlace(RedisPlace):
    """A master, its replica, and sentinels."""

    def __init__(self, group: RedisSentinel) -> None:
        self.group = group
        super().__init__(group.master, group.url)

    @property
    def masters(self) -> Sequence[RedisServer]:
        return [self.group.master]

    # Freezing or killing all of it, sentinels included, does not change which server is the master.

    def freeze(self) -> None:
        self.group.freeze()

    def thaw(self) -> None:
        self.group.thaw()

    def kill(self) -> None:
        self.group.kill()

    def start_empty(self) -> None:
        self.group.recover()


def key_of(cell: Component, *, prefix: str = "tg") -> bytes:
    """The key of a cell, as `Layout` makes it."""
    return Layout(prefix, script_sha="", spreads=False).key(cell.digest, cell.sequence)
