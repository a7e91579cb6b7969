"""What every operation asks first: who calls, and has the workspace calls left? And how a refusal becomes an answer.

The quota of a workspace limits the callers of the API itself, on the same limiter as everything else. Its header
fields (RateLimit-Limit, -Remaining, -Reset) describe that quota, not the limit that is being asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tidegate.core.header_fields import whole_seconds
from tidegate.core.model import Decision
from tidegate.errors import DependencyError
from tidegate.runtime.limiter import AsyncLimiter
from tidegate.server.api.problems import (
    INSUFFICIENT_PERMISSIONS,
    SERVICE_UNAVAILABLE,
    WORKSPACE_RATE_LIMITED,
    Answer,
    Refusal,
    error_answer,
)
from tidegate.server.catalog.ids import IdSource
from tidegate.server.catalog.keys import Authenticator
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView, WorkspaceView
from tidegate.server.messages import Head
from tidegate.telemetry.logging import request_id as current_request

__all__ = ["Admission", "Admissions", "missing_permission", "over_quota", "quota_lines"]

logger = logging.getLogger(__name__)


class Admission(NamedTuple):
    """A caller who has passed authentication and the quota of the workspace."""

    caller: Caller
    workspace: WorkspaceView
    lines: bytes
    """Header lines about the quota of the workspace, for every answer from here on."""


class Admissions:
    """Shared by all operations of a server."""

    def __init__(
        self, limiter: AsyncLimiter, sync: CatalogSync, ids: IdSource, now_ms: Callable[[], int]
    ) -> None:
        self.auth = Authenticator(sync.view)
        self.request_id = ids.take
        self.now_ms = now_ms
        self._limiter = limiter
        self._sync = sync

    async def admit(self, head: Head) -> Admission:
        """The caller, or a `Refusal`."""
        now_ms = self.now_ms()
        caller = self.auth.caller(head, now_ms)
        if caller is None:
            # It may have been created a moment ago, by another process.
            await self._sync.confirm()
            caller = self.auth.caller(head, now_ms)
            if caller is None:
                if not self._sync.is_loaded:
                    raise Refusal(
                        SERVICE_UNAVAILABLE, "No key can be checked: the database has not answered yet."
                    )
                self.auth.remember_unknown(head)
                raise self.auth.not_found()
        workspace = caller.workspace
        assert workspace is not None
        if workspace.quota is None:
            return Admission(caller, workspace, b"")
        decision = await self._limiter.limit(workspace.quota, workspace.id)
        if not decision.allowed:
            raise over_quota(decision, now_ms)
        return Admission(caller, workspace, quota_lines(decision, now_ms))

    async def serve(
        self,
        head: Head,
        request_id: str,
        work: Callable[[Admission], Awaitable[Answer]],
        admission: Admission | None = None,
    ) -> Answer:
        """`work` for an admitted caller. Its refusals and the database's failures become answers here."""
        current_request.set("req_" + request_id)  # of this task: what it logs carries the id
        lines = b""
        try:
            if admission is None:
                admission = await self.admit(head)
            lines = admission.lines
            return await work(admission)
        except Refusal as refusal:
            return error_answer(refusal, request_id, head.accept, lines)
        except DependencyError as error:
            logger.warning("%s failed: %s", head.operation.name, error)
            unavailable = Refusal(SERVICE_UNAVAILABLE, "The database does not answer. Try again.")
            return error_answer(unavailable, request_id, head.accept, lines)


def quota_lines(decision: Decision, now_ms: int) -> bytes:
    """The header fields about the quota of a workspace."""
    reset_s = whole_seconds(decision.reset_at_ms - now_ms)
    return (
        f"ratelimit-limit: {decision.limit.quota}\r\nratelimit-remaining: {decision.remaining}\r\n"
        f"ratelimit-reset: {reset_s}\r\n"
    ).encode("ascii")


def over_quota(decision: Decision, now_ms: int) -> Refusal:
    """The 429: never for an ordinary denied check."""
    lines = quota_lines(decision, now_ms)
    retry_after_ms = decision.retry_after_ms
    if retry_after_ms is not None:
        lines += f"retry-after: {whole_seconds(retry_after_ms)}\r\n".encode("ascii")
    return Refusal(
        WORKSPACE_RATE_LIMITED,
        f"The workspace has used its {decision.limit.quota} API calls. Try again later.",
        headers=lines,
    )


def missing_permission(action: str, namespace: NamespaceView | None) -> Refusal:
    """The 403, with the permissions that would do."""
    wanted = [f"'ratelimit.*.{action}'"]
    if namespace is not None:
        wanted.append(f"'ratelimit.{namespace.id}.{action}'")
    listed = " or ".join(wanted)
    return Refusal(INSUFFICIENT_PERMISSIONS, f"Missing permission: the key needs {listed}.")
