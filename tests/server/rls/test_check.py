from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import AsyncLimiter
from tidegate.errors import ConfigurationError
from tidegate.server.messages import Whole
from tidegate.server.rls.check import (
    BadCheck,
    CheckAnswer,
    CheckConfig,
    CheckRequest,
    answer_check,
    ask_check,
    bad_check,
    client_address,
    parse_check_config,
)
from tidegate.server.rls.check_operation import check_request, read_check_config
from tidegate.server.rls.rules_file import parse_rules
from tidegate.server.rls.service import Outcome, RateLimitService

RULES = b"""
domain: edge
descriptors:
  - key: address
    rate_limit: {unit: year, requests_per_unit: 10}
  - key: user
    rate_limit: {unit: year, requests_per_unit: 3}
  - key: tenant
    descriptors:
      - key: op
        rate_limit: {unit: year, requests_per_unit: 2}
  - key: token
    rate_limit: {unit: year, requests_per_unit: 1}
"""

CONFIG = parse_check_config(
    tomllib.loads(
        """
        trusted_hops = 1
        [policies.login]
        domain = "edge"
        descriptors = [{address = "address"}, {user = "header:X-User"}]
        [policies.api]
        domain = "edge"
        deny_status = 403
        descriptors = [{token = "authorization"}]
        [policies.write]
        domain = "edge"
        descriptors = [{tenant = "query:tenant", op = "text:write"}]
        """
    )
)


class Gateway:
    """Sends requests as a gateway would."""

    def __init__(self, config: CheckConfig = CONFIG) -> None:
        self._config = config
        self._service = RateLimitService(AsyncLimiter(), parse_rules([("rules.yaml", RULES)]))

    def check(self, query: str, peer: str = "10.0.0.1", **headers: str) -> CheckAnswer:
        request = CheckRequest(
            query, {name.replace("_", "-"): value for name, value in headers.items()}, peer
        )
        try:
            question = ask_check(request, self._config)
        except BadCheck as error:
            return bad_check(error)
        outcome = self._service.decide(
            self._service.plan(question.domain, question.descriptors, question.cost)
        )
        assert isinstance(outcome, Outcome)
        return answer_check(question, outcome)


