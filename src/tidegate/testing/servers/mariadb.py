"""A real MariaDB for tests, as root without a password, with a new database for whoever asks.

Initialising a data directory takes a second, so it is done once per process and copied.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from pathlib import Path

from tidegate.testing.servers.directories import Template
from tidegate.testing.servers.process import ServerProcess, find_binary, run_tool

SERVER_PACKAGE = "mariadb-server"
CLIENT_PACKAGE = "mariadb-client"
# Given to the template too: a redo log of the default size would make each copy 114 MB instead of 33 MB.
REDO_LOG = "--innodb-log-file-size=16M"
GREETING_TIMEOUT_S = 1.0
STATEMENT_TIMEOUT_S = 20.0
# A connection that a test left inside a transaction would hold DROP up for a day. 1094: it is gone already.
DROP_WITH_FORCE = """
DELIMITER //
BEGIN NOT ATOMIC
    DECLARE CONTINUE HANDLER FOR 1094 BEGIN END;
    FOR user IN (SELECT id FROM information_schema.processlist WHERE db = '{name}') DO
        EXECUTE IMMEDIATE CONCAT('KILL ', user.id);
    END FOR;
END//
DROP DATABASE IF EXISTS `{name}`//
"""


def _run_as_root() -> list[str]:
    """MariaDB refuses root unless told so in words; anybody else needs to say nothing."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _initialise(data: Path) -> None:
    run_tool(
        [
            find_binary("mariadb-install-db", SERVER_PACKAGE),
            "--no-defaults",
            *_run_as_root(),
            f"--datadir={data}",
            f"--tmpdir={data.parent}",  # or two that initialise at the same time delete each other's tables in /tmp
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            REDO_LOG,
        ],
        timeout_s=120,
    )


_template = Template("mariadb", _initialise)


class MariaDBServer(ServerProcess):
    """A MariaDB; `create_database()` gives the URL of a new, empty database.

    What was committed survives `kill`: the redo log reaches the kernel at every commit, only the disk does not hear
    of it. `arguments` are further options for mariadbd.
    """

    kind = "mariadb"

    def __init__(self, *, arguments: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._arguments = arguments
        self._database_numbers = itertools.count(1)

    @property
    def url(self) -> str:
        """Without a database."""
        return f"mysql://root@{self.host}:{self.port}"

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database, by a name not used before unless one is given, and return its URL."""
        name = name or f"tidegate_{next(self._database_numbers)}"
        self.sql(f"CREATE DATABASE `{name}`")
        return f"{self.url}/{name}"

    def drop_database(self, url: str) -> None:
        """Drop a database by the URL that `create_database` returned, and disconnect who still uses it."""
        self.sql(DROP_WITH_FORCE.format(name=url.rpartition("/")[2]))

    def sql(self, statements: str, database: str = "") -> list[list[str]]:
        """Run statements with the command line client and return the rows of their answers as text."""
        printed = run_tool(
            [
                find_binary("mariadb", CLIENT_PACKAGE),
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
        _template.copy_to(self._data)

    def _wipe(self) -> None:
        shutil.rmtree(self._data)

    def _argv(self) -> list[str]:
        return [
            find_binary("mariadbd", SERVER_PACKAGE),
            "--no-defaults",  # keeps the machine's own configuration out
            *_run_as_root(),
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
            REDO_LOG,
            *self._arguments,
        ]

    def _is_ready(self) -> bool:
        """Greets on the socket in its own directory, where no stranger can listen; the port is open before that."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(GREETING_TIMEOUT_S)
                connection.connect(os.fspath(self._socket_path))
                header = connection.recv(5)
        except OSError:
            return False
        # Three bytes of length, one of sequence, then the protocol's version; an error packet begins with 0xff.
        return len(header) == 5 and header[4] == 10
