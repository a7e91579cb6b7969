"""The HTTP side of the console: who asks, from where, and which answer it gets.

    GET  /console                        the page; it holds no data
    GET  /console/static/NAME            its modules and style sheet
    POST /console/session                sign in with a key; GET: who am I; DELETE: sign out
    GET  /console/events                 server-sent events; ?identifier=&namespace= follows one
    GET  /console/snapshot               the same, once
    GET  /console/identifier             one identifier: cells, override, last denials and why
    GET  /console/search, /preview       identifiers that hold a text; whom a pattern matches right now
    GET  /console/what-if                who would have been denied in the last minutes with another limit
    GET  /console/namespaces, /overrides, /keys
    POST /console/namespaces.create …    see `catalog`
    POST /console/ratelimit.setOverride  and the other operations of the API on overrides, for a session

Reading needs `console.read`. A request is from a session (cookie) or brings its key (`Authorization`), as `tidegate
top` does; only the first needs protection from other sites, because a browser adds no key by itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from tidegate.core.model import make_limit
from tidegate.core.quota import parse_quota
from tidegate.errors import InvalidInput
from tidegate.server.api import problems
from tidegate.server.api.admission import Admission, Call, Operation, Steps, wait
from tidegate.server.api.overrides import OverrideOperations
from tidegate.server.api.problems import Refusal, error_answer, invalid
from tidegate.server.api.recording import SPAN_MS
from tidegate.server.catalog.keys import ACTIONS, CONSOLE_MANAGE, CONSOLE_READ
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.console.assets import COMMON_LINES, JSON_LINES, NO_STORE, load_assets
from tidegate.server.console.catalog import CatalogViews, found_namespace, required
from tidegate.server.console.hub import Hub, TooManyViewers, Viewer
from tidegate.server.console.local import Ask
from tidegate.server.console.sessions import MARKER, Sessions, is_from_elsewhere
from tidegate.server.console.what_if import replayed
from tidegate.server.messages import JSON_LINE, Answer, Handler, Head, Route, Stream, Subscriber

EVENT_LINES: Final = b"content-type: text/event-stream\r\nx-accel-buffering: no\r\n" + NO_STORE + COMMON_LINES
PARAMETERS_MAX: Final = 8

Parameters = Mapping[str, str]
Read = Callable[[Caller, Parameters], Awaitable[Any]]
Work = Callable[[Call, bytes], Steps[Any]]


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a sign-in."""

    key: str