def test_a_descriptor_of_the_query_is_limited() -> None:
    gateway = Gateway()
    answers = [gateway.check("domain=edge&descriptor=user=ann") for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["RateLimit-Policy"] == '"user";q=3;w=31536000'
    assert answers[0].headers["RateLimit"].startswith('"user";r=2;t=')
    assert "Retry-After" not in answers[0].headers
    assert int(answers[3].headers["Retry-After"]) > 0
    assert {answer.body for answer in answers} == {b""}
    assert {answer.headers["Cache-Control"] for answer in answers} == {"no-store"}
    assert gateway.check("domain=edge&descriptor=user=bob").status == 200


def test_a_descriptor_may_have_several_entries() -> None:
    gateway = Gateway()
    query = urlencode({"domain": "edge", "descriptor": urlencode({"tenant": "a&b=c", "op": "write"})})
    assert [gateway.check(query).status for _ in range(3)] == [200, 200, 429]
    other = urlencode({"domain": "edge", "descriptor": urlencode({"tenant": "a", "op": "write"})})
    assert gateway.check(other).status == 200


def test_several_limits_are_all_or_nothing() -> None:
    gateway = Gateway()
    query = "domain=edge&descriptor=user=ann&descriptor=address=1.2.3.4"
    assert [gateway.check(query).status for _ in range(5)] == [200, 200, 200, 429, 429]
    answer = gateway.check("domain=edge&descriptor=address=1.2.3.4&cost=0")
    assert answer.headers["RateLimit"].startswith('"address";r=7;')


def test_cost_is_consumed_and_cost_zero_only_checks() -> None:
    gateway = Gateway()
    assert gateway.check("domain=edge&descriptor=user=ann&cost=3").status == 200
    assert gateway.check("domain=edge&descriptor=user=ann&cost=0").status == 200
    assert gateway.check("domain=edge&descriptor=user=ann").status == 429


def test_a_policy_takes_address_and_headers() -> None:
    gateway = Gateway()
    for _ in range(3):
        assert gateway.check("policy=login", x_user="ann", x_forwarded_for="9.9.9.9, 1.2.3.4").status == 200
    answer = gateway.check("policy=login", x_user="ann", x_forwarded_for="8.8.8.8, 1.2.3.4")
    assert answer.status == 429
    # Without the header only the address is limited: 3 of 10 are used, for the address that the gateway saw.
    answers = [gateway.check("policy=login", x_forwarded_for="1.2.3.4").status for _ in range(8)]
    assert answers == [200] * 7 + [429]
    assert gateway.check("policy=login", x_forwarded_for="1.2.3.5").status == 200


def test_authorization_is_hashed_and_a_policy_may_have_its_own_status() -> None:
    gateway = Gateway()
    secret = "Bearer S3cret"
    question = ask_check(CheckRequest("policy=api", {"authorization": secret}, "::1"), CONFIG)
    ((key, value),) = question.descriptors[0].entries
    assert key == "token"
    assert "S3cret" not in value and len(value) == 32
    keyed = parse_check_config(
        {
            "hash_key": "pepper",
            "policies": {"api": {"domain": "edge", "descriptors": [{"token": "authorization"}]}},
        }
    )
    other = ask_check(CheckRequest("policy=api", {"authorization": secret}, "::1"), keyed)
    assert other.descriptors[0].entries[0][1] != value
    assert [gateway.check("policy=api", authorization=secret).status for _ in range(2)] == [200, 403]
    assert gateway.check("policy=api", authorization="Bearer other").status == 200
    assert gateway.check("policy=api").status == 200, "nothing to limit by"


def test_a_policy_takes_values_of_the_query() -> None:
    gateway = Gateway()
    assert [gateway.check("policy=write&tenant=a").status for _ in range(3)] == [200, 200, 429]
    assert gateway.check("policy=write&tenant=b").status == 200


@pytest.mark.parametrize(
    ("hops", "forwarded", "peer", "expected"),
    [
        (0, "1.1.1.1", "10.0.0.1", "10.0.0.1"),
        (1, "", "10.0.0.1", "10.0.0.1"),
        (1, "1.1.1.1", "10.0.0.1", "1.1.1.1"),
        (1, "6.6.6.6, 1.1.1.1", "10.0.0.1", "1.1.1.1"),
        (2, "6.6.6.6, 1.1.1.1, 10.0.0.2", "10.0.0.1", "1.1.1.1"),
        (2, "1.1.1.1", "10.0.0.1", "1.1.1.1"),
        (3, " 6.6.6.6 ,5.5.5.5,, 1.1.1.1", "10.0.0.1", "5.5.5.5"),
        (1, "1.1.1.1:4711", "10.0.0.1", "1.1.1.1"),
        (1, "[2001:db8::1]:4711", "10.0.0.1", "2001:db8::/64"),
        (1, "2001:db8:0:0:ffff::2", "10.0.0.1", "2001:db8::/64"),
        (1, "::ffff:1.2.3.4", "10.0.0.1", "1.2.3.4"),
        (0, "", "fe80::1%eth0", "fe80::/64"),
    ],
)
def test_the_client_is_the_one_that_trusted_proxies_saw(
    hops: int, forwarded: str, peer: str, expected: str
) -> None:
    request = CheckRequest("", {"x-forwarded-for": forwarded} if forwarded else {}, peer)
    assert client_address(request, CheckConfig(trusted_hops=hops)) == expected


@given(st.lists(st.sampled_from(["6.6.6.6", "junk", "", "::1"]), max_size=5), st.integers(1, 3))
def test_what_a_client_writes_never_reaches_the_address(forged: list[str], hops: int) -> None:
    """However many entries a client sends, those that trusted proxies append decide."""
    appended = [f"10.0.0.{number}" for number in range(hops)]
    request = CheckRequest("", {"x-forwarded-for": ", ".join([*forged, *appended])}, "10.1.1.1")
    assert client_address(request, CheckConfig(trusted_hops=hops)) == "10.0.0.0"


@pytest.mark.parametrize(
    ("query", "headers", "text"),
    [
        ("", {}, "domain: is missing"),
        ("domain=edge", {}, "descriptor: got 0, expected 1 to 100"),
        ("domain=edge&descriptor=user", {}, "descriptor: got 'user', expected KEY=VALUE"),
        ("domain=edge&descriptor==ann", {}, "expected a key before each ="),
        ("domain=edge&domain=other&descriptor=user=ann", {}, "domain: given 2 times"),
        ("domain=edge&descriptor=user=ann&cost=-1", {}, "cost: got '-1'"),
        ("domain=edge&descriptor=user=ann&cost=" + "9" * 5000, {}, "longer than 4096"),
        ("domain=edge&descriptor=user=ann&cost=%D9%A3", {}, "cost: got"),
        ("policy=nothing", {}, "policy: got 'nothing', expected one of login, api, write"),
        ("policy=login&domain=edge", {}, "cannot be combined with domain or descriptor"),
        ("policy=login", {"x_forwarded_for": "unknown"}, "address: got 'unknown', expected an IP address"),
        ("policy=login", {"x_forwarded_for": "1.2.3.4", "x_user": "u" * 5000}, "header x-user: longer than"),
        ("&".join(["descriptor=a=b"] * 101) + "&domain=edge", {}, "descriptor: got 101"),
        ("&".join(["x=y"] * 500), {}, "query: "),
        ("domain=%FF&descriptor=a=b", {}, "query: "),
    ],
)
def test_an_invalid_check_is_a_400_with_the_reason(query: str, headers: dict[str, str], text: str) -> None:
    answer = Gateway().check(query, **headers)
    assert answer.status == 400
    assert text in answer.body.decode()


@given(
    st.text(max_size=60),
    st.dictionaries(st.sampled_from(["x-user", "x-forwarded-for", "authorization"]), st.text(max_size=20)),
)
def test_any_request_is_answered_or_refused_clearly(query: str, headers: dict[str, str]) -> None:
    for text in (query, "policy=login&" + query, "domain=edge&descriptor=" + quote(query)):
        with contextlib.suppress(BadCheck):
            question = ask_check(CheckRequest(text, headers, "10.0.0.1"), CONFIG)
            # A request that was parsed can be decided.
            service = RateLimitService(AsyncLimiter(), parse_rules([("rules.yaml", RULES)]))
            service.decide(service.plan(question.domain, question.descriptors, question.cost))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"hops": 1}, "check: unknown key 'hops'"),
        ({"trusted_hops": -1}, "check.trusted_hops: got -1"),
        ({"trusted_hops": True}, "check.trusted_hops: got True"),
        ({"deny_status": 200}, "check.deny_status: got 200, expected a number from 400 to 499"),
        ({"ipv6_prefix": 0}, "check.ipv6_prefix: got 0"),
        ({"hash_key": 5}, "check.hash_key: expected a text"),
        ({"policies": []}, "check.policies: got []"),
        ({"policies": {"p": []}}, "check.policies.p: got []"),
        ({"policies": {"p": {"domain": ""}}}, "check.policies.p.domain: got ''"),
        (
            {"policies": {"p": {"domain": "d", "descriptors": []}}},
            "check.policies.p.descriptors: expected a list",
        ),
        ({"policies": {"p": {"domain": "d", "descriptors": [{}]}}}, "descriptors[0]: got {}"),
        (
            {"policies": {"p": {"domain": "d", "descriptors": [{"a": "cookie:x"}]}}},
            "descriptors[0].a: got 'cookie:x', expected address",
        ),
        ({"policies": {"p": {"domain": "d", "descriptors": [{"a": "header:"}]}}}, "got 'header:'"),
        ({"policies": {"p": {"domain": "d", "descriptors": [{"a": 1}]}}}, "got 1, expected address"),
        ({"policies": {"p": {"domain": "d", "descriptors": [{"a": "address"}], "x": 1}}}, "unknown key 'x'"),
    ],
)
def test_a_faulty_configuration_is_named(document: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_check_config(document)
    assert text in str(error.value)


@given(policy=st.sampled_from(["api", "no%20such", "a%26cost=0", "%E2%82%AC"]), tail=st.text(max_size=40))
def test_what_follows_the_policy_in_a_path_is_ignored(policy: str, tail: str) -> None:
    whole = Whole(f"/v1/%63heck/{policy}/{tail}".encode(), {"x-user": "ann"}, "10.0.0.1")
    assert check_request(whole) == check_request(whole._replace(target=f"/v1/check/{policy}".encode()))
    assert parse_qsl(check_request(whole).query) == [("policy", unquote(policy))]


def test_a_check_without_a_policy_in_its_path_has_its_query() -> None:
    whole = Whole(b"/v1/check?policy=api&x=/v1/check/other/", {}, "10.0.0.1")
    assert check_request(whole).query == "policy=api&x=/v1/check/other/"


def test_a_file_of_policies_loads_or_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert read_check_config(None) == CheckConfig()
    file = tmp_path / "check.toml"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_check_config(str(file))
    for content, expected in (
        (b"trusted_hops =", "not a TOML file"),
        (b"\xff", "not a TOML file"),
        (b"#" * 1_048_577, "larger than"),
        (b"deny_status = 499", "deny_status"),
        (b"hops = 1", "unknown key"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=expected):
            read_check_config(str(file))
    file.write_bytes(b"trusted_hops = 2")
    assert read_check_config(str(file)).trusted_hops == 2
