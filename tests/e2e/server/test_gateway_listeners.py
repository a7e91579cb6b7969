"""`tidegate serve` with the rate limit service and the check: one set of rules, one limiter, one process."""

from __future__ import annotations

import http.client
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ratelimit.v3 import rls_pb2_grpc

from tests.server.harness import TIMEOUT_S, Reply, TidegateServer, eventually
from tests.server.rls.asking import OK, OVER_LIMIT, RULES, one, request, response
from tidegate.testing.servers.redis import create_certificate

pytestmark = pytest.mark.server

USER = [("user", "ann")]
POLICIES = """
trusted_hops = 1

[policies.api]
domain = "edge"
descriptors = [{user = "header:x-user"}, {tier = "header:x-tier"}]

[policies.nginx]
domain = "edge"
descriptors = [{user = "header:x-user"}]
deny_status = 403

[policies.address]
domain = "edge"
descriptors = [{user = "address"}]
"""


class GatewayServer(TidegateServer):
    """`tidegate serve` with all listeners."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.rules, self.policies = folder / "rules.yaml", folder / "check.toml"
        self.rules.write_bytes(RULES)
        self.policies.write_text(POLICIES)
        self.rls_port = self.check_port = 0
        super().__init__(
            *("--rls-address", "127.0.0.1:0", "--rls-config", str(self.rules)),
            *("--check-address", "127.0.0.1:0", "--check-config", str(self.policies)),
            *arguments,
        )

    def start(self) -> None:
        super().start()
        # By now every listener has written its port to the log.
        found = {
            name: int(port)
            for name, port in re.findall(r"(rate limit service|check) listens on port (\d+)", self.log)
        }
        self.rls_port, self.check_port = found["rate limit service"], found["check"]

    def ask(self, *descriptors: Any, **options: Any) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{self.rls_port}") as channel:
            return ask(channel, *descriptors, **options)

    def check(self, target: str, method: str = "GET", /, **fields: str) -> Reply:
        return self.check_at(self.check_port, target, method, **fields)

    def check_at(self, port: int, target: str, method: str = "GET", /, **fields: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            headers = {name.replace("_", "-"): value for name, value in fields.items()}
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            return Reply(
                answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()


def ask(channel: Any, *descriptors: Any, **options: Any) -> Any:
    stub = rls_pb2_grpc.RateLimitServiceStub(channel)
    return response(stub.ShouldRateLimit(request(*descriptors, **options), timeout=TIMEOUT_S))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """Shared by tests that use their own user names."""
    with GatewayServer(tmp_path_factory.mktemp("rules")) as server:
        yield server


def test_both_protocols_count_on_the_same_counter(shared: GatewayServer) -> None:
    user = [("user", "both")]
    assert [shared.ask(one(user)).code for _ in range(3)] == [OK] * 3
    target = "/v1/check?domain=edge&descriptor=user%3Dboth"
    assert [shared.check(target).status for _ in range(3)] == [200, 200, 429]
    assert shared.ask(one(user)).code == OVER_LIMIT


def test_a_check_answers_with_header_fields_and_no_body(shared: GatewayServer) -> None:
    replies = [shared.check("/v1/check?policy=api", x_user="fields") for _ in range(6)]
    assert [reply.status for reply in replies] == [200] * 5 + [429]
    assert replies[0].headers["ratelimit-policy"] == '"user";q=5;w=31536000'
    assert replies[0].headers["ratelimit"].startswith('"user";r=4;t=')
    assert "retry-after" not in replies[0].headers
    assert int(replies[5].headers["retry-after"]) > 0
    assert {reply.body for reply in replies} == {b""}
    assert {reply.headers["cache-control"] for reply in replies} == {"no-store"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_check_may_come_with_the_method_of_the_request_that_it_is_about(
    shared: GatewayServer, method: str
) -> None:
    fields = {"x_user": f"method-{method}"}
    assert shared.check("/v1/check?policy=api&cost=5", method, **fields).status == 200
    assert shared.check("/v1/check?policy=api", method, **fields).status == 429


def test_a_policy_may_choose_another_status_for_a_denial(shared: GatewayServer) -> None:
    statuses = [shared.check("/v1/check?policy=nginx", x_user="status").status for _ in range(6)]
    assert statuses == [200] * 5 + [403]


def test_all_limits_of_a_policy_are_one_decision(shared: GatewayServer) -> None:
    fields = {"x_user": "together", "x_tier": "together"}
    assert [shared.check("/v1/check?policy=api", **fields).status for _ in range(4)] == [200] * 3 + [429]
    # The tier denied the fourth request, which therefore does not count for the user.
    assert shared.ask(one([("user", "together")], 0)).statuses[0].remaining == 2


def test_what_follows_a_policy_in_the_path_changes_nothing(shared: GatewayServer) -> None:
    """Envoy appends the client's own path and query there."""
    tails = ["/", "/a?cost=0", "/?policy=address&cost=0", "/../nginx?domain=edge", "/%2e%2e/x", "?cost=0"]
    statuses = [shared.check(f"/v1/check/api{tail}", x_user="tail").status for tail in tails]
    assert statuses == [200] * 5 + [429]
    assert shared.check("/v1/check/nothing/a", x_user="tail").status == 400
    assert shared.check("/v1/check/", x_user="tail").status == 400


