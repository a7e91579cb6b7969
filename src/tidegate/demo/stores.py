"""Where the counts of a demo are kept, and the faults that a key injects there.

Embedded: origins in the memory of this process, and a SQLite file as the database. On request real servers: a Redis for
each region, and a MariaDB or MySQL that each region reaches through a TCP proxy of its own, which can be cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tidegate.adapters.memory import MemoryOrigin
from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.errors import ConfigurationError
from tidegate.ports import Ledger, Origin
from tidegate.testing.faults import FailingLedger, FailingOrigin
from tidegate.testing.proxy import FaultProxy, Faults
from tidegate.testing.servers import MariaDBServer, MissingBinary, MySQLServer, RedisServer
from tidegate.testing.servers.mysql_family import MySQLFamilyServer

__all__ = ["Database", "EmbeddedDatabase", "EmbeddedOrigins", "MySQLDatabase", "Origins", "RedisOrigins"]

DATABASE_FILE = "fleet.db"


class Origins(Protocol):
    """One origin for each region."""

    description: str
    killed: set[str]
    """The regions whose origin is down."""

    async def start(self, regions: Sequence[str]) -> None: ...

    def connect(self, region: str) -> str | Origin:
        """The origin of a region, for one node."""
        ...

    async def kill(self, region: str) -> None:
        """It answers nothing more, and loses all counts."""
        ...

    async def heal(self) -> None:
        """All of them answer again; those that were killed are empty."""
        ...

    async def close(self) -> None: ...


class Database(Protocol):
    """The database that all regions share."""

    description: str
    cut: set[str]
    """The regions that cannot reach it."""

    async def start(self, regions: Sequence[str]) -> None:
        """Also creates the schema."""
        ...

    def url(self, region: str) -> str:
        """For the catalog of a node in this region."""
        ...

    def connect(self, region: str) -> str | Ledger:
        """The ledger, for one node of a region."""
        ...

    async def partition(self, region: str) -> None:
        """Cut a region off."""
        ...

    async def heal(self) -> None: ...

    async def close(self) -> None: ...


class EmbeddedOrigins:
    """In the memory of this process. A killed one refuses every call and has forgotten everything."""

    def __init__(self) -> None:
        self.description: str = "origins in memory"
        self.killed: set[str] = set()
        self._stores: dict[str, MemoryOrigin] = {}
        self._connections: dict[str, list[FailingOrigin]] = {}

    async def start(self, regions: Sequence[str]) -> None:
        self._stores = {region: MemoryOrigin() for region in regions}
        self._connections = {region: [] for region in regions}

    def connect(self, region: str) -> Origin:
        connection = FailingOrigin(self._stores[region].another())
        self._connections[region].append(connection)
        return connection

    async def kill(self, region: str) -> None:
        for connection in self._connections[region]:
            connection.faults.fail()
        self._stores[region].wipe()
        self.killed.add(region)

    async def heal(self) -> None:
        for region in self.killed:
            for connection in self._connections[region]:
                connection.faults.heal()
        self.killed.clear()

    async def close(self) -> None:
        """Nothing to release."""


class RedisOrigins:
    """A Redis process for each region. `kill` is SIGKILL; a Redis that comes back is empty."""

    def __init__(self) -> None:
        self.description: str = "Redis"
        self.killed: set[str] = set()
        self._servers: dict[str, RedisServer] = {}

    async def start(self, regions: Sequence[str]) -> None:
        for region in regions:
            self._servers[region] = RedisServer()
            await _started(self._servers[region].start, "--redis")
        self.description = f"Redis {self._servers[regions[0]].version}"

    def connect(self, region: str) -> str:
        return self._servers[region].url

    async def kill(self, region: str) -> None:
        await asyncio.to_thread(self._servers[region].kill)
        self.killed.add(region)

    async def heal(self) -> None:
        for region in self.killed:
            await asyncio.to_thread(self._servers[region].recover)
        self.killed.clear()

    async def close(self) -> None:
        for server in self._servers.values():
            await asyncio.to_thread(server.close)


class EmbeddedDatabase:
    """A SQLite file. A region that is cut off has every call of its ledger refused; its nodes keep their keys."""

    def __init__(self, directory: Path) -> None:
        self.description: str = "a SQLite file as the database"
        self.cut: set[str] = set()
        self._url = f"sqlite:///{directory / DATABASE_FILE}"
        self._connections: dict[str, list[FailingLedger]] = {}

    async def start(self, regions: Sequence[str]) -> None:
        self._connections = {region: [] for region in regions}
        await migrate(self._url)

    def url(self, region: str) -> str:
        return self._url

    def connect(self, region: str) -> Ledger:
        connection = FailingLedger(open_ledger(self._url))
        self._connections[region].append(connection)
        return connection

    async def partition(self, region: str) -> None:
        for connection in self._connections[region]:
            connection.faults.fail()
        self.cut.add(region)

    async def heal(self) -> None:
        for region in self.cut:
            for connection in self._connections[region]:
                connection.faults.heal()
        self.cut.clear()

    async def close(self) -> None:
        """Nothing to release: the fleet closes the connections, and the directory is removed with the file."""


class MySQLDatabase:
    """A MariaDB or MySQL process, and a proxy for each region. A region that is cut off is refused by its proxy."""

    def __init__(self) -> None:
        self.description: str = "MySQL"
        self.cut: set[str] = set()
        self._server: MySQLFamilyServer | None = None
        self._url = ""
        self._proxies: dict[str, FaultProxy] = {}

    async def start(self, regions: Sequence[str]) -> None:
        self._server = MariaDBServer()
        try:
            await asyncio.to_thread(self._server.start)
            name = "MariaDB"
        except MissingBinary:
            self._server = MySQLServer()
            await _started(self._server.start, "--mysql")
            name = "MySQL"
        self._url = await asyncio.to_thread(self._server.create_database)
        version = await asyncio.to_thread(lambda: self._server.version if self._server else "")
        self.description = f"{name} {version}"
        await migrate(self._url)
        for region in regions:
            self._proxies[region] = FaultProxy(self._server.port).start()

    def url(self, region: str) -> str:
        return self._proxies[region].through(self._url)

    def connect(self, region: str) -> str:
        return self.url(region)

    async def partition(self, region: str) -> None:
        proxy = self._proxies[region]
        await asyncio.to_thread(proxy.apply, Faults(refuse=True))
        await asyncio.to_thread(proxy.reset_connections)
        self.cut.add(region)

    async def heal(self) -> None:
        for region in self.cut:
            await asyncio.to_thread(self._proxies[region].heal)
        self.cut.clear()

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await asyncio.to_thread(proxy.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


async def _started(start: Callable[[], object], flag: str) -> None:
    try:
        await asyncio.to_thread(start)
    except MissingBinary as error:
        raise ConfigurationError(
            f"{flag}: {error.name} is not installed; run `{error.command}`, or leave {flag} out"
        ) from error
