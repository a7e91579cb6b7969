"""A real Envoy with the rate limit service, each in its own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.server.http2.programs import find_program
from tests.server.rls.gateways import NOT_CHECKED, Envoy, TidegateProcess, code_block, get
from tidegate.testing.servers.process import wait_until

pytestmark = pytest.mark.server


def year_long(rules: str) -> str:
    """The rules of the page, with windows that do not end while a test runs."""
    return rules.replace("unit: hour", "unit: year")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(year_long(code_block("behind-envoy.md", "# rules.yaml")))
    return path


@pytest.fixture
def service(rules: Path) -> Iterator[TidegateProcess]:
    find_program("envoy", NOT_CHECKED)
    with TidegateProcess("rls", rules) as service:
        yield service


@pytest.fixture
def envoy(service: TidegateProcess) -> Iterator[Envoy]:
    with Envoy(service) as envoy:
        yield envoy


def test_requests_are_allowed_and_then_denied_with_headers(envoy: Envoy) -> None:
    port = envoy.listener("edge")
    for remaining in (4, 3, 2, 1, 0):
        reply = get(port, x_user="ann")
        assert reply.status == 200
        assert reply.headers["ratelimit-policy"] == '"user";q=5;w=31536000'
        assert reply.headers["ratelimit"].startswith(f'"user";r={remaining};t=')
        assert reply.headers["x-ratelimit-limit"] == "5, 5;w=31536000"
        assert reply.headers["x-ratelimit-remaining"] == str(remaining)
        assert "retry-after" not in reply.headers
    reply = get(port, x_user="ann")
    assert reply.status == 429
    assert reply.headers["x-envoy-ratelimited"] == "true"
    assert reply.headers["x-ratelimit-remaining"] == "0"
    assert int(reply.headers["retry-after"]) > 0
    assert reply.headers["ratelimit"] == f'"user";r=0;t={reply.headers["retry-after"]}'
    assert get(port, x_user="bob").status == 200
    assert get(port).status == 200, "no descriptor, no limit"


def test_nested_and_specific_rules_apply(envoy: Envoy) -> None:
    port = envoy.listener("edge")
    assert [get(port, x_tier="tin").status for _ in range(4)] == [200, 200, 200, 429]
    assert [get(port, x_tier="gold").status for _ in range(51)] == [200] * 50 + [429]
    assert [get(port, x_tenant="a", x_op="write").status for _ in range(5)] == [200] * 4 + [429]
    assert [get(port, x_tenant="a", x_op="read").status for _ in range(5)] == [200] * 4 + [429]
    assert [get(port, x_tenant="a").status for _ in range(6)] == [200] * 6


def test_a_request_denied_by_one_descriptor_does_not_count_for_the_other(envoy: Envoy) -> None:
    port = envoy.listener("edge")
    assert [get(port, x_tier="tin").status for _ in range(4)] == [200, 200, 200, 429]
    for _ in range(3):
        assert get(port, x_user="ann", x_tier="tin").status == 429
    assert get(port, x_user="ann").headers["x-ratelimit-remaining"] == "4"


def test_hits_addend_is_the_cost_and_zero_only_checks(envoy: Envoy) -> None:
    port = envoy.listener("edge")
    assert get(port, "/report", x_user="ann").headers["x-ratelimit-remaining"] == "2"
    assert get(port, "/report", x_user="ann").status == 429
    for _ in range(3):
        assert get(port, "/quota", x_user="ann").headers["x-ratelimit-remaining"] == "2"
    assert get(port, "/", x_user="ann").headers["x-ratelimit-remaining"] == "1"


def test_the_envoy_part_of_the_page_about_istio_limits(service: TidegateProcess) -> None:
    """The patches of the page, applied to the configuration of the other page as Istio would."""
    config = yaml.safe_load(code_block("behind-envoy.md", "# envoy.yaml"))
    patches = {
        patch["applyTo"]: patch["patch"]["value"]
        for patch in yaml.safe_load(code_block("in-istio.md", "# envoyfilter.yaml"))["spec"]["configPatches"]
    }
    resources = config["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0] = patches["HTTP_FILTER"]
    (host,) = manager["route_config"]["virtual_hosts"]
    host["routes"] = host["routes"][-1:]
    del host["rate_limits"]
    host |= patches["VIRTUAL_HOST"]
    wanted = patches["HTTP_FILTER"]["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]
    (cluster,) = (each for each in resources["clusters"] if each["name"] == "tidegate")
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = wanted["cluster_name"]
    with Envoy(service, config) as envoy:
        port = envoy.listener("edge")
        assert [get(port, x_user="ann").status for _ in range(6)] == [200] * 5 + [429]
        assert [get(port, x_tier="tin").status for _ in range(4)] == [200] * 3 + [429]


def test_a_killed_service_fails_open_or_closed_and_comes_back(envoy: Envoy, service: TidegateProcess) -> None:
    open_port, closed_port = envoy.listener("edge"), envoy.listener("closed")
    assert [get(port, x_tier="tin").status for port in (open_port, closed_port)] == [200, 200]
    service.kill()
    for _ in range(5):
        reply = get(open_port, x_tier="tin")
        assert (reply.status, reply.headers.get("x-ratelimit-limit")) == (200, None)
        assert get(closed_port, x_tier="tin").status == 500
    service.start()
    wait_until(
        lambda: get(closed_port, x_tier="other").status == 200, timeout_s=30, what="Envoy to connect again"
    )
    assert [get(closed_port, x_tier="tin").status for _ in range(4)] == [200, 200, 200, 429]


def test_new_and_faulty_rules_under_traffic_fail_no_request(envoy: Envoy, rules: Path) -> None:
    """On the listener that fails closed, so that a call that is lost is a 500."""
    port = envoy.listener("closed")
    stop = threading.Event()
    statuses: list[int] = []

    def play() -> None:
        while not stop.is_set():
            statuses.append(get(port, x_tier="gold").status)

    players = [threading.Thread(target=play) for _ in range(3)]
    for player in players:
        player.start()
    try:
        original = rules.read_text()
        for quota in (60, 70, 80, 90):
            rules.write_text(original.replace("requests_per_unit: 50", f"requests_per_unit: {quota}"))
            wait_until(
                lambda quota=quota: (
                    get(port, x_tier="gold").headers["x-ratelimit-limit"].startswith(f"{quota},")
                ),  # type: ignore[misc]
                timeout_s=30,
                what="the new rules",
            )
            rules.write_text("domain: [")
            assert get(port, x_tier="gold").headers["x-ratelimit-limit"].startswith(f"{quota},")
    finally:
        stop.set()
        for player in players:
            player.join()
    assert set(statuses) <= {200, 429}
    assert len(statuses) > 20