def test_the_address_is_the_last_one_that_a_trusted_proxy_wrote(shared: GatewayServer) -> None:
    for number in range(5):
        fields = {"x_forwarded_for": f"6.6.6.{number}, 192.0.2.7"}
        assert shared.check("/v1/check?policy=address", **fields).status == 200
    assert shared.check("/v1/check?policy=address", x_forwarded_for="192.0.2.7").status == 429
    # Without the field it is the other end of the connection.
    assert shared.check("/v1/check?policy=address").status == 200
    assert shared.ask(one([("user", "127.0.0.1")], 0)).statuses[0].remaining == 4


def test_a_query_that_cannot_be_parsed_is_a_400_and_counts_nothing(shared: GatewayServer) -> None:
    for query in (
        "",
        "policy=nothing",
        "policy=api&cost=-1",
        "policy=api&policy=api",
        "domain=edge",
        "a=%ff",
    ):
        reply = shared.check(f"/v1/check?{query}", x_user="unclear")
        assert reply.status == 400, query
        assert reply.body
    assert shared.ask(one([("user", "unclear")], 0)).statuses[0].remaining == 5


def test_the_private_listener_serves_nothing_else(shared: GatewayServer) -> None:
    for path in ("/metrics", "/readyz", "/v2/liveness", "/v1/checks", "/"):
        assert shared.check(path).status == 404, path


@pytest.mark.slow
def test_the_check_is_as_the_openapi_document_of_this_server_describes_it(shared: GatewayServer) -> None:
    assert "/v1/check" in shared.get("/docs").body.decode()
    workspace = shared.workspace()
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "schemathesis"),
            *("run", f"{shared.url}/openapi.json", "--include-path", "/v1/check"),
            *("-H", f"Authorization: Bearer {workspace.key.secret}"),
            *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
            *("--max-examples", "150", "--generation-deterministic", "--no-color"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8_000:]
    assert "Tested: 1" in done.stdout


def test_the_public_listener_needs_a_key_with_the_permission(shared: GatewayServer) -> None:
    target = "/v1/check?policy=api"

    def check(**fields: str) -> Reply:
        return shared.check_at(shared.port, target, x_user="keys", **fields)

    assert check().problem.endswith("invalid_input")
    assert check(authorization="Bearer wrong").status == 401
    strong = shared.workspace()
    weak = shared.key(strong.id, ["ratelimit.*.read_override"])
    assert check(authorization=f"Bearer {weak.secret}").status == 403
    assert shared.ask(one([("user", "keys")], 0)).statuses[0].remaining == 5, "nothing was counted"
    statuses = [check(authorization=f"Bearer {strong.key.secret}").status for _ in range(6)]
    assert statuses == [200] * 5 + [429]


