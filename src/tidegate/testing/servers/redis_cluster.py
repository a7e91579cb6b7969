"""A real Redis Cluster for tests: masters only, the 16,384 slots spread over them."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.testing.servers.redis import RedisServer, parse_info
from tidegate.testing.servers.redis_group import RedisGroup
from tidegate.testing.servers.reservation import PortReservation

SLOTS = 16_384
# How long a node may be silent before it is declared dead. Not lower, because on a busy machine a node may have to wait
# for the processor.
NODE_TIMEOUT_MS = 2_000


class ClusterNode(RedisServer):
    """A Redis that also listens on a cluster bus; its slots and peers survive `restart(empty=True)`."""

    kind = "redis-cluster"

    def __init__(self, *, node_timeout_ms: int) -> None:
        super().__init__()
        self._node_timeout_ms = node_timeout_ms
        self._bus: PortReservation | None = None

    @property
    def bus_port(self) -> int:
        """Reserved like the port: the default, port + 10,000, may be in use or too high."""
        if self._bus is None:
            self._bus = PortReservation()
        return self._bus.port

    def _configuration(self) -> dict[str, str]:
        return super()._configuration() | {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(self._node_timeout_ms),
            "cluster-port": str(self.bus_port),
            # Otherwise a node does not know its address until another node has contacted it.
            "cluster-announce-ip": self.host,
        }

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._bus is not None:
                self._bus.release()
                self._bus = None

    def is_part_of(self, size: int) -> bool:
        """Whether this node sees a working cluster of `size` nodes."""
        seen = parse_info(self.command("CLUSTER", "INFO"))
        return (
            seen["cluster_state"] == "ok"
            and seen["cluster_known_nodes"] == str(size)
            and seen["cluster_slots_ok"] == str(SLOTS)
        )


class RedisCluster(RedisGroup):
    """Masters at `urls`. A start takes two seconds, because a master waits that long before it accepts writes."""

    def __init__(self, masters: int = 3, *, node_timeout_ms: int = NODE_TIMEOUT_MS) -> None:
        self.nodes = [ClusterNode(node_timeout_ms=node_timeout_ms) for _ in range(masters)]

    @property
    def members(self) -> Sequence[ClusterNode]:
        return self.nodes

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def flush(self) -> None:
        """Remove keys, scripts and functions on all nodes."""
        for node in self.nodes:
            node.flush()

    def _assemble(self) -> None:
        count = len(self.nodes)
        for index, node in enumerate(self.nodes):
            first, last = SLOTS * index // count, SLOTS * (index + 1) // count - 1
            node.command("CLUSTER", "ADDSLOTSRANGE", first, last)
            # Distinct epochs from the start avoid rounds of gossip to resolve the conflict.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", node.host, node.port, node.bus_port)

    def _is_whole(self) -> bool:
        return all(node.is_part_of(len(self.nodes)) for node in self.nodes)
