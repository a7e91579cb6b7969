"""How every operation runs, and what it checks first: the caller, and the quota of the workspace.

An operation is written once, as a generator that writes `call.answer`. Memory answers most of its steps; for each one
that must wait it yields what to wait for (`wait`), and continues there with the result. `Admission.handler` runs it to
its first wait: a warm request ends before that, without a task. Otherwise the same generator continues in a task, so
that nothing is done twice and nothing is counted twice.

The quota of a workspace limits the calls of the API itself, with the same limiter. Its header fields (RateLimit-Limit,
-Remaining, -Reset) describe that quota, not the limit that the call is about.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.header_fields import whole_seconds
from tidegate.core.model import Decision
from tidegate.errors import DependencyError
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api import problems
from tidegate.server.api.problems import Meta, Refusal, error_answer, invalid
from tidegate.server.api.schema import Doubt
from tidegate.server.api.turns import TurnBudget
from tidegate.server.catalog.sync import CatalogFull, CatalogSync
from tidegate.server.catalog.view import Caller, Callers, NamespaceView
from tidegate.server.messages import JSON_LINE, Answer, Handler, Head, Route
from tidegate.telemetry.logging import request_id as current_request

logger = logging.getLogger(__name__)

# What one workspace may spend on look-ups among patterns in one turn of the loop, in the units of
# `OverrideMatcher.cost`: about 10 ms. A request of another workspace needs a few turns at most.
LOOKUP_COST_MAX: Final = 125_000


P = ParamSpec("P")
T = TypeVar("T")

Steps = Generator[Callable[[], Awaitable[Any]], Any, T]
"""Work that yields what it must wait for. It is called and awaited in a task, and its result is sent back."""


Operation = Callable[["Call", bytes], Steps[None]]
"""One operation of the API: gets the body, and writes `Call.answer`."""


class Call(msgspec.Struct, gc=False):
    """One request that an operation handles: all state that belongs to it."""

    operation: str
    head: Head
    request_id: str
    # Header lines about the quota of the workspace, for every answer after it was used.
    lines: bytes = b""
    # The holder of a session of the console; for all others the key in the head says who calls.
    caller: Caller | None = None
    # Written by the operation, at its end. Returning it would raise StopIteration, which costs four times the rest.
    answer: Answer = (500, b"", b"")


class Pagination(msgspec.Struct, rename="camel"):
    has_more: bool
    cursor: str | UnsetType = UNSET


class Envelope(msgspec.Struct):
    meta: Meta
    data: object
    pagination: Pagination | UnsetType = UNSET


ENCODE: Final = msgspec.json.Encoder().encode


def answer(call: Call, data: object, pagination: Pagination | UnsetType = UNSET) -> None:
    """Data in an envelope. `limit` and `multiLimit` write their own, for speed."""
    envelope = Envelope(Meta("req_" + call.request_id), data, pagination)
    call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)


def wait(function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
    """The result of `await function(*args, **kwargs)`."""
    result: T = yield partial(function, *args, **kwargs)
    return result


class Admission:
    """Shared by all operations of a server."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        sync: CatalogSync,
        new_id: Callable[[], str],
        now_ms: Callable[[], int],
    ) -> None:
        self.new_id = new_id
        self.now_ms = now_ms
        self._limiter = limiter
        self._sync = sync
        self.callers = Callers(sync.view)
        self.recall = self.callers.recall
        self._lookups = TurnBudget(LOOKUP_COST_MAX)

    def routes(self, operations: Mapping[str, Operation]) -> list[Route]:
        """The routes of operations that change or read something: `POST /v2/ratelimit.NAME`."""
        return [
            Route("POST", f"/v2/ratelimit.{name}", name, self.handler(name, operation))
            for name, operation in operations.items()
        ]

    def handler(self, name: str, operation: Operation) -> Handler:
        """Runs `operation`. Its refusals become answers here, and so do failures of the database."""
        new_id = self.new_id
        run = self.run

        def handle(head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
            call = Call(name, head, new_id())
            return run(call, operation(call, body))

        return handle

    def run(self, call: Call, steps: Steps[None]) -> Answer | Coroutine[Any, Any, Answer]:
        """The answer of a call: at once, or as a coroutine if a step must wait."""
        try:
            for waits_for in steps:
                return self._continue(call, steps, waits_for)
        except Refusal as refusal:
            return error_answer(refusal, call.request_id, call.head.accept, call.lines)
        return call.answer

    async def _continue(
        self, call: Call, steps: Steps[None], waits_for: Callable[[], Awaitable[Any]]
    ) -> Answer:
        current_request.set("req_" + call.request_id)  # what this task logs carries the id
        refusal: Refusal
        try:
            while True:
                waits_for = steps.send(await waits_for())
        except StopIteration:
            return call.answer
        except Refusal as raised:
            refusal = raised
        except CatalogFull as error:
            refusal = Refusal(problems.FORBIDDEN, str(error))
        except DependencyError as error:
            logger.warning("%s failed: %s", call.operation, error)
            refusal = Refusal(problems.SERVICE_UNAVAILABLE, "The database does not answer. Try again.")
        return error_answer(refusal, call.request_id, call.head.accept, call.lines)

    def admit(self, call: Call, items: int = 1) -> Steps[Caller]:
        """The caller, after `items` of the workspace's quota have been used; or a `Refusal`."""
        caller = yield from self.identify(call)
        yield from self.use_quota(call, caller, items)
        return caller

    def spend(self, workspace_id: str, cost: int) -> Steps[None]:
        """Before a look-up of this cost among patterns: wait, if the workspace had many in this turn of the loop."""
        if cost and not self._lookups.take(workspace_id, cost):
            yield from wait(self._lookups.wait, workspace_id, cost)

    def body(self, call: Call, decode: Callable[[bytes], T], data: bytes) -> Steps[T]:
        """`decode(data)`, with a second look where that is needed and the caller is known."""
        try:
            return decode(data)
        except Doubt as doubt:
            settled: T = yield from self.settle(call, doubt)
            return settled

    def settle(self, call: Call, doubt: Doubt[T]) -> Steps[T]:
        """The body, if a second look finds it valid. For a caller who is not known it would cost more than reading
        the body did: the answer is the first reason, or that the caller is not known."""
        if call.caller is None and self.recall(call.head.authorization) is None:
            try:
                yield from self._find(call)
            except Refusal as refusal:
                raise doubt.refusal or refusal from None
        return doubt.settle()

    def identify(self, call: Call) -> Steps[Caller]:
        """The caller, or a `Refusal`."""
        caller = call.caller
        if caller is None:
            caller = self.recall(call.head.authorization)
            if caller is None:
                caller = yield from self._find(call)
        if caller.expires_at_ms is not None and caller.expires_at_ms <= self.now_ms():
            raise Refusal(problems.FORBIDDEN, "The key has expired.")
        return caller

    def _find(self, call: Call) -> Steps[Caller]:
        credentials = call.head.authorization
        if credentials is None:
            is_check = call.head.whole is not None
            request = (
                "Request for '/v1/check'"
                if is_check
                else f"POST request for '/v2/ratelimit.{call.operation}'"
            )
            message, fix = "header 'Authorization' is missing", "Send 'Authorization: Bearer KEY'."
            raise invalid("/security/bearerAuth", message, f"{request} has no Authorization header", fix=fix)
        key = credentials[7:].strip()
        if not credentials.startswith(b"Bearer ") or not key:
            raise Refusal(
                problems.MALFORMED_AUTHORIZATION, "The Authorization header must read 'Bearer KEY'."
            )
        caller = self.callers.find(credentials, key)
        if caller is None and not self.callers.is_negative_cached(key):
            # Another process may have created it a moment ago.
            has_answered = yield from wait(self._sync.confirm)
            caller = self.callers.find(credentials, key)
            if caller is None and not self._sync.is_loaded:
                detail = "No key can be checked: the database has not answered yet."
                raise Refusal(problems.SERVICE_UNAVAILABLE, detail)
            if caller is None and not has_answered:
                detail = "The key cannot be checked: the database does not answer. Try again."
                raise Refusal(problems.SERVICE_UNAVAILABLE, detail)
            if caller is None:
                self.callers.remember_missing(key)
        if caller is None:
            # RFC 9110, 15.5.2: a 401 names the scheme to use.
            headers = b"www-authenticate: Bearer\r\n"
            raise Refusal(problems.KEY_NOT_FOUND, "The key was not found.", headers=headers)
        if not caller.is_enabled:
            raise Refusal(problems.KEY_DISABLED, "The key is disabled.")
        if not caller.workspace.is_enabled:
            raise Refusal(problems.WORKSPACE_DISABLED, "The workspace of this key is disabled.")
        return caller

    def namespace(
        self, caller: Caller, name: str, action: str | None, *, deleted_too: bool = False
    ) -> Steps[NamespaceView]:
        """An existing namespace of the caller's workspace, by name or id, in which the caller may do this; or a
        `Refusal`."""
        namespace = caller.workspace.namespaces.get(name)
        if namespace is None:
            # Another process may have created it a moment ago.
            yield from wait(self._sync.confirm)
            workspace = self._sync.view.workspaces.get(caller.workspace.id)
            namespace = None if workspace is None else workspace.namespaces.get(name)
        if namespace is None or (namespace.is_deleted and not deleted_too):
            raise Refusal(problems.NAMESPACE_NOT_FOUND, "The namespace was not found.")
        if action is not None and not caller.may(action, namespace.id):
            raise missing_permission(action, namespace)
        return namespace

    def use_quota(self, call: Call, caller: Caller, items: int) -> Steps[None]:
        """Use `items` of the workspace's quota, if it has one; or a `Refusal`."""
        workspace = caller.workspace
        if workspace.quota is None:
            return
        now_ms = self.now_ms()
        decision = self._limiter.attempt(workspace.quota, workspace.id, items, now_ms)
        if decision is None:
            decision = yield from wait(self._limiter.limit, workspace.quota, workspace.id, items)
        reset_s = whole_seconds(decision.reset_at_ms - now_ms)
        call.lines = (
            f"ratelimit-limit: {decision.limit.quota}\r\nratelimit-remaining: {decision.remaining}\r\n"
            f"ratelimit-reset: {reset_s}\r\n"
        ).encode("ascii")
        if not decision.allowed:
            raise over_quota(decision)


def over_quota(decision: Decision) -> Refusal:
    """The 429. A denied check is never one."""
    retry_after_ms = decision.retry_after_ms
    lines = b""
    if retry_after_ms is not None:
        lines = f"retry-after: {whole_seconds(retry_after_ms)}\r\n".encode("ascii")
    detail = f"The workspace has used its {decision.limit.quota} API calls. Try again later."
    return Refusal(problems.WORKSPACE_RATE_LIMITED, detail, headers=lines)


def missing_permission(action: str, namespace: NamespaceView | None) -> Refusal:
    """The 403, with the permissions of which one is enough."""
    wanted = [f"'ratelimit.*.{action}'"]
    if namespace is not None:
        wanted.append(f"'ratelimit.{namespace.id}.{action}'")
    listed = " or ".join(wanted)
    return Refusal(problems.INSUFFICIENT_PERMISSIONS, f"Missing permission: the key needs {listed}.")