def test_a_check_uses_as_much_of_the_quota_as_it_has_descriptors(shared: GatewayServer) -> None:
    workspace = shared.workspace(quota=5, quota_duration_ms=3_600_000)

    def check(*users: str) -> Reply:
        target = "/v1/check?domain=edge" + "".join(f"&descriptor=user%3D{user}" for user in users)
        return shared.check_at(shared.port, target, authorization=f"Bearer {workspace.key.secret}")

    first = check("quota-a", "quota-b", "quota-c")
    assert (first.status, first.headers["ratelimit-remaining"]) == (200, "2")
    assert check("quota-a", "quota-b", "quota-c").problem.endswith("workspace_rate_limited")
    assert check().status == 400, "an invalid one uses none"
    assert check("quota-a", "quota-b").headers["ratelimit-remaining"] == "0"


def test_long_fields_are_refused_within_the_bounds_of_the_http_api(shared: GatewayServer) -> None:
    assert shared.check("/v1/check?policy=api", x_user="x" * 4_097).status == 400
    assert shared.check("/v1/check?policy=api", x_user="x" * 40_000).status == 431
    assert shared.check("/v1/check?policy=" + "x" * 9_000).status == 414
    assert shared.check("/v1/check?policy=api" + "&a=b" * 2_000, x_user="many").status == 400


def test_rules_and_policies_follow_their_files(tmp_path: Path) -> None:
    with GatewayServer(tmp_path) as server:
        server.rules.write_bytes(RULES.replace(b"requests_per_unit: 5}", b"requests_per_unit: 7}"))
        eventually(lambda: server.ask(one(USER, 0)).statuses[0].quota == 7, "the new rules apply")
        assert server.check("/v1/check?policy=new", x_user="ann").status == 400
        server.policies.write_text(POLICIES.replace("policies.api", "policies.new"))
        server.signal(signal.SIGHUP)
        eventually(
            lambda: server.check("/v1/check?policy=new", x_user="ann").status == 200, "the new policies apply"
        )
        server.policies.write_text("trusted_hops = []")
        server.signal(signal.SIGHUP)
        eventually(lambda: "trusted_hops" in server.log, "the fault is in the log")
        assert server.check("/v1/check?policy=new", x_user="ann").status == 200


def test_sigterm_answers_the_calls_that_are_under_way_and_ends_with_0(tmp_path: Path) -> None:
    with GatewayServer(tmp_path) as server:
        failures: list[str] = []
        asked = threading.Event()

        def play() -> None:
            with grpc.insecure_channel(f"127.0.0.1:{server.rls_port}") as channel:
                stub = rls_pb2_grpc.RateLimitServiceStub(channel)
                while True:
                    try:
                        stub.ShouldRateLimit(request(one(USER, 0)), timeout=TIMEOUT_S)
                        asked.set()
                    except grpc.RpcError as error:
                        # Once the port is closed no new call can be made; a call that was taken is answered.
                        failures.append(f"{error.code()} {error.details()}")
                        return

        player = threading.Thread(target=play)
        player.start()
        assert asked.wait(TIMEOUT_S)
        assert server.stop() == 0
        player.join(TIMEOUT_S)
        assert not player.is_alive()
        (failure,) = failures
        assert "Connection refused" in failure, failure


