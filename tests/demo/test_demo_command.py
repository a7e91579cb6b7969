from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

TIMEOUT_S = 60.0
MARK = "DEMO_TEST_MARK"


class Demo:
    """`tidegate demo` as a marked process with its own temporary directory."""

    def __init__(
        self, directory: Path, *arguments: str, terminal: bool = False, size: tuple[int, int] = (40, 160)
    ) -> None:
        self.directory = directory
        self._mark = uuid.uuid4().hex
        self._keyboard, stdin = pty.openpty() if terminal else (-1, subprocess.DEVNULL)
        if terminal:
            fcntl.ioctl(stdin, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.cli", "demo", "--no-browser", *arguments],
            stdin=stdin,
            stdout=stdin if terminal else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: self._mark, "TMPDIR": str(directory)},
        )
        if terminal:
            os.close(stdin)
        self._output = self._keyboard if terminal else self.process.stdout.fileno()  # type: ignore[union-attr] # a pipe
        self.text = ""

    def read_until(self, pattern: str) -> None:
        """Read output until it has matched; what was matched before does not count."""
        deadline = time.monotonic() + TIMEOUT_S
        fresh = ""
        while re.search(pattern, fresh) is None:
            ready, _, _ = select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in\n{fresh}"
            data = os.read(self._output, 65_536).decode(errors="replace")
            assert data, f"ended without {pattern!r}:\n{fresh}"
            fresh += data
        self.text += fresh

    def press(self, key: str) -> None:
        os.write(self._keyboard, key.encode())

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal if one is given, read to the end, and return the exit code."""
        if number is not None:
            self.process.send_signal(number)
        while True:
            try:
                data = os.read(self._output, 65_536)
            except OSError:  # how a terminal ends
                data = b""
            if not data:
                break
            self.text += data.decode(errors="replace")
        code = self.process.wait(TIMEOUT_S)
        os.close(self._keyboard) if self._keyboard >= 0 else self.process.stdout.close()  # type: ignore[union-attr]  # a pipe
        return code

    def leftovers(self) -> list[str]:
        """Processes that carry its mark, and files in its temporary directory."""
        found = [str(path) for path in self.directory.iterdir()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    place = (entry / "cwd").readlink()
                except OSError:
                    continue
                # Redis writes its title over its environment; each server runs in its own directory.
                if f"{MARK}={self._mark}".encode() in environment or place.is_relative_to(self.directory):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def start(*arguments: str, terminal: bool = False, size: tuple[int, int] = (40, 160)) -> Demo:
        # Not below pytest's directory: the path of MariaDB's socket has at most 107 characters.
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="tidegate-demo-test-")))
        demos.append(Demo(directory, *arguments, terminal=terminal, size=size))
        return demos[-1]

    with ExitStack() as stack:
        yield start
        for demo in demos:
            demo.kill()


def test_ctrl_c_ends_the_demo_and_leaves_no_process_and_no_file(start: Callable[..., Demo]) -> None:
    demo = start("--regions", "2", "--nodes", "1")
    demo.read_until(r"allowed/s")
    assert len(demo.leftovers()) >= 2, "the process and its directory are found while it runs"
    assert demo.end(signal.SIGINT) == 0, demo.text
    assert demo.leftovers() == []


def test_ctrl_c_while_it_starts_leaves_nothing_either(start: Callable[..., Demo]) -> None:
    demo = start("--regions", "2")
    demo.read_until("Starting")
    assert demo.end(signal.SIGINT) == 0, demo.text
    assert demo.leftovers() == []


@pytest.mark.server
@pytest.mark.slow
def test_real_servers_end_with_the_demo(
    start: Callable[..., Demo], redis_server: object, mariadb_server: object
) -> None:
    demo = start("--regions", "2", "--nodes", "1", "--redis", "--mysql")
    demo.read_until(r"allowed/s")
    running = " ".join(demo.leftovers())
    assert running.count("redis-server") >= 2 and "mariadbd" in running
    assert demo.end(signal.SIGTERM) == 0, demo.text
    assert demo.leftovers() == []


def test_on_a_terminal_single_keys_break_and_heal_the_fleet(start: Callable[..., Demo]) -> None:
    demo = start("--regions", "2", "--nodes", "1", terminal=True)
    demo.read_until("heal everything")
    demo.press("k")
    demo.read_until("origin of fra killed")
    demo.press("p")
    demo.read_until("region iad cut off from the database")
    demo.press("h")
    demo.read_until("everything healed")
    demo.press("q")
    assert demo.end() == 0
    assert "\x1b[?1049l" in demo.text, "the first screen is back"
    assert demo.leftovers() == []


def test_a_terminal_that_reports_no_size_shows_the_whole_key(start: Callable[..., Demo]) -> None:
    demo = start("--regions", "2", "--nodes", "1", terminal=True, size=(0, 0))
    demo.read_until(r"key: tg_[0-9A-Za-z]{32}\x1b")
    demo.press("q")
    assert demo.end() == 0


def test_a_script_presses_keys_and_json_reports_what_happened(tmp_path: Path) -> None:
    arguments = ["--regions", "2", "--nodes", "1", "--script", "k@0.5,h@1", "--seconds", "1.5", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "demo", *arguments],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [phase["name"] for phase in report["phases"]] == [
        "all well",
        "origin of fra killed, its counts are gone",
        "everything healed",
    ]
    assert all(phase["failed"] == 0 for phase in report["phases"])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_script_is_refused_before_anything_starts(start: Callable[..., Demo]) -> None:
    demo = start("--script", "kill at five")
    assert demo.end() == 2
    assert "k@5,h@10" in demo.text and "Starting" not in demo.text
