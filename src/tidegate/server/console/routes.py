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

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from tidegate.core.model import make_limit
from tidegate.core.quota import parse_quota
from tidegate.errors import InvalidInput
from tidegate.server.api.admission import Admission, Call, Steps, wait
from tidegate.server.api.overrides import OverrideOperations
from tidegate.server.api.problems import (
    FORBIDDEN,
    INSUFFICIENT_PERMISSIONS,
    INVALID_INPUT,
    KEY_NOT_FOUND,
    NAMESPACE_NOT_FOUND,
    OVERLOADED,
    FieldError,
    Refusal,
    error_answer,
)
from tidegate.server.catalog.keys import ACTIONS, CONSOLE_MANAGE, CONSOLE_READ
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.console.assets import COMMON_LINES, JSON_LINES, load_assets
from tidegate.server.console.catalog import CatalogViews
from tidegate.server.console.hub import Hub, TooManyViewers, Viewer
from tidegate.server.console.local import Ask
from tidegate.server.console.sessions import MARKER, Sessions, is_from_elsewhere
from tidegate.server.console.what_if import WhatIfQuestions
from tidegate.server.messages import Answer, Handler, Head, Route, Stream, Subscriber

EVENT_LINES: Final = (
    b"content-type: text/event-stream\r\ncache-control: no-store\r\nx-accel-buffering: no\r\n"
)
PARAMETERS_MAX: Final = 8
NAME_MAX: Final = 512

