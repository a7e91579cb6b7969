"""A real MariaDB for tests, as root without a password."""

from __future__ import annotations

from pathlib import Path

from tidegate.testing.servers.directories import Template
from tidegate.testing.servers.mysql_family import MySQLFamilyServer, run_as_root
from tidegate.testing.servers.process import find_binary, run_tool

SERVER_PACKAGE = "mariadb-server"
CLIENT_PACKAGE = "mariadb-client"
# Given to the template too: a redo log of the default size would make each copy 114 MB instead of 33 MB.
REDO_LOG = "--innodb-log-file-size=16M"


def _initialise(data: Path) -> None:
    run_tool(
        [
            find_binary("mariadb-install-db", SERVER_PACKAGE),
            "--no-defaults",
            *run_as_root(),
            f"--datadir={data}",
            f"--tmpdir={data.parent}",  # or two that initialise at the same time delete each other's tables in /tmp
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            REDO_LOG,
        ],
        timeout_s=120,
    )


class MariaDBServer(MySQLFamilyServer):
    """A MariaDB."""

    kind = "mariadb"
    template = Template("mariadb", _initialise)
    credentials = "root"

    def _server_argv(self) -> list[str]:
        # --no-defaults keeps the machine's own configuration out.
        return [find_binary("mariadbd", SERVER_PACKAGE), "--no-defaults", REDO_LOG]

    def _client_argv(self) -> list[str]:
        return [find_binary("mariadb", CLIENT_PACKAGE)]
