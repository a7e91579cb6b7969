"""A real MySQL for tests, with its stock authentication: a user with a password, by caching_sha2_password.

Debian's stable releases have no package of MySQL, so `scripts/mysql-server` unpacks one into a cache folder, together
with all its libraries down to the C library. Its programs run through the dynamic linker of that folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tidegate.testing.servers.directories import Template
from tidegate.testing.servers.mysql_family import MySQLFamilyServer, run_as_root
from tidegate.testing.servers.process import MissingBinary, run_tool

# Given to the template too: the default of 100 MB would be in each copy. With 16 MB large publishes wait for it.
REDO_LOG = "--innodb-redo-log-capacity=64M"
USER = "tidegate"
PASSWORD = "secret"  # noqa: S105 - of a server on the loopback interface that lives as long as a test
# Runs at each start: statements about accounts are not allowed while the data directory is initialised.
FIRST_STATEMENTS = f"""\
CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO '{USER}'@'%';
"""


def _tree() -> Path:
    """The folder with the newest MySQL that `scripts/mysql-server` has fetched."""

    def version(place: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", place.name)]

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate-tests"
    found = sorted(cache.glob("mysql-[0-9]*"), key=version)
    if not found:
        raise MissingBinary("mysqld", "scripts/mysql-server")
    return found[-1]


def _program(name: str) -> list[str]:
    """How to run one of its programs: the host's own linker and C library may be older."""
    tree = _tree()
    linker = next(tree.glob("usr/lib/*/ld-linux*.so.*"))
    libraries = f"{linker.parent}:{tree / 'usr/lib/mysql/private'}"
    return [os.fspath(linker), "--library-path", libraries, os.fspath(tree / "usr" / name)]


def _server_program() -> list[str]:
    tree = _tree()
    return [
        *_program("sbin/mysqld"),
        "--no-defaults",  # keeps the machine's own configuration out
        # Compiled into the program are paths of an installed package.
        f"--basedir={tree / 'usr'}",
        f"--lc-messages-dir={tree / 'usr/share/mysql'}",
        f"--character-sets-dir={tree / 'usr/share/mysql/charsets'}",
        f"--plugin-dir={tree / 'usr/lib/mysql/plugin'}",
        "--secure-file-priv=NULL",
        # Both are for power cuts, not for a kill, and make starting and stopping twice as slow.
        "--innodb-doublewrite=OFF",
        "--innodb-flush-method=nosync",
        REDO_LOG,
    ]


def _initialise(data: Path) -> None:
    run_tool(
        [*_server_program(), *run_as_root(), "--initialize-insecure", f"--datadir={data}"], timeout_s=120
    )


class MySQLServer(MySQLFamilyServer):
    """A MySQL. Its URL has a user with a password; `sql` is root, who has none, on the socket."""

    kind = "mysql"
    template = Template("mysql", _initialise)
    credentials = f"{USER}:{PASSWORD}"

    def _prepare(self) -> None:
        super()._prepare()
        self._first_statements.write_text(FIRST_STATEMENTS)

    @property
    def _first_statements(self) -> Path:
        return self.directory / "first.sql"

    def _server_argv(self) -> list[str]:
        # Its second protocol would listen on a port that no test has reserved.
        return [*_server_program(), "--mysqlx=OFF", f"--init-file={self._first_statements}"]

    def _client_argv(self) -> list[str]:
        return _program("bin/mysql")
