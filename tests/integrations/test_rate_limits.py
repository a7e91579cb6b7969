"""What all integrations have in common, without any framework."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.kit import consumed, manual_async_limiter, manual_clock, manual_limiter
from tidegate import AsyncLimiter, ConfigurationError, InvalidInput, Limit, Limiter
from tidegate.adapters.memory import MemoryOrigin
from tidegate.integrations import Answers, Outcome, Rule, header, ip
from tidegate.integrations.rate_limits import AsyncRateLimits, SyncRateLimits
from tidegate.integrations.rules import make_rules
from tidegate.integrations.wsgi import WsgiIncoming

user = header("x-user")
tenant = header("x-tenant")


def request(path: str = "/", method: str = "GET", host: str = "example.org", **headers: str) -> WsgiIncoming:
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "REMOTE_ADDR": "203.0.113.7", "HTTP_HOST": host}
    return WsgiIncoming(environ | {f"HTTP_{name.upper()}": value for name, value in headers.items()})


def rate_limits(*rules: Any, **options: Any) -> SyncRateLimits:
    return SyncRateLimits(*rules, limiter=manual_limiter(manual_clock()), **options)


def check(limits: SyncRateLimits, incoming: WsgiIncoming, *route_rules: Rule) -> Outcome:
    return limits.check(incoming, limits.applicable(incoming), route_rules)


# -- one batch


def test_several_limits_in_one_text_are_all_or_nothing() -> None:
    limits = rate_limits(Rule("2/second; 3/hour", namespace="mail", by=user))
    ann = request(x_user="ann")
    assert [check(limits, ann).allowed for _ in range(4)] == [True, True, False, False]
    assert consumed(limits.limiter, "3/hour", "mail", "ann") == 2


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.integers(0, 3),
            st.sampled_from(["user", "tenant", "everyone"]),
            st.sampled_from(["enforced", "shadow", "exempt"]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=25),
)
def test_a_denied_request_counts_nowhere_and_shadow_and_exempt_rules_take_nothing_from_others(
    shapes: list[tuple[int, int, str, str]], requests: list[tuple[str, str]]
) -> None:
    keys: dict[str, Any] = {"user": user, "tenant": tenant, "everyone": lambda _: "everyone"}
    rules = [
        Rule(
            f"{quota}/hour",
            cost=cost,
            by=keys[by],
            namespace=f"rule{number}",
            shadow=kind == "shadow",
            exempt=(lambda _: True) if kind == "exempt" else None,
        )
        for number, (quota, cost, by, kind) in enumerate(shapes)
    ]
    limits = rate_limits(*rules[: len(rules) // 2])
    counts: Counter[tuple[int, str]] = Counter()

    def fits(number: int, who: str) -> bool:
        return counts[number, who] + shapes[number][1] <= shapes[number][0]

    for name, team in requests:
        who = [{"user": name, "tenant": team, "everyone": "everyone"}[shape[2]] for shape in shapes]
        enforced = [n for n, shape in enumerate(shapes) if shape[3] == "enforced"]
        shadowed = [n for n, shape in enumerate(shapes) if shape[3] == "shadow"]
        expected = all(fits(n, who[n]) for n in enforced)
        # Half of the rules belong to the application, half to the route: that must make no difference.
        outcome = check(limits, request(x_user=name, x_tenant=team), *rules[len(rules) // 2 :])
        assert outcome.allowed == expected
        for n in (enforced + [n for n in shadowed if fits(n, who[n])]) if expected else []:
            counts[n, who[n]] += shapes[n][1]
    for n, (_, _, _, kind) in enumerate(shapes):
        namespace = f"rule{n}.shadow" if kind == "shadow" else f"rule{n}"
        for name in ("a", "b", "x", "y", "everyone"):
            assert consumed(limits.limiter, "9/hour", namespace, name) == counts[n, name]


def test_two_rules_that_count_in_the_same_place_are_refused_before_anything_is_counted() -> None:
    limits = rate_limits(
        Rule("5/hour", namespace="mail", by=user), Rule("9/hour", namespace="mail", by=tenant)
    )
    with pytest.raises(ConfigurationError, match=r"'mail'.*give one of them a namespace"):
        check(limits, request(x_user="ann", x_tenant="acme"))
    assert consumed(limits.limiter, "5/hour", "mail", "ann") == 0


def test_two_quotas_for_one_duration_are_refused_when_the_rule_is_made() -> None:
    with pytest.raises(InvalidInput, match="one quota per duration"):
        Rule("5/minute; 9/minute")


# -- which requests


@pytest.mark.parametrize(
    ("options", "matching", "other"),
    [
        ({"path": "/api/*"}, request("/api/v1/items"), request("/apis")),
        ({"path": ["/a", "/b"]}, request("/b"), request("/b/c")),
        ({"methods": "post"}, request(method="POST"), request(method="GET")),
        ({"methods": ["GET"]}, request(method="HEAD"), request(method="OPTIONS")),
        ({"host": "*.example.org"}, request(host="API.example.org:8080"), request(host="example.org")),
        ({"host": "::1"}, request(host="[::1]:80"), request(host="example.org")),
        ({"path": "/a", "methods": "POST"}, request("/a", "POST"), request("/a", "GET")),
    ],
)
def test_rules_match_by_path_method_and_host(
    options: dict[str, Any], matching: WsgiIncoming, other: WsgiIncoming
) -> None:
    rule = Rule("1/minute", **options)
    assert rule.matches(matching)
    assert not rule.matches(other)


def test_a_rule_matches_by_the_name_of_the_route() -> None:
    incoming = request()
    incoming.route = "items"
    assert Rule("1/minute", route=["items", "orders"]).matches(incoming)
    assert not Rule("1/minute", route="orders").matches(incoming)


def test_a_request_that_matches_no_rule_is_not_limited() -> None:
    limits = rate_limits(Rule("1/minute", path="/api/*"))
    outcome = check(limits, request("/other"))
    assert outcome == Outcome(True) and limits.headers(outcome) == {}


# -- namespaces


def test_a_rule_of_a_route_counts_under_the_name_of_the_route_unless_it_has_a_namespace() -> None:
    limits = rate_limits()
    incoming = request()
    incoming.route = "items"
    check(limits, incoming, Rule("5/minute"), Rule("5/hour", namespace="mail"))
    assert consumed(limits.limiter, "5/minute", "items", "203.0.113.7") == 1
    assert consumed(limits.limiter, "5/hour", "mail", "203.0.113.7") == 1


def test_a_rule_of_the_application_counts_under_its_path_or_under_application() -> None:
    limits = rate_limits(Rule("5/minute", path="/api/*"), "7/hour")
    check(limits, request("/api/items"))
    assert consumed(limits.limiter, "5/minute", "/api/*", "203.0.113.7") == 1
    assert consumed(limits.limiter, "7/hour", "application", "203.0.113.7") == 1


# -- cost, exemptions, limits by a function


def test_the_cost_may_be_a_function_of_the_request() -> None:
    limits = rate_limits(Rule("10/minute", namespace="n", cost=lambda environ: int(environ["HTTP_X_ITEMS"])))
    assert check(limits, request(x_items="7"))[0]
    assert not check(limits, request(x_items="4"))[0]
    assert check(limits, request(x_items="3"))[0]


def test_a_request_that_costs_more_than_the_limit_gets_no_retry_after() -> None:
    limits = rate_limits(Rule("10/minute", namespace="n", cost=11))
    denial, _, body = limits.denial(check(limits, request()).decisions)
    assert "Retry-After" not in denial.headers
    assert b"this request alone costs more than that" in body


@pytest.mark.parametrize("cost", [-1, True, "1", 1.5])
def test_a_wrong_cost_is_refused_and_nothing_is_counted(cost: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^cost: "):
        Rule("1/minute", cost=cost)
    limits = rate_limits(
        Rule("5/hour", namespace="first"), Rule("5/minute", namespace="n", cost=lambda _: cost)
    )
    with pytest.raises(InvalidInput, match=r"^cost: "):
        check(limits, request())
    assert consumed(limits.limiter, "5/hour", "first", "203.0.113.7") == 0


def test_an_exempt_request_is_neither_limited_nor_counted() -> None:
    limits = rate_limits("1/minute", exempt=lambda environ: environ.get("HTTP_X_INTERNAL") == "yes")
    assert all(check(limits, request(x_internal="yes")).allowed for _ in range(3))
    assert consumed(limits.limiter, "1/minute", "application", "203.0.113.7") == 0


def test_an_exemption_from_one_rule_leaves_the_others() -> None:
    limits = rate_limits(
        Rule("1/minute", namespace="a", exempt=lambda _: True), Rule("2/minute", namespace="b")
    )
    assert [check(limits, request()).allowed for _ in range(3)] == [True, True, False]


def test_limits_may_come_from_a_function_such_as_a_customers_plan() -> None:
    plans = {"free": "1/minute; 10/hour", "paid": [Limit("3/minute", namespace="paid")], "staff": None}
    limits = rate_limits(Rule(lambda environ: plans[environ["HTTP_X_PLAN"]], namespace="n", by=user))
    for plan, allowed in (("free", 1), ("paid", 3), ("staff", 5)):
        outcomes = [check(limits, request(x_user="ann", x_plan=plan)).allowed for _ in range(5)]
        assert sum(outcomes) == allowed


@pytest.mark.parametrize("wrong", [5, [5], {"a": 1}, [["1/minute"]]])
def test_a_function_that_returns_no_limits_is_a_clear_error(wrong: Any) -> None:
    limits = rate_limits(Rule(lambda _: wrong, namespace="n"))
    with pytest.raises(InvalidInput, match=r"^limits: "):
        check(limits, request())


async def test_every_function_of_a_rule_may_be_asynchronous_in_an_asynchronous_application() -> None:
    async def plan(_: Any) -> str:
        return "5/minute"

    async def who(_: Any) -> str:
        return "ann"

    async def price(_: Any) -> int:
        return 2

    async def is_exempt(environ: Any) -> bool:
        return "HTTP_X_INTERNAL" in environ

    limiter = manual_async_limiter(manual_clock())
    limits = AsyncRateLimits(Rule(plan, by=who, cost=price, exempt=is_exempt, namespace="n"), limiter=limiter)
    outcomes = [(await limits.check(request(), limits.rules)).allowed for _ in range(3)]
    assert outcomes == [True, True, False]
    assert (await limits.check(request(x_internal="yes"), limits.rules)).allowed
    assert (await limiter.peek(Limit("5/minute", namespace="n"), "ann")).effective == 4
    limits = AsyncRateLimits("1/minute", limiter=limiter, exempt=is_exempt)
    assert all([(await limits.check(request(x_internal="yes"), limits.rules)).allowed for _ in range(3)])


@pytest.mark.parametrize("field", ["limits", "by", "cost", "exempt"])
def test_a_coroutine_function_in_a_synchronous_application_is_a_clear_error(field: str) -> None:
    async def asynchronous(_: Any) -> Any:
        raise AssertionError("never awaited")

    options: dict[str, Any] = {"limits": "1/minute", "namespace": "n", field: asynchronous}
    with pytest.raises(ConfigurationError, match="coroutine function"):
        check(rate_limits(Rule(**options)), request())


@pytest.mark.parametrize("nothing", [None, "", 7])
def test_a_key_that_finds_nothing_is_a_clear_error_and_nothing_is_counted(nothing: object) -> None:
    def customer(_: object) -> object:
        return nothing

    limits = rate_limits(Rule("5/hour", namespace="first"), Rule("5/minute", by=customer, namespace="n"))
    with pytest.raises(InvalidInput, match=r"the key 'customer': got .*, expected the caller as a str"):
        check(limits, request())
    assert consumed(limits.limiter, "5/hour", "first", "203.0.113.7") == 0


def test_an_identifier_of_any_length_is_counted() -> None:
    limits = rate_limits(Rule("1/minute", namespace="n", by=lambda environ: environ["HTTP_X_USER"]))
    long = "x" * 10_000
    assert [check(limits, request(x_user=long)).allowed for _ in range(2)] == [True, False]
    assert check(limits, request(x_user=long + "y")).allowed


def test_a_connection_without_an_address_is_a_clear_error() -> None:
    incoming = request()
    incoming.peer = None
    with pytest.raises(InvalidInput, match="Unix socket"):
        check(rate_limits("1/minute"), incoming)


# -- shadow mode


def test_shadow_mode_counts_and_reports_and_never_refuses(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Outcome] = []
    limits = rate_limits(
        Rule("2/minute", namespace="n", shadow=True), on_outcome=lambda _, outcome: seen.append(outcome)
    )
    with caplog.at_level(logging.INFO, "tidegate.integrations"):
        assert all(check(limits, request()).allowed for _ in range(3))
    assert [len(outcome.shadow_denied) for outcome in seen] == [0, 0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "shadow: 2 per minute in 'n.shadow' would be denied"
    ]
    # No header fields: a client must not see a limit that does not hold.
    assert limits.headers(seen[-1]) == {}


def test_a_tighter_shadow_limit_beside_an_enforced_one_takes_nothing_from_it() -> None:
    limits = rate_limits(Rule("4/minute", namespace="n"), Rule("2/minute", namespace="n", shadow=True))
    outcomes = [check(limits, request()) for _ in range(5)]
    assert [outcome.allowed for outcome in outcomes] == [True, True, True, True, False]
    assert [bool(outcome.shadow_denied) for outcome in outcomes] == [False, False, True, True, False]


def test_a_limit_that_is_itself_in_shadow_mode_never_refuses_and_is_in_no_header_field() -> None:
    limits = rate_limits(Rule(Limit("1/minute", namespace="n", shadow=True)))
    outcomes = [check(limits, request()) for _ in range(2)]
    assert [(one.allowed, len(one.shadow_denied)) for one in outcomes] == [(True, 0), (True, 1)]
    assert [limits.headers(one) for one in outcomes] == [{}, {}]


def test_a_whole_application_in_shadow_mode_denies_nothing_and_counts_separately() -> None:
    limits = rate_limits(Rule(Limit("1/minute", namespace="n")), shadow=True)
    assert [len(check(limits, request()).shadow_denied) for _ in range(2)] == [0, 1]
    assert consumed(limits.limiter, "1/minute", "n", "203.0.113.7") == 0


# -- outages


@pytest.mark.parametrize("shadow", [False, True])
def test_a_rule_hands_its_policy_for_outages_to_its_limits(shadow: bool) -> None:
    rule = Rule("1/second; 9/minute", namespace="n", on_outage="deny", shadow=shadow)
    assert [limit.on_outage for limit in rule.limits_for("", None)] == ["deny", "deny"]
    by_plan = Rule(lambda _: "1/minute", on_outage="deny", shadow=shadow)
    assert [limit.on_outage for limit in by_plan.limits_for("1/minute", "r")] == ["deny"]
    assert [limit.on_outage for limit in Rule("1/minute", namespace="n").limits_for("", None)] == ["local"]
    with pytest.raises(InvalidInput, match="on_outage"):
        Rule(lambda _: "1/minute", on_outage="allow")


# -- answers


def test_header_fields_are_those_of_the_limit_that_is_closest_to_refusing() -> None:
    limits = rate_limits(Rule("3/second; 100/hour", namespace="n"))
    outcome = check(limits, request())
    assert limits.headers(outcome) == {"RateLimit-Policy": '"n";q=3;w=1', "RateLimit": '"n";r=2;t=1'}
    limits = rate_limits(Rule("50/second; 3/hour", namespace="n"))
    assert limits.headers(check(limits, request()))["RateLimit"] == '"n";r=2;t=3600'


def test_of_several_denials_the_longest_wait_is_reported() -> None:
    limits = rate_limits(Rule("1/second; 1/hour", namespace="n"))
    check(limits, request())
    denial, _, _ = limits.denial(check(limits, request()).decisions)
    assert denial.decision.limit.duration_ms == 3_600_000
    assert int(denial.headers["Retry-After"]) > 3600


def test_header_fields_can_be_left_out_and_a_denial_keeps_its_retry_after() -> None:
    limits = rate_limits("1/minute", answers=Answers(headers=False))
    assert limits.headers(check(limits, request())) == {}
    denial, _, _ = limits.denial(check(limits, request()).decisions)
    assert denial.headers == {"Retry-After": "61"}


@pytest.mark.parametrize("status", [200, 600, True, "429"])
def test_a_status_that_is_not_an_error_is_refused(status: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^status: "):
        Answers(status=status)


# -- what a user may get wrong


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"limits": "often"}, "quota"),
        ({"limits": ""}, "quota"),
        ({"limits": []}, "limits"),
        ({"limits": 5}, "limits"),
        ({"limits": [5]}, "limits"),
        ({"limits": "1/minute", "by": "ip"}, "by"),
        ({"limits": "1/minute", "exempt": True}, "exempt"),
        ({"limits": "1/minute", "path": 5}, "path"),
        ({"limits": "1/minute", "methods": [""]}, "methods"),
        ({"limits": "1/minute", "namespace": ""}, "namespace"),
    ],
)
def test_a_wrong_rule_is_refused_by_the_name_of_its_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{field}: "):
        Rule(**arguments)


def test_options_beside_rules_that_they_would_not_reach_are_refused() -> None:
    assert len(make_rules(["1/second", "5/minute", Rule("9/hour")], by=ip)) == 2
    with pytest.raises(ConfigurationError, match="by: give it to the Rule"):
        make_rules([Rule("1/minute")], by=ip)


def test_a_limiter_of_the_other_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a Limiter for this integration"):
        SyncRateLimits("1/minute", limiter=AsyncLimiter())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"an? AsyncLimiter for this integration"):
        AsyncRateLimits("1/minute", limiter=Limiter())  # type: ignore[arg-type]
    limits = rate_limits("1/minute")
    with pytest.raises(InvalidInput), limits.override(object()):  # type: ignore[arg-type]
        pass


# -- start and stop of the limiter


def test_a_limiter_that_the_integration_created_is_stopped_and_a_given_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("REGION", "ORIGIN", "LEDGER"):
        monkeypatch.delenv(f"TIDEGATE_{name}", raising=False)
    made = SyncRateLimits("5/minute")
    first = made.limiter
    made.start()
    assert check(made, request()).allowed
    made.stop()
    assert made.limiter is not first
    made.stop()
    given = Limiter(region="fra", origin=MemoryOrigin())
    limits = SyncRateLimits("5/minute", limiter=given)
    limits.start()
    limits.stop()
    assert check(limits, request()).allowed
    given.stop()
