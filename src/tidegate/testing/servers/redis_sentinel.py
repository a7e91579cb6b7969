"""A real Redis Sentinel set-up for tests: a master, its replica, and sentinels that fail over within seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from tidegate.testing.servers.process import START_TIMEOUT_S, ServerError, wait_until
from tidegate.testing.servers.redis import RedisServer
from tidegate.testing.servers.redis_group import RedisGroup
from tidegate.testing.servers.resp import RedisReplyError, Reply

# As for a cluster: a master that waits for the processor must not be replaced in the middle of a test.
DOWN_AFTER_MS = 1_000
FAILOVER_TIMEOUT_MS = 3_000  # after a failed attempt, the next one waits for twice that
# The periods of Sentinel, 1 to 10 s by default, determine how long a failover and the return of an old master take.
# ping-period must not be shorter: a replica is eligible only if its last INFO is younger than five ping periods, and
# while the master is down Sentinel sends INFO once a second, whatever info-period is.
PERIODS_MS = {
    "ping-period": 500,
    "info-period": 200,
    "publish-period": 200,
    "ask-period": 100,
    "tilt-period": 1_000,
}


class SentinelProcess(RedisServer):
    """One sentinel that monitors one master."""

    kind = "redis-sentinel"

    def __init__(self, master: RedisServer, *, master_name: str, quorum: int, down_after_ms: int) -> None:
        super().__init__()
        self._master = master
        self._master_name = master_name
        self._quorum = quorum
        self._down_after_ms = down_after_ms

    def _configuration(self) -> dict[str, str]:
        name = self._master_name
        return {
            "bind": self.host,
            "port": str(self.port),
            "daemonize": "no",
            "sentinel monitor": f"{name} {self._master.host} {self._master.port} {self._quorum}",
            "sentinel down-after-milliseconds": f"{name} {self._down_after_ms}",
            "sentinel failover-timeout": f"{name} {FAILOVER_TIMEOUT_MS}",
        }

    def _argv(self) -> list[str]:
        return [*super()._argv(), "--sentinel"]

    def _wipe(self) -> None:
        """A sentinel has no data, only its view of the others."""

    def save(self) -> None:
        """A sentinel saves its view by itself."""

    def start(self) -> Self:
        super().start()
        for name, period_ms in PERIODS_MS.items():
            self.command("SENTINEL", "DEBUG", name, period_ms)
        return self

    def flush(self) -> None:
        """Nothing to flush."""

    def master_port(self) -> int:
        """The port of the master according to this sentinel."""
        address = self.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master_name)
        if not isinstance(address, list):
            raise ServerError(f"the sentinel does not know {self._master_name}: {address!r}")
        return int(str(address[1]))

    def can_fail_over(self) -> bool:
        """Whether it has a quorum and knows a replica that follows the master."""
        try:
            self.command("SENTINEL", "CKQUORUM", self._master_name)
        except RedisReplyError:
            return False
        replicas = self.command("SENTINEL", "REPLICAS", self._master_name)
        known = [_as_fields(replica) for replica in replicas] if isinstance(replicas, list) else []
        return any(replica["flags"] == "slave" and replica["master-link-status"] == "ok" for replica in known)


class RedisSentinel(RedisGroup):
    """Roles change: `master` and `replica` return the current ones. `recover` does not restore the first roles."""

    def __init__(self, *, sentinels: int = 1, quorum: int = 1, down_after_ms: int = DOWN_AFTER_MS) -> None:
        self.master_name = "tidegate"
        first = RedisServer()
        self.nodes = [first, RedisServer(replica_of=first)]
        self.sentinels = [
            SentinelProcess(first, master_name=self.master_name, quorum=quorum, down_after_ms=down_after_ms)
            for _ in range(sentinels)
        ]

    @property
    def members(self) -> Sequence[RedisServer]:
        return [*self.nodes, *self.sentinels]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every sentinel, in the form of client libraries."""
        return [(sentinel.host, sentinel.port) for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        """The common notation `redis+sentinel://host:port,host:port/master_name/0`."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"redis+sentinel://{hosts}/{self.master_name}/0"

    @property
    def master(self) -> RedisServer:
        """The master according to the sentinels, whether it responds or not."""
        port = self.sentinels[0].master_port()
        return next(node for node in self.nodes if node.port == port)

    @property
    def replica(self) -> RedisServer:
        master = self.master
        return next(node for node in self.nodes if node is not master)

    def flush(self) -> None:
        """Remove keys, scripts and functions, and wait until the replica has done so too."""
        self.master.flush()
        self.wait_for_replica()
        for node in self.nodes:
            node.command("SCRIPT", "FLUSH", "SYNC")

    def wait_for_replica(self) -> None:
        """Wait until the replica has caught up. WAIT would only cover the writes of its own connection."""

        def is_done() -> bool:
            sent = self.master.info("replication")["master_repl_offset"]
            return self.replica.info("replication").get("slave_repl_offset") == sent

        wait_until(is_done, timeout_s=START_TIMEOUT_S, what="the replica to catch up")

    def wait_for_failover(self, old_master: RedisServer) -> RedisServer:
        """Wait until every sentinel names a new master that accepts writes, and return it."""

        def is_done() -> bool:
            if any(sentinel.master_port() == old_master.port for sentinel in self.sentinels):
                return False
            try:
                return self.master.info("replication")["role"] == "master"
            except (OSError, RedisReplyError):
                return False  # named, but it does not respond yet

        wait_until(is_done, timeout_s=START_TIMEOUT_S, what="the sentinels to name a new master")
        return self.master

    def _assemble(self) -> None:
        """Nothing to do: the configuration names the master."""

    def _is_whole(self) -> bool:
        if len({sentinel.master_port() for sentinel in self.sentinels}) != 1:
            return False
        master, replica = self.master, self.replica
        if master.info("replication")["role"] != "master":
            return False
        followed = replica.info("replication")
        return (
            followed["role"] == "slave"
            and followed["master_port"] == str(master.port)
            and followed["master_link_status"] == "up"
            and all(sentinel.can_fail_over() for sentinel in self.sentinels)
        )


def _as_fields(reply: Reply) -> dict[str, str]:
    """The fields of a flat list name, value, name, value."""
    words = [str(word) for word in reply] if isinstance(reply, list) else []
    return dict(zip(words[::2], words[1::2], strict=True))
