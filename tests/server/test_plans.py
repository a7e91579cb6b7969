from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.header_fields import policy_name, policy_value
from tidegate.core.model import DURATION_MS_MAX, LOCAL, Decision, make_limit
from tidegate.ports import NamespaceRow
from tidegate.server.api.plans import Plan, allowed_line, denied_line
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.view import NamespaceView

INT64_MAX = 2**63 - 1

# Of every size, and close to the largest that a header field can carry.
numbers = st.integers(0, INT64_MAX) | st.integers(0, 100) | st.integers(10**15 - 3, 10**15 + 3)
durations = st.integers(1_000, DURATION_MS_MAX) | st.integers(1_000, 5_000)


@st.composite
def decisions(draw: st.DrawFn, quota: int, duration_ms: int) -> tuple[Decision, int]:
    """A decision with the time of its answer: the window may have ended in between."""
    allowed = draw(st.booleans())
    remaining = draw(st.integers(0, quota)) if allowed else 0
    # Often the same second twice: its header lines are kept.
    waits = st.integers(-1, INT64_MAX) | st.integers(-1, 2_000)
    retry_after_ms = 0 if allowed else draw(waits)
    decided_at_ms = draw(st.integers(5_000, 7_000) | st.integers(5_000, INT64_MAX))
    limit = make_limit(quota, duration_ms, "n", "w")
    decision = Decision(allowed, limit, remaining, decided_at_ms, 0, retry_after_ms, LOCAL, -1, -1)
    return decision, decision.reset_at_ms - draw(st.integers(-5_000, min(duration_ms, decided_at_ms)))


@given(data=st.data(), name=st.text(min_size=1, max_size=70), quota=numbers)
def test_an_answer_says_what_was_decided_in_body_and_header(
    data: st.DataObject, name: str, quota: int
) -> None:
    namespace = NamespaceView(NamespaceRow("rlns_1", "ws_1", name, 0, None))
    duration_ms = data.draw(durations)
    override = data.draw(st.sampled_from([None, Override("rlor_1", "x", quota, duration_ms)]))
    plan = Plan("ws_1", namespace, quota, duration_ms, override)
    for decision, now_ms in data.draw(st.lists(decisions(quota, duration_ms), max_size=5)):
        status, lines, body = plan.answer("abc", decision, now_ms, b"x: y\r\n")
        said: dict[str, object] = {
            "success": decision.allowed,
            "limit": quota,
            "remaining": decision.remaining,
            "reset": decision.reset_at_ms,
        }
        if override is not None:
            said["overrideId"] = "rlor_1"
        assert (status, json.loads(body)) == (200, {"meta": {"requestId": "req_abc"}, "data": said})
        reset_in_ms = decision.reset_at_ms - now_ms
        shown = (
            allowed_line(decision.remaining, reset_in_ms)
            if decision.allowed
            else denied_line(decision.retry_after_ms, reset_in_ms)
        )
        policy = policy_name(name, "rlns_1")
        assert lines.decode() == (
            f"content-type: application/json\r\nratelimit-policy: {policy_value(policy, quota, duration_ms)}\r\n"
            f"ratelimit: {policy};r={shown}x: y\r\n"
        )
