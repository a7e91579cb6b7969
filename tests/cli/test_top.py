from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import PROGRAM, Invoke
from tests.console.test_documents import report
from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace
from tidegate.cli.progress import Progress
from tidegate.cli.tables import table, visible
from tidegate.cli.top import ORDERS, Order, screen
from tidegate.server.console.documents import document

HOSTILE = "\x1b[2J\x1b]0;pwned\x07<b>\u202ebad\n"


@pytest.fixture(scope="module")
def server() -> Iterator[TidegateServer]:
    with TidegateServer() as server:
        yield server


@pytest.fixture
def workspace(server: TidegateServer, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    workspace = server.workspace()
    monkeypatch.setenv("TIDEGATE_URL", server.url)
    monkeypatch.setenv("TIDEGATE_KEY", workspace.key.secret)
    for _ in range(4):
        workspace.limit(namespace="email.send", identifier="user_123", limit=2)
        workspace.limit(namespace="email.send", identifier=HOSTILE, limit=2)
    return workspace


def test_once_shows_rates_namespaces_identifiers_and_denials(workspace: Workspace, invoke: Invoke) -> None:
    shown = invoke("top", "--once").stdout
    assert re.search(r"^tidegate \S+ · region default · 1 process · \d\d:\d\d:\d\d UTC$", shown, re.MULTILINE)
    assert re.search(r"^allowed \S+/s · denied \S+/s", shown, re.MULTILINE)
    assert "catalog ok · origin ok · counts ok · breakers closed" in shown
    assert re.search(r"^email\.send +\S+ +\S+ +4$", shown, re.MULTILINE)
    assert re.search(r"user_123 in email\.send: 2 per 30 days, .* ago, retry in ", shown)


def test_once_with_json_is_the_document_of_the_console(workspace: Workspace, invoke: Invoke) -> None:
    found = json.loads(invoke("top", "--once", "--json").stdout)
    assert {row["identifier"] for row in found["denials"]} == {"user_123", HOSTILE}
    assert found["workers"] == 1


def test_without_a_terminal_it_prints_once(workspace: Workspace, invoke: Invoke) -> None:
    assert invoke("top").stdout.startswith("tidegate ")


def test_json_without_once_goes_on(workspace: Workspace, tmp_path: Path) -> None:
    running = subprocess.Popen([*PROGRAM, "top", "--json"], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert running.stdout is not None
    try:
        first, second = (json.loads(running.stdout.readline()) for _ in range(2))
        assert second["at_ms"] > first["at_ms"]
    finally:
        running.terminate()
        running.wait(TIMEOUT_S)
        running.stdout.close()


def test_no_name_can_write_to_the_terminal(workspace: Workspace, invoke: Invoke) -> None:
    shown = invoke("top", "--once").stdout
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert "<U+001B>[2J" in shown


def test_a_key_without_the_permission_and_a_console_that_is_off_say_what_to_do(
    server: TidegateServer, workspace: Workspace, invoke: Invoke
) -> None:
    key = server.key(workspace.id, ["ratelimit.*.limit"]).secret
    denied = invoke("top", "--once", "--key", key)
    assert denied.exit_code == 2
    assert "console.read" in denied.stderr
    with TidegateServer("--console-enabled", "off") as closed:
        off = invoke("top", "--once", "--url", closed.url)
    assert off.exit_code == 2
    assert "--console-enabled on" in off.stderr


class Terminal:
    """`tidegate top` in a terminal of 100 x 40."""

    def __init__(self, folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update({"COLUMNS": "100", "LINES": "40", "TERM": "xterm"})
            os.execv(PROGRAM[0], [*PROGRAM, "top"])
        self.seen = ""

    def until(self, pattern: str) -> None:
        """Read until the output since the last call matches."""
        deadline = time.monotonic() + TIMEOUT_S
        while re.search(pattern, self.seen, re.DOTALL) is None:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self.fd, 65_536).decode("utf-8", "replace")
        self.seen = ""

    def press(self, key: str) -> None:
        os.write(self.fd, key.encode())

    def end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_it_updates_sorts_by_keys_pauses_and_restores_the_terminal(
    workspace: Workspace, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path)
    terminal.until(r"email\.send")
    workspace.limit(namespace="another", identifier="x")
    terminal.until(r"another")
    terminal.press("n")
    terminal.until(r"another.*email\.send.*HOTTEST")
    terminal.press(" ")
    terminal.until("paused: space resumes")
    terminal.press(" ")
    terminal.until("q quit")
    terminal.press("q")
    terminal.until(re.escape("\x1b[?1049l"))
    assert terminal.end() == 0


def shown_document(**changes: Any) -> dict[str, Any]:
    return document({}, [report(**changes)], at_ms=1_794_837_787_000)


names = st.text(max_size=40)


@given(names, names, st.sampled_from(ORDERS), st.integers(20, 200), st.integers(3, 60))
def test_a_screen_has_the_size_of_its_terminal_whatever_the_names_are(
    namespace: str, identifier: str, sort: Order, width: int, height: int
) -> None:
    row = {"namespace": namespace, "identifier": identifier, "per_s": 3.0}
    denial = {
        **row,
        "at_ms": 1_794_837_786_000,
        "rule": "5 per minute",
        "override_id": "rlor_1",
        "override_identifier": identifier,
        "retry_after_ms": None,
    }
    shown = shown_document(namespaces={namespace: [1, 2]}, hot=[row] * 3, denied_most=[row], denials=[denial])
    lines = screen(shown, sort, width, height)
    assert len(lines) == height
    for line in lines:
        assert len(line) <= width
        assert visible(line) == line


def test_namespaces_are_sorted_as_asked() -> None:
    shown = shown_document(namespaces={"a": [0, 0], "b": [0, 0], "c": [0, 0]})
    for row, allowed, denied in zip(shown["namespaces"], (1.0, 3.0, 2.0), (5.0, 0.0, 9.0), strict=True):
        row.update(allowed=allowed, denied=denied)

    def order(sort: Order) -> str:
        lines = screen(shown, sort, 100, None)
        first = next(index for index, line in enumerate(lines) if line.startswith("NAMESPACE"))
        return "".join(line[0] for line in lines[first + 1 : first + 4])

    assert (order("name"), order("allowed"), order("denied")) == ("abc", "bca", "cab")


@given(st.lists(st.tuples(names, names), max_size=5))
def test_the_columns_of_a_table_are_aligned(rows: list[tuple[str, str]]) -> None:
    lines = table(["NAME", "OTHER"], rows).split("\n")
    assert len(lines) == len(rows) + 1
    at = lines[0].index("OTHER")
    for (_, second), line in zip(rows, lines[1:], strict=True):
        assert line[at:] == visible(second).rstrip()


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("waiting"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_a_step_longer_than_a_second_shows_progress_on_a_terminal(tmp_path: Path) -> None:
    """The database is a port that accepts and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgres://u@127.0.0.1:{silent.getsockname()[1]}/d"
        pid, fd = pty.fork()
        if pid == 0:
            os.chdir(tmp_path)
            os.execv(PROGRAM[0], [*PROGRAM, "ledger", "--ledger", url, "--timeout", "3"])
        seen = b""
        while True:
            try:
                data = os.read(fd, 65_536)
            except OSError:
                break
            if not data:
                break
            seen += data
        _, status = os.waitpid(pid, 0)
        os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 2
    assert "waiting for the database … ".encode() in seen
