"""limit, multi-limit and overrides against a real server, which `tidegate serve` runs as its own process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.conftest import PROGRAM, Invoke, InvokeJSON, Program
from tidegate.cli.usage import describe

SECRET = "S3cretHunter2"


class Server(NamedTuple):
    url: str
    key: str
    data_dir: Path
    process: subprocess.Popen[str]

    @property
    def env(self) -> dict[str, str]:
        return {"TIDEGATE_URL": self.url, "TIDEGATE_KEY": self.key}


def start(data_dir: Path, *arguments: str, stderr: int | None = None) -> Server:
    """`tidegate serve` on a free port; its first start prints URL and key."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    process = subprocess.Popen(
        [*PROGRAM, "serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    url = key = ""
    if "--json" in arguments:
        printed = json.loads(process.stdout.readline())
        url, key = printed["url"], printed["key"]
    while not (url and key) and (line := process.stdout.readline()):
        url = url or "".join(re.findall(r"listening on (http://\S+)", line))
        key = key or "".join(re.findall(r"^\s+(tg_[0-9A-Za-z]{32})\s*$", line))
    assert url, process.wait(10)
    return Server(url, key, data_dir, process)


def stop(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=30)
    return server.process.returncode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("server") / "data")
    yield running
    assert stop(running) == 0


@pytest.fixture
def as_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Commands of this test call the server with its first key, through environment variables."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


def test_a_limit_is_allowed_until_it_is_used_up_and_then_exits_with_1(
    as_client: Server, tidegate: Program
) -> None:
    codes = [tidegate("limit", "email.send", "alice", "3/day").returncode for _ in range(5)]
    assert codes == [0, 0, 0, 1, 1]


def test_limit_prints_the_response_of_the_api_as_json(as_client: Server, invoke_json: InvokeJSON) -> None:
    first = invoke_json("limit", "email.send", "json", "10/day", "--cost", "4")
    reset = first.pop("reset")
    assert first == {"success": True, "limit": 10, "remaining": 6, "retryAfter": 0}
    assert reset > time.time() * 1000
    denied = invoke_json("limit", "email.send", "json", "10", "--duration", "1d", "--cost", "7", exit_code=1)
    assert (denied["success"], denied["remaining"]) == (False, 0)
    assert 0 < denied["retryAfter"] <= 2 * 86_400
    never = invoke_json("limit", "email.send", "json", "10/day", "--cost", "11", exit_code=1)
    assert never["retryAfter"] is None
    peeked = invoke_json("limit", "email.send", "json", "10/day", "--cost", "0")
    assert peeked["remaining"] == 6


def test_an_override_in_shadow_mode_is_shown_as_such(as_client: Server, invoke: Invoke) -> None:
    invoke("limit", "email.send", "anyone", "10/day")
    invoke("overrides", "set", "email.send", "in shadow", "1/day", "--shadow")
    assert invoke("overrides", "get", "email.send", "in shadow").stdout.endswith("1 per day, shadow\n")
    codes = [invoke("limit", "email.send", "in shadow", "10/day").exit_code for _ in range(3)]
    assert codes == [0, 0, 0]


def test_usage_prints_the_parts_of_a_count(
    as_client: Server, invoke: Invoke, invoke_json: InvokeJSON
) -> None:
    invoke("limit", "email.send", "usage", "10/day", "--cost", "4")
    shown = invoke("usage", "email.send", "usage", "10/day").stdout.splitlines()
    assert shown[0].startswith("4 of 10 per day used, 6 left, window ends in ")
    assert shown[1] == "  this process       4"
    assert shown[2].startswith("  its region         4, 0 of it in other processes")
    assert shown[3].startswith("  other regions      0")
    data = invoke_json("usage", "email.send", "usage", "10", "--duration", "1d")
    assert (data["used"], data["own"], data["regional"], data["foreign"], data["carried"]) == (4, 4, 4, 0, 0)


def test_usage_prints_each_region_with_its_age() -> None:
    region = [{"region": "ams", "count": 20, "age": 3_000}, {"region": "other regions", "count": 5}]
    data = {
        "limit": 100,
        "duration": 60_000,
        "used": 40,
        "remaining": 60,
        "reset": 70_000,
        "own": 1,
        "regional": 3,
        "foreign": 25,
        "carried": 4,
        "reserved": 8,
        "regions": region,
        "regionalAge": 0,
        "globalAge": 200,
    }
    assert describe(data, 60_000).splitlines() == [
        "40 of 100 per minute used, 60 left, window ends in 10 s",
        "  this process       1",
        "  its region         3, 2 of it in other processes, 0 ms ago",
        "  other regions      25, 200 ms ago",
        "    ams              20, 3 s ago",
        "    other regions    5",
        "  previous window    4",
        "  reserved           8",
    ]


