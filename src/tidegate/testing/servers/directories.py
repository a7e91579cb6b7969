"""Temporary data directories of test servers, and templates that are copied into them.

The process that owns a directory locks it with flock, which the kernel releases when the process dies. A later process
can therefore detect and remove abandoned directories. The mode is 755, directly under the temporary directory, because
PostgreSQL runs as another user and must be able to enter it; pytest's `tmp_path` is below a 0700 directory.

This module does not know servers.
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
# Never removed as abandoned: between mkdtemp and flock a directory is not locked yet.
UNLOCKED_PREFIX = "tidegate-unlocked-"


class DataDirectory:
    """The temporary directory of one server, locked by this process until `remove()`."""

    def __init__(self, kind: str) -> None:
        unlocked = Path(tempfile.mkdtemp(prefix=f"{UNLOCKED_PREFIX}{kind}-"))
        unlocked.chmod(0o755)
        self._lock_fd: int | None = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self.path = unlocked.rename(unlocked.with_name(PREFIX + unlocked.name.removeprefix(UNLOCKED_PREFIX)))

    def remove(self) -> None:
        """Delete everything. Safe to call twice."""
        if self._lock_fd is None:
            return
        try:
            shutil.rmtree(self.path)
        finally:
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Remove directories whose owner was killed (SIGKILL), and return them."""
    removed = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        try:
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # already removed, not a directory, or owned by another user
        try:
            if os.fstat(lock_fd).st_uid != os.geteuid():
                continue
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A server that is just being killed may still write: the next call removes what remains.
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock_fd)
    return removed


class Template:
    """An initialised data directory, built once per process and then copied.

    `build` gets a path that does not exist yet, below a directory that all users may enter.
    """

    def __init__(self, kind: str, build: Callable[[Path], None]) -> None:
        self._kind = kind
        self._build = build
        self._lock = threading.Lock()
        self._directory: DataDirectory | None = None  # set once, under the lock

    def copy_to(self, target: Path) -> None:
        """Copy to `target`, which must not exist, including owners, modes and times."""
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
            if os.getpid() == owner_pid:  # a forked child must not remove the template of its parent
                directory.remove()

        atexit.register(remove_at_exit)
        return directory
