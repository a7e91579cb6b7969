"""The limit that applies to a check, found by what the request asks for, and the text of its answers.

Compiled with the core where that is possible (setup.py): every check passes through here. An answer is written as text:
every value is a number, a truth value, an id of ours or a name that was sent without escapes, so that nothing needs
escaping. What does not change from request to request is put together once per `Plan`, and once per window.
"""

from __future__ import annotations

from typing import Final, Protocol, final

from tidegate.core.header_fields import INTEGER_MAX, policy_name, policy_value, whole_seconds
from tidegate.core.model import Decision, Limit, make_limit
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.view import NamespaceView
from tidegate.server.messages import Answer

# Plans and matches that are kept, in two generations of this many: a client that sends random limits fills no memory.
PLANS_MAX: Final = 16_384
MATCHES_MAX: Final = 65_536


@final
class Counts:
    """Decisions in one namespace since the start. Written by the operations."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        self.allowed: int = 0
        self.denied: int = 0


@final
class Skips:
    """How many operations to leave out before the next that is recorded (`Activity`)."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: int = 0


class Counting(Protocol):
    """Where decisions are counted (`Activity`)."""

    def counts(self, workspace: str, namespace: str) -> Counts: ...
    def note_quota(self, limit: Limit) -> None: ...


@final
class Plan:
    """The limit to apply to a check, the override that it comes from, and the fixed parts of its answers."""

    __slots__ = (
        "_allowed",
        "_denied",
        "_end",
        "_is_plain",
        "_item",
        "_item_end",
        "_item_passed",
        "_left_s",
        "_left_text",
        "_lines",
        "_reset_at_ms",
        "_reset_text",
        "_retry_fields",
        "_retry_s",
        "counts",
        "limit",
        "namespace",
        "override",
    )

    def __init__(
        self,
        workspace_id: str,
        namespace: NamespaceView,
        quota: int,
        duration_ms: int,
        override: Override | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.namespace = namespace
        self.override = override
        self.counts = Counts() if counts is None else counts
        is_shadow = override is not None and override.shadow
        self.limit = make_limit(quota, duration_ms, namespace.id, workspace_id, shadow=is_shadow)
        name = policy_name(namespace.name, namespace.id)
        # Up to the remaining quota, where answers begin to differ.
        self._lines = (
            "content-type: application/json\r\n"
            f"ratelimit-policy: {policy_value(name, quota, duration_ms)}\r\nratelimit: {name};r="
        )
        self._allowed = f'"}},"data":{{"success":true,"limit":{quota},"remaining":'
        self._denied = f'"}},"data":{{"success":false,"limit":{quota},"remaining":0'
        end = "}" if override is None else f',"overrideId":"{override.id}"}}'
        self._end = end + "}"
        self._item = f'","limit":{quota},"remaining":'
        self._item_end = end
        # No number of an answer is too large for a header field.
        self._is_plain: Final[bool] = quota <= INTEGER_MAX and duration_ms <= INTEGER_MAX
        # The end of the window that was answered last, its text, and the end of an item that passed.
        self._reset_at_ms = -1
        self._reset_text = ""
        self._item_passed = ""
        # The seconds to the end of a window that were answered last, and their text.
        self._left_s = -1
        self._left_text = ""
        # The wait of the last denial, and its header lines: many denials in a row have the same.
        self._retry_s = 0
        self._retry_fields = b""

    def answer(self, request_id: str, decision: Decision, now_ms: int, lines: bytes) -> Answer:
        """The answer of `limit`; `lines` are further header lines."""
        reset_at_ms = decision.reset_at_ms
        reset = self._reset(reset_at_ms)
        if decision.allowed:
            remaining = str(decision.remaining)
            text = f'{{"meta":{{"requestId":"req_{request_id}{self._allowed}{remaining}{reset}{self._end}'
            if decision.exceeded:
                text = f'{text[:-2]},"exceeded":true}}}}'
            if self._is_plain and reset_at_ms > now_ms:
                # The usual case of `allowed_line` without a call, because every allowed check comes here.
                left_s = -((now_ms - reset_at_ms) // 1000)
                if left_s != self._left_s:
                    self._left_s = left_s
                    self._left_text = f";t={left_s}\r\n"
                shown = f"{self._lines}{remaining}{self._left_text}"
            else:
                shown = self._lines + allowed_line(decision.remaining, reset_at_ms - now_ms)
            fields = shown.encode()
        else:
            text = f'{{"meta":{{"requestId":"req_{request_id}{self._denied}{reset}{self._end}'
            retry_after_ms = decision.retry_after_ms
            retry_s = -(-retry_after_ms // 1000) if retry_after_ms else 0
            if retry_s == 0 or retry_s != self._retry_s:
                shown = self._lines + denied_line(retry_after_ms, reset_at_ms - now_ms)
                self._retry_fields = shown.encode()
                self._retry_s = retry_s
            fields = self._retry_fields
        return 200, fields + lines if lines else fields, text.encode()

    def item(self, begin: str, identifier: str, decision: Decision) -> str:
        """An item of an answer of `multiLimit`; `begin` is its text up to the identifier, which needs no escaping. The
        limit is not in shadow mode."""
        reset = self._reset(decision.reset_at_ms)
        end = self._item_passed if decision.allowed else f'{reset},"passed":false{self._item_end}'
        return f"{begin}{identifier}{self._item}{decision.remaining}{end}"

    def _reset(self, reset_at_ms: int) -> str:
        if reset_at_ms != self._reset_at_ms:
            self._reset_at_ms = reset_at_ms
            self._reset_text = f',"reset":{reset_at_ms}'
            self._item_passed = f'{self._reset_text},"passed":true{self._item_end}'
        return self._reset_text


@final
class Plans:
    """Finds the plan of a check, and keeps recent ones."""

    __slots__ = ("_activity", "_before", "_last", "_matches", "_matches_before", "_recent")

    def __init__(self, activity: Counting) -> None:
        self._activity: Final[Counting] = activity
        # By namespace, and by override or by quota and duration.
        self._recent: dict[tuple[NamespaceView, int, int] | tuple[NamespaceView, Override], Plan] = {}
        self._before: dict[tuple[NamespaceView, int, int] | tuple[NamespaceView, Override], Plan] = {}
        # The one without an override that was found last: most checks ask for the same as the one before.
        self._last: Plan | None = None
        self._matches: dict[tuple[object, str], Override | None] = {}
        self._matches_before: dict[tuple[object, str], Override | None] = {}

    def find(
        self, workspace_id: str, namespace: NamespaceView, identifier: str, quota: int, duration_ms: int
    ) -> Plan:
        """The plan for what a request asks for, or for the override that replaces it."""
        if namespace.has_overrides:
            override = self._override(namespace, identifier)
            if override is not None:
                return self._keep((namespace, override), workspace_id, override.limit, override.duration_ms)
        last = self._last
        if (
            last is not None
            and last.namespace is namespace
            and last.limit.quota == quota
            and last.limit.duration_ms == duration_ms
        ):
            return last
        self._last = last = self._keep((namespace, quota, duration_ms), workspace_id, quota, duration_ms)
        return last

    def _keep(
        self,
        key: tuple[NamespaceView, int, int] | tuple[NamespaceView, Override],
        workspace_id: str,
        quota: int,
        duration_ms: int,
    ) -> Plan:
        plan = self._recent.get(key)
        if plan is None:
            plan = self._before.get(key)
            if plan is None:
                namespace = key[0]
                override = key[1] if isinstance(key[1], Override) else None
                counts = self._activity.counts(workspace_id, namespace.name)
                plan = Plan(workspace_id, namespace, quota, duration_ms, override, counts)
                if override is None:
                    self._activity.note_quota(plan.limit)
            if len(self._recent) >= PLANS_MAX:
                self._before = self._recent
                self._recent = {}
            self._recent[key] = plan
        return plan

    def cost(self, namespace: NamespaceView, identifier: str) -> int:
        """What `find` will spend on patterns, at most."""
        if not namespace.matcher.has_patterns:
            return 0
        key = (namespace.token, identifier)
        return 0 if key in self._matches or key in self._matches_before else namespace.matcher.cost

    def _override(self, namespace: NamespaceView, identifier: str) -> Override | None:
        if not namespace.matcher.has_patterns:
            return namespace.matcher.get(identifier)
        key = (namespace.token, identifier)
        for known in (self._matches, self._matches_before):
            if key in known:
                return known[key]
        found = namespace.matcher.find(identifier)
        if len(self._matches) >= MATCHES_MAX:
            self._matches_before = self._matches
            self._matches = {}
        self._matches[key] = found
        return found


def allowed_line(remaining: int, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on an allowed call."""
    return f"{min(remaining, INTEGER_MAX)};t={whole_seconds(reset_in_ms)}\r\n"


def denied_line(retry_after_ms: int | None, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on a denied call, with the Retry-After that must agree with it.

    A cost above the quota never fits, so there is no Retry-After.
    """
    if retry_after_ms is None:
        return f"0;t={whole_seconds(reset_in_ms)}\r\n"
    seconds = whole_seconds(retry_after_ms)
    return f"0;t={seconds}\r\nretry-after: {seconds}\r\n"