def test_metrics_count_both_protocols_shadow_rules_reloads_and_connections(tmp_path: Path) -> None:
    with GatewayServer(tmp_path) as server:
        for _ in range(3):
            assert server.ask(one(USER), one([("new", "x")])).code == OK
        assert server.check("/v1/check?policy=api&cost=9", x_user="ann").status == 429
        with pytest.raises(grpc.RpcError):
            server.ask(one(USER), domain="")
        assert server.ask(one([("path", "/a")]), one([("nothing", "x")])).code == OK
        server.rules.write_text("domain: [")
        eventually(lambda: server.metrics()["tidegate_rls_rules_faulty"] == 1, "the fault is seen")
        server.rules.write_bytes(RULES.replace(b"requests_per_unit: 5}", b"requests_per_unit: 7}"))
        eventually(lambda: server.metrics()["tidegate_rls_rules_faulty"] == 0, "the files are right again")
        with grpc.insecure_channel(f"127.0.0.1:{server.rls_port}") as channel:
            assert ask(channel, one(USER, 0)).code == OK
            found = server.metrics()
    assert found['tidegate_rls_requests_total{outcome="allowed"}'] == 5
    assert found['tidegate_rls_requests_total{outcome="denied"}'] == 1
    assert found['tidegate_rls_shadow_verdicts_total{verdict="allowed"}'] == 2
    assert found['tidegate_rls_shadow_verdicts_total{verdict="denied"}'] == 1
    assert found["tidegate_rls_descriptors_without_rule_total"] == 1
    assert found['tidegate_rls_calls_total{method="ShouldRateLimit",status="OK"}'] == 5
    assert found['tidegate_rls_calls_total{method="ShouldRateLimit",status="INVALID_ARGUMENT"}'] == 1
    assert found['tidegate_rls_reloads_total{outcome="ok"}'] == 1
    assert found['tidegate_rls_reloads_total{outcome="failed"}'] == 1
    assert found["tidegate_rls_connections"] == 1
    assert found['tidegate_http_requests_total{operation="check",status="429"}'] == 1
    rules = {name: count for name, count in found.items() if name.startswith("tidegate_rls_rule_decisions")}
    assert rules == {
        rule_series("user", "", "enforced", "allowed"): 4,
        rule_series("user", "", "enforced", "denied"): 1,
        rule_series("new", "", "shadow", "allowed"): 2,
        rule_series("new", "", "shadow", "denied"): 1,
        rule_series("path", "path=/a", "enforced", "allowed"): 1,
    }


def rule_series(rule: str, values: str, mode: str, outcome: str) -> str:
    labels = f'domain="edge",rule="{rule}",values="{values}",mode="{mode}",outcome="{outcome}"'
    return f"tidegate_rls_rule_decisions{{{labels}}}"


def test_workers_share_the_address_and_the_counts(tmp_path: Path) -> None:
    with GatewayServer(tmp_path, "--workers", "2") as server:
        for _ in range(20):
            assert server.ask(one([("tier", "gold")])).code == OK
            assert server.check("/v1/check?domain=edge&descriptor=tier%3Dgold").status == 200
        eventually(
            lambda: server.ask(one([("tier", "gold")], 0)).statuses[0].remaining == 10, "workers converge"
        )
        # Of all workers, whichever answers.
        found = server.metrics()
        assert found['tidegate_rls_requests_total{outcome="allowed"}'] > 40
        assert found['tidegate_http_requests_total{operation="check",status="200"}'] == 20
        assert server.stop() == 0


def test_all_listeners_have_the_certificate(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    create_certificate(cert, key)
    with GatewayServer(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.rls_port}", credentials) as channel:
            assert ask(channel, one(USER)).code == OK
        trusting = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection(
            "localhost", server.check_port, context=trusting, timeout=TIMEOUT_S
        )
        connection.request("GET", "/v1/check?policy=api", headers={"X-User": "tls"})
        assert connection.getresponse().status == 200
        connection.close()


def test_wrong_rules_are_a_fault_of_the_configuration(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("domain: edge\ndescriptors:\n  - key: user\n    rate_limit: {unit: fortnight}\n")
    for place in (rules, tmp_path / "nothing.yaml"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tidegate.cli", "serve", "--data-dir", str(tmp_path / "data")),
                *("--listen", "127.0.0.1:0", "--rls-address", "127.0.0.1:0", "--rls-config", str(place)),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 2
        assert f"rls.config: got '{place}' from flag --rls-config" in done.stderr
    assert not (tmp_path / "data").exists(), "nothing is made before the configuration is right"


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_bytes(RULES)
    without = "import sys; sys.modules['yaml'] = None; from tidegate.cli import main; main()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", without, "serve", "--data-dir", str(tmp_path / "data")),
            *("--rls-address", "127.0.0.1:0", "--rls-config", str(tmp_path / "rules.yaml")),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'tidegate[rls]'" in done.stderr
