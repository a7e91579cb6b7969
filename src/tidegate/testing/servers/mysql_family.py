"""What MariaDB and MySQL have in common as test servers: databases, the command line client, readiness, most options.

Initialising a data directory takes seconds, so it is done once per process and copied.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from tidegate.testing.servers.directories import Template
from tidegate.testing.servers.process import ServerError, ServerProcess, run_tool

GREETING_TIMEOUT_S = 1.0
STATEMENT_TIMEOUT_S = 20.0


def run_as_root() -> list[str]:
    """The option without which both servers refuse to run as root; other users need none."""
    return ["--user=root"] if os.geteuid() == 0 else []


class MySQLFamilyServer(ServerProcess):
    """`create_database()` gives the URL of a new, empty database.

    What was committed survives `kill`: the redo log reaches the kernel at every commit, but is not synced to disk.
    `arguments` are further options for the server.
    """

    template: ClassVar[Template]
    # User, and password if any, as a URL has them.
    credentials: ClassVar[str]

    def __init__(self, *, arguments: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._arguments = arguments
        self._database_numbers = itertools.count(1)

    @abstractmethod
    def _server_argv(self) -> list[str]:
        """The server's program and the options that only this kind of server has."""

    @abstractmethod
    def _client_argv(self) -> list[str]:
        """The program of the command line client."""

    @property
    def url(self) -> str:
        """Without a database."""
        return f"mysql://{self.credentials}@{self.host}:{self.port}"

    @property
    def version(self) -> str:
        return self.sql("SELECT VERSION()")[0][0].partition("-")[0]

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database, by a name not used before unless one is given, and return its URL."""
        name = name or f"tidegate_{next(self._database_numbers)}"
        self.sql(f"CREATE DATABASE `{name}`")
        return f"{self.url}/{name}"

    def drop_database(self, url: str) -> None:
        """Drop a database by the URL that `create_database` returned, and disconnect its clients."""
        name = url.rpartition("/")[2]
        # A connection that a test left inside a transaction would hold DROP up for a day.
        clients = f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"  # noqa: S608 - a name of ours
        for (client,) in self.sql(clients):
            try:
                self.sql(f"KILL {client}")
            except ServerError as error:
                if "Unknown thread id" not in str(error):  # it left meanwhile
                    raise
        self.sql(f"DROP DATABASE IF EXISTS `{name}`")

    def sql(self, statements: str, database: str = "") -> list[list[str]]:
        """Run statements as root with the command line client and return the rows of their answers as text."""
        printed = run_tool(
            [
                *self._client_argv(),
                "--no-defaults",
                f"--socket={self._socket_path}",
                "--user=root",
                "--batch",
                "--skip-column-names",
                f"--execute={statements}",
                *([database] if database else []),
            ],
            timeout_s=STATEMENT_TIMEOUT_S,
        )
        return [line.split("\t") for line in printed.splitlines()]

    # ---- the process

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _socket_path(self) -> Path:
        return self.directory / "socket"

    def _prepare(self) -> None:
        self.template.copy_to(self._data)

    def _wipe(self) -> None:
        shutil.rmtree(self._data)

    def _argv(self) -> list[str]:
        return [
            *self._server_argv(),
            *run_as_root(),
            f"--datadir={self._data}",
            f"--tmpdir={self.directory}",
            f"--socket={self._socket_path}",
            f"--pid-file={self.directory / 'pid'}",
            f"--port={self.port}",
            f"--bind-address={self.host}",
            "--skip-name-resolve",
            "--skip-log-bin",  # or the data directory grows with every statement
            "--innodb-buffer-pool-size=128M",
            "--innodb-flush-log-at-trx-commit=2",
            "--performance-schema=OFF",
            *self._arguments,
        ]

    def _is_ready(self) -> bool:
        """Greets on the socket in its own directory, where no other server can listen; the port is open before that."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(GREETING_TIMEOUT_S)
                connection.connect(os.fspath(self._socket_path))
                header = connection.recv(5)
        except OSError:
            return False
        # Three bytes of length, one of sequence, then the protocol's version; an error packet begins with 0xff.
        return len(header) == 5 and header[4] == 10
