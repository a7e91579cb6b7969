"""A real `tidegate serve` process for tests, with functions that create workspaces and keys."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tidegate.adapters.catalogs import open_catalog
from tidegate.ports import Catalog, KeyRow, WorkspaceRow
from tidegate.server.asgi import Application
from tidegate.server.catalog.keys import ALL, digest_of, hint_of, new_key
from tidegate.testing.servers.process import child_pids, is_gone
from tidegate.testing.servers.reservation import PortReservation

TIMEOUT_S = 30.0
# Servers of tests have it, so that `metrics` and `get("/readyz")` see everything.
METRICS_TOKEN = "a token of 28 characters !!!"
# The longest window that a request may ask for, so that no window ends during a test.
MONTH_MS = 2_592_000_000

_numbers = itertools.count()


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll an observable condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> Any:
        assert self.status == 200, self
        return self.json["data"]

    @property
    def error(self) -> Any:
        assert self.status >= 400, self
        assert self.json["error"]["status"] == self.status
        return self.json["error"]

    @property
    def problem(self) -> str:
        """The path of the error's type."""
        return str(self.error["type"]).removeprefix("https://tidegate.dev/docs/errors/")


def _surroundings() -> dict[str, str]:
    """The environment, without the variables of the test run: a server takes them for misspelled settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


class TidegateServer:
    """`tidegate serve` on a free port. Ends with the `with` block, whatever happened to it."""

    def __init__(
        self, *arguments: str, data_dir: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._made_dir = (
            None if data_dir is not None else tempfile.TemporaryDirectory(prefix="tidegate-test-")
        )
        self.data_dir = data_dir if data_dir is not None else Path(self._made_dir.name)  # type: ignore[union-attr] # one of the two
        self.arguments = arguments
        self.env = dict(env or {})
        self.log_path = self.data_dir.parent / f"{self.data_dir.name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.announcement = ""
        self.url = ""
        self.host = ""
        self.port = 0
        self._reservation: PortReservation | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (
            "COVERAGE_PROCESS_CONFIG" in os.environ
            and self.process is not None
            and self.process.poll() is None
        ):
            # `make coverage`: a process that is killed does not say what it ran.
            with suppress(subprocess.TimeoutExpired):
                self.stop(10)
        self.kill()
        if self._reservation is not None:
            self._reservation.release()
        self.log_path.unlink(missing_ok=True)
        if self._made_dir is not None:
            self._made_dir.cleanup()

    def start(self) -> None:
        """Start, and wait until it says that it listens. After a stop, it starts again at the same address."""
        self.kill()
        command = [sys.executable, "-m", "tidegate.cli", "serve", "--data-dir", str(self.data_dir)]
        if self._reservation is None:
            self._reservation = PortReservation()
        command += ["--listen", f"127.0.0.1:{self.port or self._reservation.port}", *self.arguments]
        # setpriv: the server ends with the process that started it, even if that one is killed.
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**_surroundings(), "TIDEGATE_METRICS_TOKEN": METRICS_TOKEN, **self.env},
            )
        assert self.process.stdout is not None
        first = self._read_line()
        match = re.search(r"listening on (https?)://(?:([0-9.]+)|\[([0-9a-f:]+)\]):(\d+)", first)
        assert match is not None, f"{first!r}\n{self.log}"
        self.host, self.port = match[2] or match[3], int(match[4])
        self.url = f"{match[1]}://{self.host}:{self.port}"
        self.announcement = first

    def _read_line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        assert ready, f"the server does not say that it listens\n{self.log}"
        return self.process.stdout.readline()

    def rest_of_announcement(self) -> str:
        """What it wrote to stdout after the first line; only once it has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.read()

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self, timeout_s: float = TIMEOUT_S) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                workers = child_pids(self.pid)
                self.process.kill()
                self.process.wait()
                # They end a moment later, and write to the data directory until then.
                eventually(lambda: all(is_gone(pid) for pid in workers), "the workers have ended")
            if self.process.stdout is not None:
                self.process.stdout.close()

    # Keys and workspaces, made beside the server as `tidegate keys` does.

    @property
    def catalog_url(self) -> str:
        for name, value in itertools.pairwise(self.arguments):
            if name == "--ledger":
                return value
        return f"sqlite:///{self.data_dir / 'tidegate.db'}"

    def with_catalog(self, work: Callable[[Catalog], Any]) -> Any:
        async def main() -> Any:
            catalog = open_catalog(self.catalog_url)
            try:
                return await work(catalog)
            finally:
                await catalog.close()

        return asyncio.run(main())

    def workspace(self, **changes: Any) -> Workspace:
        """A new workspace, with a key that may do everything."""
        name = f"ws_{os.getpid()}_{next(_numbers)}"
        row = WorkspaceRow(name, name, True, None, None)._replace(**changes)
        self.with_catalog(lambda catalog: catalog.put_workspace(row, timeout_s=TIMEOUT_S))
        return Workspace(self, row, self.key(row.id))

    def put_workspace(self, row: WorkspaceRow) -> None:
        self.with_catalog(lambda catalog: catalog.put_workspace(row, timeout_s=TIMEOUT_S))

    def key(self, workspace_id: str, permissions: Sequence[str] = ALL, **changes: Any) -> Key:
        key = new_key()
        row = KeyRow(
            f"key_{os.getpid()}_{next(_numbers)}",
            workspace_id,
            digest_of(key),
            "",
            hint_of(key),
            tuple(permissions),
            time.time_ns() // 1_000_000,
            None,
            True,
            None,
        )._replace(**changes)
        self.put_key(row)
        return Key(key, row)

    def put_key(self, row: KeyRow) -> None:
        self.with_catalog(lambda catalog: catalog.put_key(row, timeout_s=TIMEOUT_S))

    # Requests.

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        """As an operator, who knows the token for metrics."""
        return self.request("GET", path, headers={"Authorization": f"Bearer {METRICS_TOKEN}"})

    def call(self, operation: str, body: Any, key: str | None, **headers: str) -> Reply:
        """POST /v2/ratelimit.<operation>. Header names: underscores stand for hyphens."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", f"/v2/ratelimit.{operation}", data, sent)

    def socket(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """Series by their text: `tidegate_subjects`, `tidegate_decisions_total{outcome="allowed",source="local"}`."""
        lines = self.get("/metrics").body.decode().removesuffix("\n").split("\n")
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }


class Key(NamedTuple):
    secret: str
    row: KeyRow


class Workspace:
    """A workspace of a running server, and a key that may do everything in it."""

    def __init__(self, server: TidegateServer, row: WorkspaceRow, key: Key) -> None:
        self.server = server
        self.row = row
        self.id = row.id
        self.key = key

    def call(self, operation: str, body: Any, **headers: str) -> Reply:
        return self.server.call(operation, body, self.key.secret, **headers)

    def limit(
        self,
        namespace: str = "api",
        identifier: str = "user_1",
        *,
        limit: int = 10,
        duration: int = MONTH_MS,
        cost: int | None = None,
        at_ms: int | None = None,
    ) -> Reply:
        body: dict[str, Any] = {
            "namespace": namespace,
            "identifier": identifier,
            "limit": limit,
            "duration": duration,
        }
        if cost is not None:
            body["cost"] = cost
        return self.call("limit", body, **({} if at_ms is None else {"X_Test_Time": str(at_ms)}))

    def namespace_id(self, name: str = "api") -> str:
        """Its id, once it has been used."""
        (found,) = self.namespace_ids(name)
        return found

    def namespace_ids(self, name: str) -> list[str]:
        changes = self.server.with_catalog(lambda catalog: catalog.changes(0, timeout_s=TIMEOUT_S))
        return [row.id for row in changes.namespaces if (row.workspace_id, row.name) == (self.id, name)]


# The largest body that a `Hosted` application takes.
HOSTED_BODY_BYTES_MAX = 4_096


class Hosted(NamedTuple):
    app: Application
    key: str