Work = Callable[[Call, Caller, dict[str, str]], Steps[Any]]


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
        self._what_ifs = WhatIfQuestions(ask)
        self._catalog = CatalogViews(sync, admission)
        self._assets = load_assets()
        self.hub = Hub(ask, admission.now_ms, lambda key_id: sessions.caller(key_id) is not None)

    def routes(self) -> list[Route]:
        reads: dict[str, Work] = {
            "snapshot": self._snapshot,
            "identifier": self._identifier,
            "search": self._search,
            "preview": self._preview,
            "what-if": self._what_if,
            "namespaces": self._namespaces,
            "overrides": self._list_overrides,
            "keys": self._keys,
        }
        catalog = self._catalog
        changes = {
            "namespaces.create": catalog.create_namespace,
            "namespaces.delete": catalog.delete_namespace,
            "namespaces.restore": catalog.restore_namespace,
            "keys.create": catalog.create_key,
            "keys.expire": catalog.expire_key,
            "keys.revoke": catalog.revoke_key,
        }
        of_api = {
            "ratelimit.setOverride": self._overrides.set_override,
            "ratelimit.getOverride": self._overrides.get_override,
            "ratelimit.deleteOverride": self._overrides.delete_override,
        }
        found = [
            Route("GET", "/console", "console", partial(self._asset, "index.html")),
            *(
                Route("GET", f"/console/static/{name}", "console", partial(self._asset, name))
                for name in self._assets
                if name != "index.html"
            ),
            Route("POST", "/console/session", "console.session", self._sign_in, True),
            Route("GET", "/console/session", "console.session", self._reading(self._session), True),
            Route("DELETE", "/console/session", "console.session", self._sign_out, True),
            Route("GET", "/console/events", "console.events", self._events, True),
        ]
        found += [
            Route("GET", f"/console/{name}", f"console.{name}", self._reading(work), True)
            for name, work in reads.items()
        ]
        found += [
            Route("POST", f"/console/{name}", f"console.{name}", self._changing(self._shown(work)), True)
            for name, work in changes.items()
        ]
        found += [
            Route("POST", f"/console/{name}", f"console.{name}", self._changing(work), True)
            for name, work in of_api.items()
        ]
        return found

    # The page.

    def _asset(self, name: str, _head: Head, _body: bytes) -> Answer:
        asset = self._assets[name]
        return 200, asset.lines, asset.body

    # Who asks.

    def _call(self, name: str, head: Head, *, changes: bool) -> Call:
        """The call, with the holder of its session; a `Refusal` if it is not from our page."""
        call = Call(name, head, self._admission.new_id())
        assert head.whole is not None
        fields = head.whole.fields
        if head.authorization is not None:
            return call
        if is_from_elsewhere(fields):
            raise Refusal(FORBIDDEN, "This request comes from another site.")
        if changes and MARKER not in fields:
            raise Refusal(
                FORBIDDEN, f"A request of a session that changes something needs the header {MARKER}."
            )
        key_id = self._sessions.find(fields)
        call.caller = None if key_id is None else self._sessions.caller(key_id)
        if call.caller is None:
            raise Refusal(KEY_NOT_FOUND, "There is no session. Sign in at /console.")
        return call

    def _reader(self, call: Call) -> Steps[Caller]:
        caller = yield from self._admission.identify(call)
        if CONSOLE_READ not in caller.grants:
            raise _may_not_read()
        return caller

    def _run(self, name: str, head: Head, *, changes: bool, work: Callable[[Call], Steps[None]]) -> Any:
        try:
            call = self._call(name, head, changes=changes)
        except Refusal as refusal:
            status, lines, body = error_answer(refusal, self._admission.new_id(), head.accept)
            return status, lines + COMMON_LINES, body
        return self._admission.run(call, work(call))

    def _reading(self, work: Work) -> Handler:
        def steps(call: Call) -> Steps[None]:
            caller = yield from self._reader(call)
            found = yield from work(call, caller, _parameters(call.head))
            call.answer = 200, JSON_LINES, _encoded(found)

        def handle(head: Head, _body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
            answer: Answer | Coroutine[Any, Any, Answer] = self._run(
                "console", head, changes=False, work=steps
            )
            return answer

        return handle

    def _changing(self, work: Callable[[Call, bytes], Steps[None]]) -> Handler:
        def handle(head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
            def steps(call: Call) -> Steps[None]:
                yield from self._reader(call)
                yield from work(call, body)
                status, lines, answer = call.answer
                call.answer = status, lines + b"cache-control: no-store\r\n" + COMMON_LINES, answer

            answer: Answer | Coroutine[Any, Any, Answer] = self._run(
                "console", head, changes=True, work=steps
            )
            return answer

        return handle

    def _shown(self, work: Callable[[Call, bytes], Steps[Any]]) -> Callable[[Call, bytes], Steps[None]]:
        def steps(call: Call, body: bytes) -> Steps[None]:
            found = yield from work(call, body)
            call.answer = 200, b"content-type: application/json\r\n" + call.lines, _encoded(found)

        return steps

    # Sessions.

    def _sign_in(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
        """The key comes in the body, as a form would send it; it is checked as the API checks one."""
        assert head.whole is not None
        fields = head.whole.fields
        if is_from_elsewhere(fields) or MARKER not in fields:
            refusal = Refusal(FORBIDDEN, "Sign in on the page of the console.")
            return error_answer(refusal, self._admission.new_id(), head.accept)
        try:
            key = msgspec.json.decode(body, type=SignIn).key.strip()
            authorization = f"Bearer {key}".encode("ascii")
        except (msgspec.MsgspecError, ValueError):
            refusal = _invalid("key", 'the body must be {"key": "tg_…"}')
            return error_answer(refusal, self._admission.new_id(), head.accept)
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
            refusal = Refusal(FORBIDDEN, "Sign out on the page of the console.")
            return error_answer(refusal, self._admission.new_id(), head.accept)
        return 200, JSON_LINES + self._sessions.end(fields), b"{}"

    def _session(self, _call: Call, caller: Caller, _parameters: dict[str, str]) -> Steps[Any]:
        yield from ()
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
            call = self._call("console.events", head, changes=False)
            caller = _from_memory(self._reader(call))
            parameters = _parameters(head)
            identifier = parameters.get("identifier")
            namespace = None
            if parameters.get("namespace"):
                namespace = _namespace(caller, parameters["namespace"]).id
            try:
                self.hub.check_room(caller.key_id)
            except TooManyViewers as error:
                raise Refusal(OVERLOADED, str(error)) from error
        except Refusal as refusal:
            return error_answer(refusal, self._admission.new_id(), head.accept)

        def subscribe(subscriber: Subscriber) -> Callable[[], object]:
            return self.hub.add(Viewer(subscriber, caller.key_id, caller.workspace.id, namespace, identifier))

        return Stream(EVENT_LINES + COMMON_LINES, subscribe)

    def _snapshot(self, _call: Call, caller: Caller, _parameters: dict[str, str]) -> Steps[Any]:
        return (yield from wait(self.hub.snapshot, caller.workspace.id))

    # Questions.

    def _identifier(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        identifier = _required(parameters, "identifier")
        namespace = None
        if parameters.get("namespace"):
            namespace = _namespace(caller, parameters["namespace"]).id
        return (yield from wait(self.hub.identifier, caller.workspace.id, namespace, identifier))

    def _search(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        text = _required(parameters, "text")
        return (yield from wait(self._all_found, caller.workspace.id, text))

    async def _all_found(self, workspace: str, text: str) -> dict[str, Any]:
        answers = await self._ask({"kind": "search", "workspace": workspace, "text": text})
        exact = await self.hub.identifier(workspace, None, text)
        found = [{"namespace": subject["namespace"], "identifier": text} for subject in exact["subjects"]]
        found += [row for answer in answers for row in answer]
        unique = {(row["namespace"], row["identifier"]): row for row in found}
        return {"found": list(unique.values())[:25]}

    def _preview(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        pattern = _required(parameters, "pattern")
        namespace = _namespace(caller, _required(parameters, "namespace"))
        return (yield from wait(self._all_matched, caller.workspace.id, namespace, pattern))

    async def _all_matched(self, workspace: str, namespace: NamespaceView, pattern: str) -> dict[str, Any]:
        question = {
            "kind": "preview",
            "workspace": workspace,
            "namespace": namespace.id,
            "pattern": pattern,
        }
        answers = await self._ask(question)
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

    def _what_if(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        namespace = _namespace(caller, _required(parameters, "namespace"))
        try:
            quota, duration_ms = parse_quota(_required(parameters, "limit"))
            make_limit(quota, duration_ms, namespace.id, caller.workspace.id)
        except InvalidInput as error:
            raise _invalid("limit", str(error)) from error
        now_ms = self._admission.now_ms()
        answer = self._what_ifs.answer
        found = yield from wait(answer, caller.workspace.id, namespace.id, quota, duration_ms, now_ms)
        return {**found, "namespace": namespace.name}

    # The catalog.

    def _namespaces(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        yield from ()
        return self._catalog.namespaces(caller, parameters.get("text", ""))

    def _list_overrides(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        namespace = _namespace(caller, _required(parameters, "namespace"))
        return (yield from wait(self._catalog.overrides, caller, namespace, parameters.get("text", "")))

    def _keys(self, _call: Call, caller: Caller, parameters: dict[str, str]) -> Steps[Any]:
        yield from ()
        return self._catalog.keys(caller, parameters.get("text", ""), self._admission.now_ms())


def _encoded(found: object) -> bytes:
    # ASCII: a name may hold a lone surrogate.
    return json.dumps(found, separators=(",", ":")).encode("ascii")


def _may_not_read() -> Refusal:
    return Refusal(INSUFFICIENT_PERMISSIONS, f"Missing permission: the key needs {CONSOLE_READ!r}.")


def _invalid(field: str, message: str) -> Refusal:
    return Refusal(INVALID_INPUT, message, errors=[FieldError(f"/properties/{field}", message)])


def _from_memory(steps: Steps[Caller]) -> Caller:
    """The caller, if no step must wait: a stream has no task in which to wait."""
    try:
        next(steps)
    except StopIteration as done:
        caller: Caller = done.value
        return caller
    raise Refusal(KEY_NOT_FOUND, "The key was not found.")


def _parameters(head: Head) -> dict[str, str]:
    """The query of a request, each name once."""
    assert head.whole is not None
    query = head.whole.target.partition(b"?")[2].decode("ascii", "replace")
    try:
        parsed = parse_qs(query, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError as error:
        raise _invalid("query", f"at most {PARAMETERS_MAX} parameters") from error
    return {name: values[-1] for name, values in parsed.items()}


def _required(parameters: dict[str, str], name: str) -> str:
    value = parameters.get(name, "")
    if not 0 < len(value) <= NAME_MAX:
        raise _invalid(name, f"{name!r} must have 1 to {NAME_MAX} characters")
    return value


def _namespace(caller: Caller, name: str) -> NamespaceView:
    found = caller.workspace.namespaces.get(name)
    if found is None:
        raise Refusal(NAMESPACE_NOT_FOUND, "The namespace was not found.")
    return found


def _applying(namespace: NamespaceView, identifier: str, pattern: str) -> str | None:
    """The override that applies to an identifier today, if it is another one than the pattern's."""
    found = namespace.matcher.find(identifier)
    return None if found is None or found.identifier == pattern else found.identifier