def test_reset_begins_a_counter_again(as_client: Server, invoke: Invoke, invoke_json: InvokeJSON) -> None:
    invoke("limit", "email.send", "again", "10/day", "--cost", "10")
    shown = invoke("reset", "email.send", "again", "10/day")
    assert (shown.exit_code, shown.stdout) == (
        0,
        "again is at zero again in email.send, in windows of 1 d\n",
    )
    assert invoke_json("usage", "email.send", "again", "10/day")["used"] == 0
    data = invoke_json("reset", "email.send", "again", "10", "--duration", "1d")
    assert data == {"duration": 86_400_000, "confirmed": True}


def test_limit_prints_what_is_left_and_when_to_retry(as_client: Server, invoke: Invoke) -> None:
    allowed = invoke("limit", "email.send", "text", "1/day")
    time_left = r"(\d+ (h|min|s)( \d+ (min|s))?|1 d)"
    assert re.fullmatch(rf"allowed: 0 of 1 per day left, window ends in {time_left}\n", allowed.stdout)
    denied = invoke("limit", "email.send", "text", "1/day")
    assert denied.exit_code == 1
    assert re.fullmatch(
        rf"denied: 0 of 1 per day left, window ends in {time_left}, retry in {time_left}\n", denied.stdout
    )
    never = invoke("limit", "email.send", "text", "1/day", "--cost", "2")
    assert never.stdout.endswith(", never fits: the cost is above the limit\n")


def test_the_window_of_an_override_is_shown_not_that_of_the_request(
    as_client: Server, invoke: Invoke
) -> None:
    invoke("limit", "overridden", "x", "1/day")
    assert invoke("overrides", "set", "overridden", "x", "50/minute").exit_code == 0
    assert invoke("limit", "overridden", "x", "1/day").stdout.startswith("allowed: 49 of 50 per minute left")


def test_lists_have_headers(as_client: Server, invoke: Invoke) -> None:
    invoke("limit", "listed", "x", "1/day")
    invoke("overrides", "set", "listed", "premium_*", "50/minute")
    shown = invoke("overrides", "list", "listed").stdout.splitlines()
    assert re.fullmatch(r"IDENTIFIER +LIMIT +ID", shown[0])
    assert re.fullmatch(r"premium_\* +50 per minute +rlor_\w+", shown[1])
    data_dir = as_client.data_dir
    for command, header in (
        ("keys", r"ID +KEY +STATE +WORKSPACE +NAME +EXPIRES +PERMISSIONS"),
        ("namespaces", r"NAME +ID +WORKSPACE +OVERRIDES +STATE"),
        ("workspaces", r"ID +NAME +STATE +API QUOTA"),
    ):
        first, *rest = invoke(command, "list", "--data-dir", data_dir).stdout.splitlines()
        assert re.fullmatch(header, first), first
        assert rest


@pytest.mark.parametrize("identifier", ["ünï 🎈", "a/b?c=d&e", " spaces ", '"quotes"\\', "-x", "--json"])
def test_identifiers_of_any_kind_reach_the_server(as_client: Server, invoke: Invoke, identifier: str) -> None:
    arguments = ["limit", "--duration", "1d", "--", "any kind", identifier, "1"]
    assert [invoke(*arguments).exit_code for _ in range(2)] == [0, 1]


def test_multi_limit_is_all_or_nothing(as_client: Server, invoke: Invoke, invoke_json: InvokeJSON) -> None:
    def both(exit_code: int) -> Any:
        items = ["--item", "multi", "org", "2/day", "--item", "multi", "user", "1/day"]
        return invoke_json("multi-limit", *items, exit_code=exit_code)

    assert both(0)["passed"] is True
    denied = both(1)
    assert denied["passed"] is False
    assert [(item["identifier"], item["passed"], item["remaining"]) for item in denied["limits"]] == [
        ("org", True, 1),
        ("user", False, 0),
    ]
    # Nothing was counted for the organisation.
    assert invoke_json("limit", "multi", "org", "2/day", "--cost", "0")["remaining"] == 1
    text = invoke("multi-limit", "--item", "multi", "user", "1/day")
    assert text.exit_code == 1
    assert text.stdout.splitlines()[0] == "denied: nothing was counted"


