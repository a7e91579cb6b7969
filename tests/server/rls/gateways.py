"""Real gateways and a rate limit service in its own process, for tests that send requests through both."""

from __future__ import annotations

import http.client
import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from tests.server.http2.programs import find_program
from tidegate.testing.servers.process import ServerProcess

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 30.0
NOT_CHECKED = "Envoy with Tidegate as its rate limit service"


def code_block(page: str, first_line: str) -> str:
    """The code block of a documentation page that begins with this line, so that the tests run what the page shows."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL):
        if block.startswith(first_line):
            return str(block)
    raise AssertionError(f"{page} has no code block that begins with {first_line!r}")


class Stateless(ServerProcess):
    """A server that keeps nothing between starts; its files are written when its port is known."""

    def _prepare(self) -> None:
        """Nothing to make ready."""

    def _wipe(self) -> None:
        """Nothing is kept."""

    @property
    def version(self) -> str:
        """No test depends on it."""
        return ""

    def _is_ready(self) -> bool:
        return is_listening(self.pid, self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class TidegateProcess(Stateless):
    """`tidegate serve` whose counts are lost in a restart. Its `port` is that of one listener for gateways."""

    kind: ClassVar[str] = "tidegate"

    def __init__(self, listener: str, rules: Path, policies: Path | None = None) -> None:
        """`listener`: `rls` or `check`."""
        super().__init__()
        self._arguments = ["--rls-config", str(rules)]
        if policies is not None:
            self._arguments += ["--check-config", str(policies)]
        self._listener = listener

    def _argv(self) -> list[str]:
        data = str(self.directory / "data")
        own = ["--data-dir", data, "--listen", "127.0.0.1:0", "--origin", "memory://"]
        address = [f"--{self._listener}-address", f"127.0.0.1:{self.port}"]
        return [sys.executable, "-m", "tidegate.cli", "serve", *own, *address, *self._arguments]


def is_listening(pid: int, port: int) -> bool:
    """Whether this process listens on the port, according to /proc."""
    inodes = set()
    lines = [
        line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    for line in lines:
        fields = line.split()
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    try:
        return any(str(link.readlink()) in inodes for link in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]


def get(port: int, path: str = "/", **headers: str) -> Reply:
    """One request to a gateway. Underscores in header names are hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        answer.read()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()})
    finally:
        connection.close()


class Envoy(Stateless):
    """Envoy with a configuration of the documentation.

    Changes for tests: addresses; a timeout that a busy machine does not reach; a second listener `closed` that denies
    when the service does not answer; an application inside Envoy itself.
    """

    kind: ClassVar[str] = "envoy"

    def __init__(self, service: TidegateProcess, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._program = find_program("envoy", NOT_CHECKED)
        self._service = service
        self._config = config or yaml.safe_load(code_block("behind-envoy.md", "# envoy.yaml"))

    def _argv(self) -> list[str]:
        file = self.directory / "envoy.json"
        file.write_text(json.dumps(self._configuration()))
        return [
            self._program,
            "-c",
            str(file),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "-l",
            "warning",
        ]

    def _is_ready(self) -> bool:
        try:
            return self._admin("/ready").strip() == b"LIVE" and self._admin("/server_info") != b""
        except OSError:
            return False

    def _admin(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def listener(self, name: str) -> int:
        """The port of a listener."""
        for status in json.loads(self._admin("/listeners?format=json"))["listener_statuses"]:
            if status["name"] == name:
                return int(status["local_address"]["socket_address"]["port_value"])
        raise AssertionError(f"Envoy has no listener {name}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener('edge')}"

    def _configuration(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(self._config))
        resources = config["static_resources"]
        (edge,) = resources["listeners"]
        edge["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
        asking = limit_filter(edge)
        (asking["http_service"]["server_uri"] if "http_service" in asking else asking)["timeout"] = (
            f"{TIMEOUT_S:g}s"
        )
        closed = json.loads(json.dumps(edge))
        closed["name"] = "closed"
        limit_filter(closed).update(
            {"failure_mode_allow": False} if "http_service" in asking else {"failure_mode_deny": True}
        )
        application = {"address": {"pipe": {"path": str(self.directory / "application.sock")}}}
        resources["listeners"] += [closed, application_listener(application)]
        for cluster in resources["clusters"]:
            cluster["type"] = "STATIC"
            (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            if cluster["name"] == "application":
                endpoint["endpoint"] = application
            else:
                endpoint["endpoint"]["address"]["socket_address"] = {
                    "address": "127.0.0.1",
                    "port_value": self._service.port,
                }
        config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": self.port}}}
        return config


def limit_filter(listener: dict[str, Any]) -> Any:
    return listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]["typed_config"]


def application_listener(address: dict[str, Any]) -> dict[str, Any]:
    """An application that answers 200 to everything."""
    extensions = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "application",
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{extensions}.http.router.v3.Router"}}
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}],
                }
            ]
        },
    }
    return {
        "name": "application",
        **address,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
