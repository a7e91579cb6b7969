"""A real PostgreSQL for tests, with a new database on request.

PostgreSQL refuses to run as root: under root it runs as the user `postgres`, who must be able to enter its directory.
All its processes are frozen and killed together, because the others would continue to respond.
"""

from __future__ import annotations

import itertools
import os
import pwd
import re
import shutil
import signal
import subprocess
from pathlib import Path

from tidegate.testing.servers.directories import Template
from tidegate.testing.servers.process import (
    STOP_TIMEOUT_S,
    MissingBinary,
    ServerError,
    ServerProcess,
    child_pids,
    find_binary,
    process_state,
    run_tool,
    wait_until,
)

PACKAGE = "postgresql"
SUPERUSER = "postgres"
# Debian has the server programs outside PATH, in one directory per major version.
VERSIONS = Path("/usr/lib/postgresql")
STATEMENT_TIMEOUT_S = 20.0
# A stopped process does not handle its parent-death signal. The guard of a frozen server waits for the end of a pipe
# that only this process holds: if this process is killed, the guard continues the server, which then ends.
GUARD = """
read -r _
kill -CONT "$1"
for stat in /proc/[0-9]*/stat; do
    read -r line < "$stat" || continue
    fields=${line##*) } fields=${fields#? }
    if [ "${fields%% *}" = "$1" ]; then kill -CONT "${line%% *}"; fi
done
"""


def _find(name: str) -> str:
    def version(place: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", place.parent.name)]

    places = sorted(VERSIONS.glob("*/bin"), key=version, reverse=True)
    return find_binary(name, PACKAGE, [os.fspath(place) for place in places])


def _system_user() -> pwd.struct_passwd | None:
    """The user to run as; `None` to keep the current user."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(SUPERUSER)
    except KeyError:
        raise MissingBinary(f"the system user {SUPERUSER}", f"apt-get install {PACKAGE}") from None


def _identity() -> list[str]:
    user = _system_user()
    return [] if user is None else [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _make_own_directory(path: Path) -> None:
    path.mkdir(mode=0o700)
    user = _system_user()
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def _initialise(data: Path) -> None:
    initdb = _find("initdb")
    _make_own_directory(data)
    run_tool(
        [
            *(find_binary("setpriv", "util-linux"), *_identity(), initdb),
            *("-D", os.fspath(data), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"),
        ],
        timeout_s=120,
    )


_template = Template("postgres", _initialise)


class PostgresServer(ServerProcess):
    """A PostgreSQL; `create_database()` gives the URL of a new, empty database.

    Committed data survives `kill`: it reaches the kernel at every commit, but not the disk.
    `settings` are further `name=value` pairs.
    """

    kind = "postgres"
    stop_signal = signal.SIGINT  # "fast": do not wait for clients to disconnect
    # Not KILL: the children would run on for a moment, and the System V segment would stay.
    death_signal = "INT"

    def __init__(self, *, settings: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._settings = settings
        self._database_numbers = itertools.count(1)
        self._guard: subprocess.Popen[bytes] | None = None  # set while frozen

    @property
    def url(self) -> str:
        """Without a database."""
        return f"postgres://{SUPERUSER}@{self.host}:{self.port}"

    @property
    def version(self) -> str:
        return self.sql("SHOW server_version")[0][0].partition(" ")[0]

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database, by a name not used before unless one is given, and return its URL."""
        name = name or f"tidegate_{next(self._database_numbers)}"
        self.sql(f'CREATE DATABASE "{name}"')
        return f"{self.url}/{name}"

    def drop_database(self, url: str) -> None:
        """Drop a database by the URL that `create_database` returned, and disconnect who still uses it."""
        self.sql(f'DROP DATABASE IF EXISTS "{url.rpartition("/")[2]}" WITH (FORCE)')

    def sql(self, statements: str, database: str = SUPERUSER) -> list[list[str]]:
        """Run statements with the command line client and return the rows of their answers as text."""
        printed = run_tool(
            [
                *(
                    _find("psql"),
                    "--no-psqlrc",
                    "--quiet",
                    "--tuples-only",
                    "--no-align",
                    "--field-separator=\t",
                ),
                *(f"--host={self._socket_directory}", f"--port={self.port}", f"--username={SUPERUSER}"),
                *(f"--dbname={database}", "--set=ON_ERROR_STOP=1", f"--command={statements}"),
            ],
            timeout_s=STATEMENT_TIMEOUT_S,
        )
        return [line.split("\t") for line in printed.splitlines()]

    # ---- the processes

    def freeze(self) -> None:
        """Stop the postmaster first, so that it starts no more children, then the others."""
        if self.is_running and self._guard is None:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        super().freeze()

    def thaw(self) -> None:
        super().thaw()
        self._end_guard()

    def _end_guard(self) -> None:
        if self._guard is None:
            return
        self._guard.kill()
        self._guard.communicate()
        self._guard = None

    def _forget_process(self) -> None:
        super()._forget_process()
        self._end_guard()

    def _pids(self) -> list[int]:
        """Stops the postmaster first, so that the list of its children is complete."""
        postmaster = self.pid
        if not self.is_frozen:
            os.kill(postmaster, signal.SIGSTOP)
            wait_until(
                lambda: process_state(postmaster) == "T",
                timeout_s=STOP_TIMEOUT_S,
                what="postgres to be stopped",
            )
        return [postmaster, *child_pids(postmaster)]

    def close(self) -> None:
        try:
            if self._directory is not None and not self.is_running:
                self._remove_shared_memory()
        finally:
            super().close()

    def _remove_shared_memory(self) -> None:
        """Remove the System V segment that a killed PostgreSQL leaves; line 7 of its pid file has its key and id."""
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        lines = pid_file.read_text().splitlines()
        if len(lines) >= 7 and len(segment := lines[6].split()) == 2:
            try:
                run_tool([find_binary("ipcrm", "util-linux"), "--shmem-id", segment[1]])
            except ServerError as error:
                if "already removed" not in str(error) and "invalid id" not in str(error):
                    raise

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _socket_directory(self) -> Path:
        return self.directory / "run"

    def _identity(self) -> list[str]:
        return _identity()

    def _prepare(self) -> None:
        _template.copy_to(self._data)
        if not self._socket_directory.exists():
            _make_own_directory(self._socket_directory)

    def _wipe(self) -> None:
        self._remove_shared_memory()
        shutil.rmtree(self._data)

    def _argv(self) -> list[str]:
        settings = (
            "fsync=off",
            "full_page_writes=off",  # protects from torn pages after a power cut, not after a kill
            "dynamic_shared_memory_type=mmap",  # in the data directory, so that it is removed with it
            *self._settings,
        )
        return [
            *(_find("postgres"), "-D", os.fspath(self._data), "-p", str(self.port), "-h", self.host),
            *("-k", os.fspath(self._socket_directory)),
            *(word for setting in settings for word in ("-c", setting)),
        ]

    def _is_ready(self) -> bool:
        """Uses the socket in its own directory, where no other process can listen; the port is open before that."""
        asked = [_find("pg_isready"), "-q", "-h", os.fspath(self._socket_directory), "-p", str(self.port)]
        return subprocess.run(asked, stdin=subprocess.DEVNULL, check=False).returncode == 0
