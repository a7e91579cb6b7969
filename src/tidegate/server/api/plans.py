"""How one (namespace, limit, duration) is judged, and how the answers of `limit` are written.

An answer is written as text: every value is a number, a truth value or an id of ours, so that nothing needs escaping.
What does not change from request to request is put together once per plan, and once per window.
"""

from __future__ import annotations

from tidegate.core.header_fields import INTEGER_MAX, policy_name, policy_value, whole_seconds
from tidegate.core.model import Decision, make_limit
from tidegate.server.api.problems import Answer
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.view import NamespaceView, WorkspaceView

__all__ = ["Plan"]


class Plan:
    """All that stays the same between two requests."""

    __slots__ = (
        "_allowed",
        "_denied",
        "_is_plain",
        "_lines",
        "_reset_at_ms",
        "_reset_text",
        "_retry_fields",
        "_retry_s",
        "limit",
        "namespace",
        "workspace",
    )

    def __init__(
        self, workspace: WorkspaceView, namespace: NamespaceView, quota: int, duration_ms: int
    ) -> None:
        self.workspace = workspace
        self.namespace = namespace
        self.limit = make_limit(quota, duration_ms, namespace.id, workspace.id)
        name = policy_name(namespace.name, namespace.id)
        # Up to the remaining quota, which is where answers begin to differ.
        self._lines = (
            "content-type: application/json\r\n"
            f"ratelimit-policy: {policy_value(name, quota, duration_ms)}\r\nratelimit: {name};r="
        )
        self._allowed = f'"}},"data":{{"success":true,"limit":{quota},"remaining":'
        self._denied = f'"}},"data":{{"success":false,"limit":{quota},"remaining":0'
        # No number of an answer is too large for a header field.
        self._is_plain = quota <= INTEGER_MAX and duration_ms <= INTEGER_MAX
        # The end of the window that was answered last, and its text.
        self._reset_at_ms = -1
        self._reset_text = ""
        # The wait that a denial named last, and its header lines: whoever is hammered names it again and again.
        self._retry_s = 0
        self._retry_fields = b""

    def answer(
        self, request_id: str, override: Override | None, decision: Decision, now_ms: int, lines: bytes
    ) -> Answer:
        """What `limit` answers; `lines` are further header lines."""
        reset_at_ms = decision.reset_at_ms
        if reset_at_ms != self._reset_at_ms:
            self._reset_at_ms = reset_at_ms
            self._reset_text = f',"reset":{reset_at_ms}'
        end = "}}" if override is None else f',"overrideId":"{override.id}"}}}}'
        if decision.allowed:
            remaining = str(decision.remaining)
            text = (
                f'{{"meta":{{"requestId":"req_{request_id}{self._allowed}{remaining}{self._reset_text}{end}'
            )
            if self._is_plain and reset_at_ms > now_ms:
                # The usual case of `allowed_line`, written out: this is the hot one.
                shown = f"{self._lines}{remaining};t={-((now_ms - reset_at_ms) // 1000)}\r\n"
            else:
                shown = self._lines + allowed_line(decision.remaining, reset_at_ms - now_ms)
            fields = shown.encode("ascii")
        else:
            text = f'{{"meta":{{"requestId":"req_{request_id}{self._denied}{self._reset_text}{end}'
            retry_after_ms = decision.retry_after_ms
            retry_s = -(-retry_after_ms // 1000) if retry_after_ms else 0
            if retry_s == 0 or retry_s != self._retry_s:
                shown = self._lines + denied_line(retry_after_ms, reset_at_ms - now_ms)
                self._retry_fields = shown.encode("ascii")
                self._retry_s = retry_s
            fields = self._retry_fields
        return 200, fields + lines, text.encode("ascii")


def allowed_line(remaining: int, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on an allowed call."""
    return f"{min(remaining, INTEGER_MAX)};t={whole_seconds(reset_in_ms)}\r\n"


def denied_line(retry_after_ms: int | None, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on a denied call, with the Retry-After that it must agree with.

    A cost above the quota never fits: then there is no moment to name, and no Retry-After.
    """
    if retry_after_ms is None:
        return f"0;t={whole_seconds(reset_in_ms)}\r\n"
    seconds = whole_seconds(retry_after_ms)
    return f"0;t={seconds}\r\nretry-after: {seconds}\r\n"
