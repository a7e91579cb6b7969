"""A database server that is already running, for tests: `TIDEGATE_TEST_LEDGER=mysql://root@127.0.0.1:4000/test`.

For engines that no test starts by itself, such as TiDB. Tests create databases with random names beside the one in the
URL, and drop them. The user needs the rights to create and drop databases; the command line client of the engine's
protocol (`mariadb` or `psql`) must be installed. If SQL cannot create a suitable database, such as a sharded keyspace
of Vitess, `TIDEGATE_TEST_LEDGER_DATABASES=one,two` names those that the tests may use and empty. Tests that kill or
freeze a server cut off the network instead: clients reach the server through a proxy.
"""

from __future__ import annotations

import os
import secrets
from typing import Self
from urllib.parse import unquote, urlsplit, urlunsplit

from tidegate.testing.proxy import FaultProxy, Faults
from tidegate.testing.servers.process import find_binary, run_tool

__all__ = ["URL", "RunningServer"]

URL = os.environ.get("TIDEGATE_TEST_LEDGER", "")
DATABASES = os.environ.get("TIDEGATE_TEST_LEDGER_DATABASES", "")
STATEMENT_TIMEOUT_S = 60.0
PORTS = {"mysql": 3306, "postgres": 5432}


class RunningServer:
    """The server at a URL, behind a proxy. `create_database()` gives the URL of a new, empty database."""

    def __init__(self, url: str = URL) -> None:
        self._parts = urlsplit(url)
        self.kind = "postgres" if self._parts.scheme.startswith("postgres") else "mysql"
        self._host = self._parts.hostname or "127.0.0.1"
        self._port = self._parts.port or PORTS[self.kind]
        self._proxy = FaultProxy(self._port, self._host)
        self._databases: set[str] = set()
        # Those that exist and are not in use.
        self._free = [name for name in DATABASES.split(",") if name]
        self._creates = not self._free

    @property
    def version(self) -> str:
        return self.sql("SELECT VERSION()")[0][0]

    def sql(self, statements: str, database: str = "") -> list[list[str]]:
        """Run statements with the command line client, past the proxy, and return the rows as text."""
        argv = self._psql(database) if self.kind == "postgres" else self._mariadb(database)
        printed = run_tool(
            [*argv, f"--{'command' if self.kind == 'postgres' else 'execute'}={statements}"],
            timeout_s=STATEMENT_TIMEOUT_S,
        )
        return [line.split("\t") for line in printed.splitlines()]

    def _mariadb(self, database: str) -> list[str]:
        return [
            *(find_binary("mariadb", "mariadb-client"), "--no-defaults", "--protocol=tcp"),
            *(
                f"--host={self._host}",
                f"--port={self._port}",
                f"--user={unquote(self._parts.username or '')}",
            ),
            *(f"--password={unquote(self._parts.password or '')}", "--batch", "--skip-column-names"),
            f"--database={database or self._parts.path.lstrip('/')}",
        ]

    def _psql(self, database: str) -> list[str]:
        path = f"/{database}" if database else self._parts.path
        url = urlunsplit(self._parts._replace(path=path, query=""))
        return [
            *(
                find_binary("psql", "postgresql-client"),
                "--no-psqlrc",
                "--quiet",
                "--tuples-only",
                "--no-align",
            ),
            *("--field-separator=\t", "--set=ON_ERROR_STOP=1", f"--dbname={url}"),
        ]

    def create_database(self) -> str:
        if self._creates:
            name = f"tidegate_test_{secrets.token_hex(6)}"
            self.sql(f"CREATE DATABASE {name}")
        else:
            name = self._free.pop()
            self._empty(name)
        self._databases.add(name)
        return self._proxy.through(urlunsplit(self._parts._replace(path=f"/{name}")))

    def drop_database(self, url: str) -> None:
        """Drop a database by the URL that `create_database` returned, without its clients."""
        self._proxy.reset_connections()
        self._drop(urlsplit(url).path.lstrip("/"))

    def _empty(self, name: str) -> None:
        tables = [table for (table,) in self.sql("SHOW TABLES", name)]
        self.sql(
            "; ".join(["SET foreign_key_checks = 0", *(f"DROP TABLE {table}" for table in tables)]), name
        )

    def _drop(self, name: str) -> None:
        if self._creates:
            self.sql(f"DROP DATABASE IF EXISTS {name}")
        else:
            self._empty(name)
            self._free.append(name)
        self._databases.discard(name)

    # ---- simulated failures

    def kill(self) -> None:
        """Close all connections and refuse new ones."""
        self._proxy.apply(Faults(refuse=True))
        self._proxy.reset_connections()

    def start(self) -> Self:
        self._proxy.heal()
        return self

    def freeze(self) -> None:
        """Nothing comes back; connections and bytes are accepted."""
        self._proxy.apply(Faults(stall_requests=True, stall_replies=True))

    def thaw(self) -> None:
        self._proxy.heal()

    def recover(self) -> None:
        self._proxy.heal()

    def __enter__(self) -> Self:
        self._proxy.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Drop what tests have left."""
        self._proxy.close()
        for name in sorted(self._databases):
            self._drop(name)
