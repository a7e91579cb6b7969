"""nginx, HAProxy, Caddy, Traefik and ext_authz, with the configurations of docs/how-to/behind-other-gateways.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Self

import pytest
import yaml

from tests.server.http2.programs import find_program
from tests.server.rls.gateways import Envoy, Stateless, TidegateProcess, code_block, get
from tidegate.testing.servers.process import wait_until

pytestmark = pytest.mark.server

PAGE = "behind-other-gateways.md"


class Application:
    """The application behind the gateways: answers 200 to everything."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Gateway(Stateless):
    """One of the gateways, with Tidegate beside it and an application behind it."""

    kind: ClassVar[str] = "gateway"

    def __init__(self, name: str, service: TidegateProcess, application: Application) -> None:
        super().__init__()
        self.name = name
        self.service = service
        self._application = application
        self._program = find_program(name, f"{name} with Tidegate's check")

    def _block(self, first_line: str, listen: str, listen_here: str) -> str:
        """A configuration of the page, with the addresses of this test."""
        text = code_block(PAGE, first_line)
        assert listen in text
        text = text.replace("tidegate:8082", f"127.0.0.1:{self.service.port}")
        text = text.replace("application:8000", f"127.0.0.1:{self._application.port}")
        return text.replace(listen, listen_here.format(port=self.port))

    def _write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def _argv(self) -> list[str]:
        commands = {
            "nginx": self._nginx,
            "haproxy": self._haproxy,
            "caddy": self._caddy,
            "traefik": self._traefik,
        }
        return commands[self.name]()

    def _nginx(self) -> list[str]:
        text = self._block("# nginx.conf", "listen 8080", "listen 127.0.0.1:{port}")
        temporary = "".join(
            f"{kind}_temp_path {self.directory / kind}; "
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        text = text.replace("http {", f"http {{ access_log off; {temporary}", 1)
        file = self._write("nginx.conf", f"daemon off; master_process off; pid {self.directory}/pid;\n{text}")
        return [self._program, "-e", "stderr", "-c", file]

    def _haproxy(self) -> list[str]:
        lua = self._write("tidegate.lua", self._block("-- tidegate.lua", "tidegate.lua", "tidegate.lua"))
        text = self._block("# haproxy.cfg", "bind :8080", "bind 127.0.0.1:{port}")
        return [self._program, "-db", "-f", self._write("haproxy.cfg", text.replace("tidegate.lua", lua))]

    def _caddy(self) -> list[str]:
        text = self._block("# Caddyfile", "\n:8080 {", "\nhttp://127.0.0.1:{port} {{")
        file = self._write("Caddyfile", "{\n\tadmin off\n\tpersist_config off\n}\n" + text)
        return [self._program, "run", "--adapter", "caddyfile", "--config", file]

    def _traefik(self) -> list[str]:
        file = self._write("dynamic.yaml", self._block("# traefik-dynamic.yaml", "http:", "http:"))
        return [
            self._program,
            f"--entrypoints.web.address=127.0.0.1:{self.port}",
            f"--providers.file.filename={file}",
            "--global.checknewversion=false",
            "--global.sendanonymoususage=false",
        ]

    def _is_ready(self) -> bool:
        try:
            # Routes may come after the listener.
            return super()._is_ready() and get(self.port, x_user="ready").status == 200
        except OSError:
            return False


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TidegateProcess]:
    rules, policies = tmp_path / "rules.yaml", tmp_path / "check.toml"
    text = code_block(PAGE, "# rules.yaml")
    # Windows that do not end while a test runs.
    rules.write_text(text.replace("unit: minute", "unit: year").replace("unit: hour", "unit: year"))
    policies.write_text(code_block(PAGE, "# check.toml"))
    with TidegateProcess("check", rules, policies) as service:
        yield service


@pytest.fixture(params=["nginx", "haproxy", "caddy", "traefik"])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    name = str(request.param)
    find_program(name, f"{name} with Tidegate's check")
    # Started only now: if the program is missing, no server is started.
    service = request.getfixturevalue("service")
    with Application() as application, Gateway(name, service, application) as gateway:
        yield gateway


def test_requests_are_allowed_and_then_denied(gateway: Gateway) -> None:
    replies = [get(gateway.port, x_user="ann") for _ in range(7)]
    assert [reply.status for reply in replies] == [200] * 5 + [429] * 2
    assert int(replies[-1].headers["retry-after"]) > 0
    # Both limits are shown where a gateway passes them on.
    shows_allowed = gateway.name in {"nginx", "haproxy"}
    assert ("ratelimit" in replies[0].headers) == shows_allowed
    assert '"user";r=0' in replies[-1].headers["ratelimit"]
    assert '"address";q=100' in replies[-1].headers["ratelimit-policy"]
    assert get(gateway.port, x_user="bob").status == 200


def test_a_client_cannot_choose_its_address(gateway: Gateway) -> None:
    first = [get(gateway.port, x_forwarded_for=f"6.6.6.{number}").status for number in range(110)]
    assert first.count(429) > 0, "all of them are one client"


def test_a_stopped_service_fails_open_or_closed_and_comes_back(gateway: Gateway) -> None:
    gateway.service.kill()
    status = get(gateway.port, x_user="ann").status
    assert status == 200 if gateway.name == "haproxy" else status >= 500
    gateway.service.start()
    assert [get(gateway.port, x_user="ann").status for _ in range(6)] == [200] * 5 + [429]


def test_envoy_asks_by_ext_authz_and_a_client_cannot_change_what_is_asked(
    request: pytest.FixtureRequest,
) -> None:
    find_program("envoy", "Envoy with Tidegate's check")
    service = request.getfixturevalue("service")
    with Envoy(service, yaml.safe_load(code_block(PAGE, "# envoy-ext-authz.yaml"))) as envoy:
        open_port, closed_port = envoy.listener("edge"), envoy.listener("closed")
        paths = ["/", "/a?cost=0", "/?policy=nginx&cost=0", "/..%2f?domain=edge", "/x?descriptor=user=bob"]
        replies = [get(open_port, path, x_user="ann") for path in [*paths, "/?cost=0"]]
        assert [reply.status for reply in replies] == [200] * 5 + [429]
        assert replies[0].headers["ratelimit"].startswith('"address";r=99;')
        assert '"user";q=5' in replies[0].headers["ratelimit-policy"]
        assert int(replies[5].headers["retry-after"]) > 0
        forged = [get(open_port, x_forwarded_for=f"6.6.6.{number}").status for number in range(100)]
        assert forged.count(429) == 5, "all of them are one client, which has made five requests before"
        service.kill()
        assert [get(port, x_user="bob").status for port in (open_port, closed_port)] == [200, 403]
        service.start()
        wait_until(
            lambda: get(closed_port, x_user="bob").status == 200, timeout_s=30, what="Envoy to connect again"
        )
