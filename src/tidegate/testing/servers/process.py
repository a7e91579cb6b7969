"""The verbs that every test server understands, and how its process is started so that it cannot be left behind.

Laws:
- A server dies with the process that started it, even if that one is killed by SIGKILL (`setpriv --pdeathsig`).
- A missing binary is an error that says what to install.
- Every wait polls an observable condition and has a deadline; a failure shows the end of the server's log.
- The port never changes while an object lives: clients find a restarted server where it was.

Objects are driven by one thread at a time. Knows nothing about any particular server, and imports only the
standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tidegate.adapters.forks import follow_forks
from tidegate.testing.servers.directories import DataDirectory, remove_abandoned
from tidegate.testing.servers.reservation import LOOPBACK, PortReservation

# Much shorter than the 14 ms that the fastest server needs to start, long enough to leave it the processor.
POLL_INTERVAL_S = 0.005
# A start takes 0.2 s; the timeout is for a busy machine.
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
PORT_ATTEMPTS = 5
LOG_TAIL_CHARS = 3000
# mariadbd is in sbin, which is not on every user's PATH.
EXTRA_BINARY_PLACES = ("/usr/sbin", "/usr/local/sbin", "/sbin")
GONE = ("", "Z", "X")
# Variables with a developer's own database settings, and those of a service manager: test servers must not see them.
FOREIGN_ENVIRONMENT = ("PG", "MYSQL", "MARIADB", "REDISCLI", "NOTIFY_SOCKET", "LISTEN_")


class ServerError(Exception):
    """A test server failed. Not a TidegateError, because the code under test never raises it."""


class MissingBinary(ServerError):
    """A program that the tests need is not installed."""

    def __init__(self, name: str, command: str) -> None:
        super().__init__(
            f"{name} is not installed: run `make test`, which installs what the tests need, or `{command}`"
        )
        self.name = name
        self.command = command


class PortClash(ServerError):
    """Another process listens on the chosen port."""


def find_binary(name: str, package: str, places: Sequence[str] = ()) -> str:
    """The path of a program: in `places` first, then on PATH and in the sbin directories."""
    search = os.pathsep.join([*places, os.environ.get("PATH", os.defpath), *EXTRA_BINARY_PLACES])
    found = shutil.which(name, path=search)
    if found is None:
        raise MissingBinary(name, f"apt-get install --no-install-recommends {package}")
    return found


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Poll until the condition holds. `what` completes the sentence "gave up waiting for ..."."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise ServerError(f"gave up waiting for {what} after {timeout_s:g} s")
        time.sleep(POLL_INTERVAL_S)


def clean_environment() -> dict[str, str]:
    """The environment for servers and their tools: English messages, no personal settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_ENVIRONMENT)}
    return kept | {"LC_ALL": "C"}