class Console:
    """Made by the service that assembles everything."""

    def __init__(
        self,
        admission: Admission,
        sync: CatalogSync,
        overrides: OverrideOperations,
        sessions: Sessions,
        ask: Ask,
    ) -> None:
        self._admission = admission
        self._sync = sync
        self._overrides = overrides
        self._sessions = sessions
        self._ask = ask
        self._catalog = CatalogViews(sync, admission)
        self._assets = load_assets()
        # One replay at a time.
        self._replaying = asyncio.Lock()
        self.hub = Hub(ask, admission.now_ms, lambda key_id: sessions.caller(key_id) is not None)

    def routes(self) -> list[Route]:
        catalog = self._catalog
        reads: dict[str, Read] = {
            "session": self._session,
            "snapshot": self._snapshot,
            "identifier": self._identifier,
            "search": self._search,
            "preview": self._preview,
            "what-if": self._what_if,
            "namespaces": catalog.namespaces,
            "overrides": catalog.overrides,
            "keys": catalog.keys,
        }
        changes: dict[str, Work] = {
            "namespaces.create": catalog.create_namespace,
            "namespaces.delete": partial(catalog.mark_namespace, is_deleted=True),
            "namespaces.restore": partial(catalog.mark_namespace, is_deleted=False),
            "keys.create": catalog.create_key,
            "keys.expire": catalog.expire_key,
            "keys.revoke": catalog.revoke_key,
        }
        posts: dict[str, Operation] = {
            **{name: self._shown(work) for name, work in changes.items()},
            "ratelimit.setOverride": self._overrides.set_override,
            "ratelimit.getOverride": self._overrides.get_override,
            "ratelimit.deleteOverride": self._overrides.delete_override,
        }
        pages = {f"/console/static/{name}": name for name in self._assets if name != "index.html"}
        return [
            *(
                Route("GET", path, "console", partial(self._asset, name))
                for path, name in {"/console": "index.html", **pages}.items()
            ),
            Route("POST", "/console/session", "console.session", self._sign_in, True),
            Route("DELETE", "/console/session", "console.session", self._sign_out, True),
            Route("GET", "/console/events", "console.events", self._events, True),
            *(
                Route("GET", f"/console/{name}", f"console.{name}", self._handler(self._reading(read)), True)
                for name, read in reads.items()
            ),
            *(
                Route("POST", f"/console/{name}", f"console.{name}", self._handler(post, changes=True), True)
                for name, post in posts.items()
            ),
        ]

    # The page.

    def _asset(self, name: str, _head: Head, _body: bytes) -> Answer:
        asset = self._assets[name]
        return 200, asset.lines, asset.body

    # Who asks.

    def _call(self, name: str, head: Head, *, changes: bool = False) -> Call:
        """The call, with the holder of its session; a `Refusal` if it is not from our page."""
        call = Call(name, head, self._admission.new_id())
        assert head.whole is not None
        fields = head.whole.fields
        if head.authorization is not None:
            return call
        if is_from_elsewhere(fields):
            raise Refusal(problems.FORBIDDEN, "This request comes from another site.")
        if changes and MARKER not in fields:
            detail = f"A request of a session that changes something needs the header {MARKER}."
            raise Refusal(problems.FORBIDDEN, detail)
        key_id = self._sessions.find(fields)
        call.caller = None if key_id is None else self._sessions.caller(key_id)
        if call.caller is None:
            raise Refusal(problems.KEY_NOT_FOUND, "There is no session. Sign in at /console.")
        return call

    def _reader(self, call: Call) -> Steps[Caller]:
        caller = yield from self._admission.identify(call)
        if CONSOLE_READ not in caller.grants:
            detail = f"Missing permission: the key needs {CONSOLE_READ!r}."
            raise Refusal(problems.INSUFFICIENT_PERMISSIONS, detail)
        return caller

    def _refuse(self, head: Head, refusal: Refusal) -> Answer:
        return error_answer(refusal, self._admission.new_id(), head.accept, COMMON_LINES)

    def _handler(self, operation: Operation, *, changes: bool = False) -> Handler:
        """For those who may read; `changes`: a session must also show that our page sends the request."""

        def steps(call: Call, body: bytes) -> Steps[None]:
            call.caller = yield from self._reader(call)
            yield from operation(call, body)
            status, lines, answer = call.answer
            call.answer = status, lines + NO_STORE + COMMON_LINES, answer

        def handle(head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
            try:
                call = self._call("console", head, changes=changes)
            except Refusal as refusal:
                return self._refuse(head, refusal)
            return self._admission.run(call, steps(call, body))

        return handle

    def _shown(self, work: Work) -> Operation:
        """What `work` returns is the answer."""

        def steps(call: Call, body: bytes) -> Steps[None]:
            found = yield from work(call, body)
            call.answer = 200, JSON_LINE + call.lines, _encoded(found)

        return steps

    def _reading(self, read: Read) -> Operation:
        def work(call: Call, _body: bytes) -> Steps[Any]:
            assert call.caller is not None
            return wait(read, call.caller, _parameters(call.head))

        return self._shown(work)

    # Sessions.

    def _sign_in(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
        """The key comes in the body, as a form would send it; it is checked as the API checks one."""
        assert head.whole is not None
        fields = head.whole.fields
        if is_from_elsewhere(fields) or MARKER not in fields:
            return self._refuse(head, Refusal(problems.FORBIDDEN, "Sign in on the page of the console."))
        try:
            key = msgspec.json.decode(body, type=SignIn).key.strip()
            authorization = f"Bearer {key}".encode("ascii")
        except (msgspec.MsgspecError, ValueError):
            return self._refuse(head, invalid("/properties/key", 'the body must be {"key": "tg_…"}'))
        call = Call("console.session", Head(authorization, head.accept), self._admission.new_id())

        def steps() -> Steps[None]:
            caller = yield from self._reader(call)
            cookie = self._sessions.create(caller, fields)
            call.answer = 200, JSON_LINES + cookie, _encoded(self._about(caller))

        return self._admission.run(call, steps())

    def _sign_out(self, head: Head, _body: bytes) -> Answer:
        assert head.whole is not None
        fields = head.whole.fields
        if is_from_elsewhere(fields) or MARKER not in fields:
            return self._refuse(head, Refusal(problems.FORBIDDEN, "Sign out on the page of the console."))
        return 200, JSON_LINES + self._sessions.end(fields), b"{}"

    async def _session(self, caller: Caller, _parameters: Parameters) -> Any:
        return self._about(caller)

    def _about(self, caller: Caller) -> dict[str, Any]:
        """Who is signed in, and what the page offers them. The server checks each action again."""
        row = self._sync.view.key_by_id(caller.key_id)
        return {
            "key_id": caller.key_id,
            "key_name": "" if row is None else row.name,
            "workspace": caller.workspace.id,
            "permissions": sorted(caller.grants),
            "can": {
                "manage": CONSOLE_MANAGE in caller.grants,
                **{action: f"ratelimit.*.{action}" in caller.grants for action in ACTIONS},
            },
        }

    # Live.

    def _events(self, head: Head, _body: bytes) -> Answer | Stream:
        try:
            caller = _from_memory(self._reader(self._call("console.events", head)))
            parameters = _parameters(head)
            namespace = _namespace_id(caller, parameters)
            try:
                self.hub.check_room(caller.key_id)
            except TooManyViewers as error:
                raise Refusal(problems.OVERLOADED, str(error)) from error
        except Refusal as refusal:
            return self._refuse(head, refusal)
        identifier = parameters.get("identifier")

        def subscribe(subscriber: Subscriber) -> Callable[[], object]:
            return self.hub.add(Viewer(subscriber, caller.key_id, caller.workspace.id, namespace, identifier))

        return Stream(EVENT_LINES, subscribe)

    async def _snapshot(self, caller: Caller, _parameters: Parameters) -> Any:
        return await self.hub.snapshot(caller.workspace.id)

    # Questions.

    async def _identifier(self, caller: Caller, parameters: Parameters) -> Any:
        identifier = required(parameters, "identifier")
        namespace = _namespace_id(caller, parameters)
        return await self.hub.identifier(caller.workspace.id, namespace, identifier)

    async def _search(self, caller: Caller, parameters: Parameters) -> Any:
        text, workspace = required(parameters, "text"), caller.workspace.id
        answers = await self._ask({"kind": "search", "workspace": workspace, "text": text})
        exact = await self.hub.identifier(workspace, None, text)
        found = [{"namespace": subject["namespace"], "identifier": text} for subject in exact["subjects"]]
        found += [row for answer in answers for row in answer]
        unique = {(row["namespace"], row["identifier"]): row for row in found}
        return {"found": list(unique.values())[:25]}

    async def _preview(self, caller: Caller, parameters: Parameters) -> Any:
        pattern = required(parameters, "pattern")
        namespace = found_namespace(caller, required(parameters, "namespace"))
        answers = await self._ask(
            {
                "kind": "preview",
                "workspace": caller.workspace.id,
                "namespace": namespace.id,
                "pattern": pattern,
            }
        )
        shown = sorted({each for answer in answers for each in answer["identifiers"]})
        return {
            # Workers share identifiers: the largest number is a lower bound, and exact for one worker.
            "matched": max(len(shown), *(answer["matched"] for answer in answers)),
            "looked": max(answer["looked"] for answer in answers),
            "is_complete": all(answer["is_complete"] for answer in answers),
            "identifiers": [
                {"identifier": each, "applies": _applying(namespace, each, pattern)} for each in shown[:50]
            ],
        }

    async def _what_if(self, caller: Caller, parameters: Parameters) -> Any:
        workspace, namespace = caller.workspace.id, found_namespace(caller, required(parameters, "namespace"))
        try:
            quota, duration_ms = parse_quota(required(parameters, "limit"))
            make_limit(quota, duration_ms, namespace.id, workspace)
        except InvalidInput as error:
            raise invalid("/properties/limit", str(error)) from error
        now_ms = self._admission.now_ms()
        asked = {"workspace": workspace, "namespace": namespace.id, "since_ms": now_ms - SPAN_MS}
        async with self._replaying:
            answers = await self._ask({"kind": "recording", **asked})
            found = await replayed(answers, workspace, namespace.id, quota, duration_ms)
        return {**found, "at_ms": now_ms, "namespace": namespace.name}


def _encoded(found: object) -> bytes:
    # ASCII: a name may hold a lone surrogate.
    return json.dumps(found, separators=(",", ":")).encode("ascii")


def _from_memory(steps: Steps[Caller]) -> Caller:
    """The caller, if no step must wait: a stream has no task in which to wait."""
    try:
        next(steps)
    except StopIteration as done:
        caller: Caller = done.value
        return caller
    raise Refusal(problems.KEY_NOT_FOUND, "The key was not found.")


def _parameters(head: Head) -> dict[str, str]:
    """The query of a request, each name once."""
    assert head.whole is not None
    query = head.whole.target.partition(b"?")[2].decode("ascii", "replace")
    try:
        parsed = parse_qs(query, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError as error:
        raise invalid("/properties/query", f"at most {PARAMETERS_MAX} parameters") from error
    return {name: values[-1] for name, values in parsed.items()}


def _namespace_id(caller: Caller, parameters: Parameters) -> str | None:
    """The id of the namespace that a query names; None for all."""
    name = parameters.get("namespace")
    return found_namespace(caller, name).id if name else None


def _applying(namespace: NamespaceView, identifier: str, pattern: str) -> str | None:
    """The override that applies to an identifier today, if it is another one than the pattern's."""
    found = namespace.matcher.find(identifier)
    return None if found is None or found.identifier == pattern else found.identifier