def test_multi_limit_reads_its_items_from_a_file_or_stdin(
    as_client: Server, invoke: Invoke, tmp_path: Path
) -> None:
    items = [{"namespace": "file", "identifier": "x", "limit": 5, "duration": 86_400_000, "cost": 2}]
    (tmp_path / "items.json").write_text(json.dumps(items))
    first = invoke("multi-limit", "--file", "items.json", "--json")
    assert json.loads(first.stdout)["limits"][0]["remaining"] == 3
    second = invoke("multi-limit", "--file", "-", "--json", stdin=json.dumps(items))
    assert json.loads(second.stdout)["limits"][0]["remaining"] == 1
    assert invoke("multi-limit", "--file", "-", stdin=json.dumps(items)).exit_code == 1
    for wrong in ("{}", "nonsense", "[" * 99_999):
        assert invoke("multi-limit", "--file", "-", stdin=wrong).exit_code == 2
    assert invoke("multi-limit").exit_code == 2
    assert invoke("multi-limit", "--item", "a", "b", "nonsense").exit_code == 2


def test_overrides_are_set_found_listed_and_deleted(
    as_client: Server, invoke: Invoke, invoke_json: InvokeJSON
) -> None:
    invoke("limit", "over", "somebody", "1/day")
    made = invoke_json("overrides", "set", "over", "premium_*", "1000/minute")
    assert invoke("overrides", "set", "over", "premium_*", "2000/minute").stdout.strip() == made["overrideId"]
    got = invoke_json("overrides", "get", "over", "premium_7")
    assert got == {**made, "identifier": "premium_*", "limit": 2000, "duration": 60_000}
    limited = invoke_json("limit", "over", "premium_7", "1/day")
    assert (limited["limit"], limited["overrideId"]) == (2000, made["overrideId"])
    blocked = invoke_json("overrides", "set", "over", "spammer", "0", "--duration", "1m")
    assert invoke_json("limit", "over", "spammer", "1000/day", exit_code=1)["limit"] == 0
    listed = invoke_json("overrides", "list", "over")
    assert {item["overrideId"] for item in listed["overrides"]} == {made["overrideId"], blocked["overrideId"]}
    assert listed["cursor"] is None
    assert "blocked" in invoke("overrides", "list", "over").stdout
    assert invoke("overrides", "delete", "over", "premium_*").stdout == "deleted\n"
    gone = invoke("overrides", "get", "over", "premium_7")
    assert gone.exit_code == 2
    assert "404" in gone.stderr
    assert invoke("overrides", "delete", "over", "premium_*").exit_code == 2


def test_overrides_are_listed_completely_or_page_by_page(as_client: Server, invoke_json: InvokeJSON) -> None:
    invoke_json("limit", "pages", "somebody", "1/day")
    made = {
        invoke_json("overrides", "set", "pages", f"u{number}", "5/m")["overrideId"] for number in range(5)
    }
    whole = invoke_json("overrides", "list", "pages", "--page-size", "2")
    assert {item["overrideId"] for item in whole["overrides"]} == made
    assert len(whole["overrides"]) == 5
    page = invoke_json("overrides", "list", "pages", "--page-size", "2", "--cursor", min(made))
    assert [item["overrideId"] for item in page["overrides"]] == sorted(made)[:2]
    assert page["cursor"] == sorted(made)[2]


def test_an_error_response_is_printed_and_exits_with_2(server: Server, invoke: Invoke) -> None:
    wrong = invoke("limit", "a", "b", "1/day", "--url", server.url, "--key", f"tg_{SECRET}")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("error: 401 ")
    assert "request req_" in wrong.stderr
    assert SECRET not in wrong.output
    too_long = invoke("limit", "a", "b" * 600, "1/day", "--url", server.url, "--key", server.key)
    assert too_long.exit_code == 2
    assert "400" in too_long.stderr


def test_keys_made_while_the_server_runs_work_and_revoked_ones_do_not(
    server: Server, invoke: Invoke, invoke_json: InvokeJSON
) -> None:
    made = invoke_json(
        "keys", "create", "--data-dir", server.data_dir, "--workspace", "other", "--permissions", "all"
    )

    def call() -> int:
        return invoke("limit", "keyed", "x", "1000/day", "--url", server.url, "--key", made["key"]).exit_code

    wait_for(lambda: call() == 0)
    invoke_json("keys", "revoke", made["id"], "--data-dir", server.data_dir)
    wait_for(lambda: call() == 2)


