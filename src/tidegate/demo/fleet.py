"""Regions of nodes: each is the `Service` of `tidegate serve` on a free port of 127.0.0.1, with a limiter of its own.

The nodes share one event loop and one process, so that a fleet starts in a second and cannot be left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.adapters.catalogs import open_catalog
from tidegate.core.model import Limit
from tidegate.demo.stores import Database, Origins
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.catalog.keys import ALL, IdSource
from tidegate.server.console.sessions import load_secret
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.first_start import create_key
from tidegate.server.process.service import Service
from tidegate.server.process.sockets import bind_sockets, close_sockets

__all__ = ["REGIONS", "WORKSPACE", "Fleet", "Node"]

REGIONS: Final = ("fra", "iad", "syd", "gru", "nrt", "sin", "lhr", "sfo", "bom", "jnb")
WORKSPACE: Final = "demo"
HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 30.0
# The last flush of a node whose origin or database is down gives up after this.
STOP_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True)
class Node:
    """One running node."""

    name: str
    region: str
    port: int
    service: Service
    limiter: AsyncLimiter

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def is_well(self, dependency: str) -> bool:
        """Whether this node reaches its `origin`, or the `ledger`."""
        return all(health.ok for health in self.limiter.health() if health.name == dependency)


class Fleet:
    """Start it after its stores, and stop it before them."""

    def __init__(
        self,
        regions: Sequence[str],
        nodes_per_region: int,
        origins: Origins,
        database: Database,
        directory: Path,
    ) -> None:
        self.regions: tuple[str, ...] = tuple(regions)
        self.origins = origins
        self.database = database
        self.nodes: list[Node] = []
        self.key: str = ""
        self._nodes_per_region = nodes_per_region
        self._directory = directory

    async def start(self) -> None:
        """Create a key, and start every node."""
        catalog = open_catalog(self.database.url(self.regions[0]))
        try:
            await catalog.open(timeout_s=TIMEOUT_S)
            key_id = f"key_{IdSource().take()}"
            self.key = await create_key(catalog, WORKSPACE, ALL, "tidegate demo", key_id)
        finally:
            await catalog.close()
        for region in self.regions:
            for number in range(1, self._nodes_per_region + 1):
                await self._start_node(region, f"{region}-{number}")

    async def _start_node(self, region: str, name: str) -> None:
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        config = ServerConfig(
            listen=f"{HOST}:0", data_dir=str(directory), region=region, ledger=self.database.url(region)
        )
        limiter = AsyncLimiter(
            region=region, origin=self.origins.connect(region), ledger=self.database.connect(region)
        )
        service = Service(config, limiter=limiter, console_secret=load_secret(directory))
        bound = bind_sockets(config, shared=False)
        # In the list first: a start that fails half-way is stopped with the others.
        self.nodes.append(Node(name, region, bound["listen"].getsockname()[1], service, limiter))
        try:
            await limiter.start()
            await service.start(bound)
        except BaseException:
            close_sockets(bound)
            raise

    async def limit_of(self, namespace: str, quota: int, duration_ms: int) -> Limit:
        """The limit that nodes apply to a namespace that exists."""
        catalog = open_catalog(self.database.url(self.regions[0]))
        try:
            rows = (await catalog.changes(0, timeout_s=TIMEOUT_S)).namespaces
        finally:
            await catalog.close()
        (found,) = [row.id for row in rows if (row.workspace_id, row.name) == (WORKSPACE, namespace)]
        return Limit(quota, duration_ms=duration_ms, namespace=found, workspace=WORKSPACE)

    async def views(self, limit: Limit, identifier: str, now_ms: int) -> dict[str, int]:
        """How much of `limit` is used according to each node, by the name of the node."""
        decisions = await asyncio.gather(
            *(node.limiter.peek(limit, identifier, now_ms=now_ms) for node in self.nodes)
        )
        return {node.name: decision.effective for node, decision in zip(self.nodes, decisions, strict=True)}

    async def heal(self) -> None:
        """Bring every origin and every connection back."""
        await self.origins.heal()
        await self.database.heal()

    async def stop(self) -> None:
        """Stop every node, within a few seconds also if nothing answers."""
        await asyncio.gather(*(self._stop_node(node) for node in self.nodes), return_exceptions=True)
        self.nodes = []

    @staticmethod
    async def _stop_node(node: Node) -> None:
        try:
            await node.service.stop(STOP_TIMEOUT_S)
        finally:
            await node.limiter.stop(STOP_TIMEOUT_S)
