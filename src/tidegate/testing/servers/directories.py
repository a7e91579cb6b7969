"""Where test servers keep their data: temporary directories, and templates that are copied into them.

A directory is locked by the process that owns it (flock, which the kernel drops when that process dies), so
whoever comes next can tell an abandoned directory from one in use and sweep it. Its mode is 755, and it lies
directly under the temporary directory: PostgreSQL runs as another user and must be able to walk into it, which
pytest's `tmp_path` (below a 0700 directory) does not allow.

Knows nothing about servers.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

PREFIX = "tidegate-server-"
# Not swept: the moment between mkdtemp and the lock must not look like an abandoned directory.
UNLOCKED_PREFIX = "tidegate-unlocked-"


class DataDirectory:
    """A temporary directory of one server, locked by this process until `remove()`."""

    def __init__(self, kind: str) -> None:
        unlocked = Path(tempfile.mkdtemp(prefix=f"{UNLOCKED_PREFIX}{kind}-"))
        unlocked.chmod(0o755)
        self._lock_fd: int | None = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self.path = unlocked.rename(unlocked.with_name(PREFIX + unlocked.name.removeprefix(UNLOCKED_PREFIX)))

    def remove(self) -> None:
        """Delete everything. Harmless when called twice."""
        if self._lock_fd is None:
            return
        try:
            shutil.rmtree(self.path)
        finally:
            os.close(self._lock_fd)
            self._lock_fd = None


def sweep_abandoned(parent: Path | None = None) -> list[Path]:
    """Remove the directories whose owner died without removing them (SIGKILL), and return them."""
    removed = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        try:
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, not a directory, or of another user
        try:
            if os.fstat(lock_fd).st_uid != os.geteuid():
                continue
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A server that is just now being ended by its parent's death may still write: what remains goes
            # with the next sweep.
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock_fd)
    return removed


class Template:
    """An initialised data directory, built at its first use in this process and copied from then on.

    `build` gets a path that does not exist yet, below a directory that everybody may enter.
    """

    def __init__(self, kind: str, build: Callable[[Path], None]) -> None:
        self._kind = kind
        self._build = build
        self._lock = threading.Lock()
        self._directory: DataDirectory | None = None  # written once, under the lock

    def copy_to(self, target: Path) -> None:
        """Make `target` (which must not exist) a copy: owners, modes and times included."""
        with self._lock:
            if self._directory is None:
                self._directory = self._built()
            source = self._directory.path / "data"
        subprocess.run(["cp", "-a", "--reflink=auto", os.fspath(source), os.fspath(target)], check=True)

    def _built(self) -> DataDirectory:
        directory = DataDirectory(f"{self._kind}-template")
        try:
            self._build(directory.path / "data")
        except BaseException:
            directory.remove()
            raise
        owner_pid = os.getpid()

        def remove_at_exit() -> None:
            if (
                os.getpid() == owner_pid
            ):  # a forked child that exits must not take its parent's template along
                directory.remove()

        atexit.register(remove_at_exit)
        return directory