def run_tool(argv: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run a command line tool and return its output. The error has the message of the tool."""
    try:
        done = subprocess.run(
            argv,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,  # the error below has its message
            # The tools of PostgreSQL fail in a directory that their user may not enter.
            cwd="/",
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{Path(argv[0]).name} did not end within {timeout_s:g} s") from error
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip()[-LOG_TAIL_CHARS:]
        raise ServerError(f"{Path(argv[0]).name} failed with status {done.returncode}: {message}")
    return done.stdout


class _Spawner:
    """Forks every server from one thread that runs as long as the process.

    The parent-death signal fires when the *thread* that forked exits, not the process: a server started from
    `asyncio.to_thread`, or from any other short-lived thread, would be killed in the middle of the test.
    """

    def __init__(self) -> None:
        self._create_thread()
        # A forked child has only the thread that forked.
        follow_forks(self, in_child=_Spawner._create_thread)

    def _create_thread(self) -> None:
        """The executor starts its thread with the first call."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidegate-server-spawner")

    def spawn(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        return self._thread.submit(start).result()


_spawner = _Spawner()


def spawn(
    argv: Sequence[str], *, cwd: Path, log: Path, death_signal: str, identity: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that gets `death_signal` when this one dies; `identity` are options of setpriv for the user.

    It has its own session, so that Ctrl-C reaches only pytest, which then stops the servers.
    """
    setpriv = find_binary("setpriv", "util-linux")

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [setpriv, *identity, "--pdeathsig", death_signal, *argv],
                cwd=cwd,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return _spawner.spawn(start)


def process_state(pid: int) -> str:
    """The state of a process in /proc (R, S, D, T, Z, ...); "" if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def child_pids(pid: int) -> list[int]:
    """The running children of a process, from /proc/*/stat (the `children` file needs a kernel option)."""
    children = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent_pid = stat.rpartition(")")[2].split()[:2]
        if int(parent_pid) == pid and state not in GONE:
            children.append(int(entry.name))
    return children


def is_gone(pid: int) -> bool:
    """Whether the process has ended: it does not exist, or is a zombie."""
    return process_state(pid) in GONE


class ServerProcess(ABC):
    """One server: a process, its port, its data. Also a context manager: `with RedisServer() as redis: ...`.

    `stop` and `kill` keep port and data for the next `start`; `close` (or leaving `with`) gives both back.
    """

    kind: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # KILL also ends a frozen process; the data of a test server need not be saved.
    death_signal: ClassVar[str] = "KILL"
    host: ClassVar[str] = LOOPBACK

    def __init__(self) -> None:
        self._directory: DataDirectory | None = None
        self._reservation: PortReservation | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_frozen = False
        self.has_served = False  # set by start(): clients know the port now, so it must not change

    # ---- what each server defines

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare the data directory for a first start. Called again after `_wipe`."""

    @abstractmethod
    def _wipe(self) -> None:
        """Delete the data of a stopped server."""

    @abstractmethod
    def _argv(self) -> list[str]:
        """The command line. Called before each launch, when the port is known."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether *this* process responds; another process may listen on the same port."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address that clients use."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The version of the server that runs, as it reports it."""

    def _identity(self) -> list[str]:
        """Options of setpriv for the user of the server."""
        return []

    def _pids(self) -> list[int]:
        """All processes of the server, first the one that can start others."""
        return [self.pid]

    # ---- where it is

    @property
    def port(self) -> int:
        if self._reservation is None:
            raise ServerError(f"{self.kind} has no port yet: call start() first")
        return self._reservation.port

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise ServerError(f"{self.kind} has no directory yet: call start() first")
        return self._directory.path

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"{self.kind} does not run: call start() first")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists, frozen or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    def log_text(self) -> str:
        """The end of the log of the server."""
        log = self.directory / "log"
        return log.read_text(errors="replace")[-LOG_TAIL_CHARS:] if log.exists() else ""

    # ---- methods for tests

    def start(self) -> Self:
        """Start, and wait until the server responds. A second start uses the same port and data."""
        if self.is_running:
            raise ServerError(f"{self.kind} is already running (pid {self.pid})")
        try:
            if self._directory is None:
                remove_abandoned()
                self._directory = DataDirectory(self.kind)
                self._prepare()
            self._launch_on_a_free_port()
        except BaseException:
            if not self.has_served:
                self.close()  # the caller cannot: `with` calls no __exit__ if __enter__ fails
            raise
        self.has_served = True
        return self

    def stop(self) -> None:
        """Stop gracefully. Port and data are kept. Does nothing if it is not running."""
        if self._process is None:
            return
        if self.is_running:
            self.thaw()
            self._process.send_signal(self.stop_signal)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                log = self.log_text()
                self.kill()
                raise ServerError(f"{self.kind} did not stop within {STOP_TIMEOUT_S:g} s:\n{log}") from error
        self._forget_process()

    def kill(self) -> None:
        """Kill with SIGKILL, like a crash. Does nothing if it is not running."""
        if self._process is None:
            return
        if self.is_running:
            pids = self._pids()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
            wait_until(
                lambda: all(map(is_gone, pids)), timeout_s=STOP_TIMEOUT_S, what=f"{self.kind} to be gone"
            )
        self._forget_process()

    def restart(self, *, empty: bool = False) -> Self:
        """Stop and start at the same port, with the same data, or `empty`."""
        self.stop()
        if empty:
            self._wipe()
            self._prepare()
        return self.start()

    def freeze(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes, but nothing replies. Waits until it is stopped."""
        if not self.is_running:
            raise ServerError(f"{self.kind} is not running, so it cannot be frozen")
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)
        self._is_frozen = True
        wait_until(
            lambda: all(process_state(pid) == "T" for pid in self._pids()),
            timeout_s=STOP_TIMEOUT_S,
            what=f"{self.kind} to be stopped",
        )

    def thaw(self) -> None:
        """SIGCONT. Does nothing if the server is not frozen."""
        if not self._is_frozen:
            return
        if self.is_running:
            for pid in reversed(self._pids()):
                os.kill(pid, signal.SIGCONT)
        self._is_frozen = False

    def recover(self) -> None:
        """Thaw or start the server as needed, and wait until it responds."""
        self.thaw()
        if self.is_running:
            self._wait_ready()
        else:
            self.start()

    def close(self) -> None:
        """Stop it, delete its data and release its port."""
        try:
            self.stop()
        finally:
            if self._reservation is not None:
                self._reservation.release()
                self._reservation = None
            if self._directory is not None:
                self._directory.remove()
                self._directory = None
            self.has_served = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- implementation

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.wait()
        self._process = None
        self._is_frozen = False

    def _launch_on_a_free_port(self) -> None:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if self._reservation is None:
                self._reservation = PortReservation()
            try:
                self._launch()
                return
            except PortClash:
                if attempt == PORT_ATTEMPTS or self.has_served:
                    raise
                self._reservation.release()
                self._reservation = None

    def _launch(self) -> None:
        log = self.directory / "log"
        logged_before = log.stat().st_size if log.exists() else 0
        self._process = spawn(
            self._argv(),
            cwd=self.directory,
            log=log,
            death_signal=self.death_signal,
            identity=self._identity(),
        )
        try:
            self._wait_ready()
        except BaseException as error:
            has_ended = not self.is_running
            self.kill()
            logged = log.read_bytes()[logged_before:].decode(errors="replace")
            if has_ended and "in use" in logged:
                raise PortClash(f"{self.kind}: port {self.port} is used by another process") from error
            if isinstance(error, ServerError):
                raise ServerError(
                    f"{self.kind}: {error}; its log ends with\n{logged[-LOG_TAIL_CHARS:]}"
                ) from error
            raise

    def _wait_ready(self) -> None:
        def is_ready() -> bool:
            if not self.is_running:
                raise ServerError("the process ended before it was ready")
            return self._is_ready()

        wait_until(is_ready, timeout_s=START_TIMEOUT_S, what="a response")