def test_a_deleted_namespace_is_gone_until_it_is_restored(
    as_client: Server, invoke: Invoke, invoke_json: InvokeJSON
) -> None:
    data_dir = as_client.data_dir
    # Without a cost: a fast machine asks more than a thousand times before the server knows of the deletion.
    look = ("limit", "doomed", "x", "1000/day", "--cost", "0")
    invoke_json(*look)
    (namespace,) = (
        item
        for item in invoke_json("namespaces", "list", "--data-dir", data_dir)["namespaces"]
        if item["name"] == "doomed"
    )
    assert invoke_json("namespaces", "delete", "doomed", "--data-dir", data_dir)["id"] == namespace["id"]
    wait_for(lambda: "410" in invoke(*look).stderr)
    names = [item["name"] for item in invoke_json("namespaces", "list", "--data-dir", data_dir)["namespaces"]]
    assert "doomed" not in names
    invoke_json("namespaces", "restore", namespace["id"], "--data-dir", data_dir)
    wait_for(lambda: invoke(*look).exit_code == 0)
    assert invoke("namespaces", "delete", "never", "--data-dir", data_dir).exit_code == 2


def wait_for(condition: Callable[[], bool]) -> None:
    """Running servers apply a change of the catalog within seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 10 s"


def test_a_server_that_cannot_be_reached_is_an_error(invoke: Invoke) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = invoke("limit", "a", "b", "1/s", "--url", url, "--key", "k")
    assert result.exit_code == 2
    assert f"no response from {url}" in result.stderr


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"error": 1}',
        b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 7\r\n\r\n<html/>",
    ],
)
def test_a_server_that_is_not_tidegate_is_an_error(invoke: Invoke, answer: bytes) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while b"}" not in connection.recv(65_536):
                pass
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        result = invoke(
            "limit", "a", "b", "1/s", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--key", "k"
        )
        thread.join()
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "unexpected" not in result.stderr


def test_a_server_that_does_not_respond_times_out(invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = invoke("limit", "a", "b", "1/s", "--url", url, "--key", "k", "--timeout", "0.05")
    assert result.exit_code == 2
    assert "timed out" in result.stderr


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://h", "http://", "http://h:port", f"x://u:{SECRET}@h"]
)
def test_an_invalid_url_is_an_error(invoke: Invoke, url: str) -> None:
    result = invoke("limit", "a", "b", "1/s", "--url", url, "--key", "k")
    assert result.exit_code == 2
    assert SECRET not in result.output


@pytest.mark.parametrize("key", ["", "a\nb", "schlüssel"])
def test_a_key_with_other_than_printable_ascii_is_an_error(invoke: Invoke, key: str) -> None:
    assert invoke("limit", "a", "b", "1/s", "--key", key).exit_code == 2


def test_serve_logs_json_lines_without_the_key_and_stops_gracefully(tmp_path: Path, invoke: Invoke) -> None:
    running = start(tmp_path / "data", "--json", "--log-level", "debug", stderr=subprocess.PIPE)
    assert invoke("limit", "a", "b", "1/s", env=running.env).exit_code == 0
    running.process.send_signal(signal.SIGHUP)
    running.process.send_signal(signal.SIGTERM)
    _, log = running.process.communicate(timeout=30)
    assert running.process.returncode == 0
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert "stopped" in messages
    assert running.key not in log


def test_serve_lists_the_faults_of_an_invalid_configuration(tidegate: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tidegate("serve", "--data-dir", tmp_path / "file", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "data_dir" in done.stderr
    done = tidegate("serve", "--ledger", f"mysql://u:{SECRET}@h/db", "--workers", "0")
    assert done.returncode == 2
    assert "region" in done.stderr
    assert "workers" in done.stderr
    assert SECRET not in done.stderr


def test_serve_names_the_address_that_it_cannot_listen_on(tidegate: Program, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        done = tidegate("serve", "--data-dir", tmp_path / "data", "--listen", taken)
    assert done.returncode == 2
    assert f"error: listen: cannot listen on {taken}" in done.stderr
    assert "--listen" in done.stderr


def test_metrics_of_a_running_server_are_the_documented_ones(as_client: Server, invoke: Invoke) -> None:
    import http.client
    from urllib.parse import urlsplit

    from tidegate.telemetry.metrics import METRICS

    invoke("limit", "measured", "x", "1000/day")
    connection = http.client.HTTPConnection(urlsplit(as_client.url).netloc, timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    typed = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    assert typed == {entry.full_name for entry in METRICS if not entry.is_private}
