"""`/v1/check` as an operation of the HTTP API: a key if the listener asks for one, the question, the decision.

Two forms: `/v1/check?…` says in its query what is asked. `/v1/check/POLICY/…` names a policy, and what follows it is
ignored: Envoy appends the path and the query of the client's own request, which must not change what is asked.
"""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tidegate.errors import ConfigurationError
from tidegate.server.api.admission import Admission, Call, Steps, missing_permission, wait
from tidegate.server.catalog.view import Caller
from tidegate.server.messages import Answer, Route, Whole, path_of
from tidegate.server.rls.check import (
    BadCheck,
    CheckAnswer,
    CheckConfig,
    CheckRequest,
    answer_check,
    ask_check,
    bad_check,
    parse_check_config,
)
from tidegate.server.rls.service import Outcome, RateLimitService

CHECK_PATH: Final = "/v1/check"
# Envoy asks with the method of the client's own request. HEAD comes with GET.
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
FILE_BYTES_MAX: Final = 1_048_576


def read_check_config(file: str | None) -> CheckConfig:
    """The policies of a TOML file; none without a file. Raises `ConfigurationError`."""
    if file is None:
        return CheckConfig()
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigurationError(f"{file}: larger than {FILE_BYTES_MAX} bytes")
        return parse_check_config(tomllib.loads(data.decode("utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise ConfigurationError(f"{file}: not a TOML file: {error}") from error


class CheckOperation:
    """Answers checks with a `RateLimitService`."""

    def __init__(self, service: RateLimitService, admission: Admission, config: CheckConfig) -> None:
        self._service = service
        self._admission = admission
        # May be replaced at any time.
        self.config = config

    def routes(self, *, needs_key: bool) -> list[Route]:
        """For a listener on which a key is needed, or one that only gateways can reach."""
        handler = self._admission.handler("check", partial(self._check, needs_key))
        return [
            Route(method, path, "check", handler, reads_whole=True)
            for path in (CHECK_PATH, f"{CHECK_PATH}/*")
            for method in METHODS
        ]

    def _check(self, needs_key: bool, call: Call, _body: bytes) -> Steps[None]:
        caller: Caller | None = None
        if needs_key:
            caller = self._admission.recall(call.head.authorization)
            if caller is None or caller.is_metered:
                caller = yield from self._admission.identify(call)
            if not caller.can_limit:
                raise missing_permission("limit", None)
        whole = call.head.whole
        assert whole is not None
        try:
            question = ask_check(check_request(whole), self.config)
        except BadCheck as error:
            call.answer = _answer(bad_check(error), call.lines)
            return
        if caller is not None:
            yield from self._admission.use_quota(call, caller, len(question.descriptors))
        plan = self._service.plan(question.domain, question.descriptors, question.cost)
        decided = self._service.decide(plan)
        if isinstance(decided, Outcome):
            outcome = decided
        else:
            outcome = yield from wait(lambda: decided)
        call.answer = _answer(answer_check(question, outcome), call.lines)


def check_request(whole: Whole) -> CheckRequest:
    """What an HTTP request says, from either form of its path."""
    # Decoded as the router does, so that both take the same requests for the second form.
    path = path_of(whole.target).decode("utf-8", "replace")
    _, slash, rest = path.partition(f"{CHECK_PATH}/")
    query = whole.target.partition(b"?")[2].decode("latin-1")
    if slash:
        query = "policy=" + quote(rest.partition("/")[0])
    return CheckRequest(query, whole.fields, whole.peer)


def _answer(answer: CheckAnswer, lines: bytes) -> Answer:
    fields = "".join([f"{name.lower()}: {value}\r\n" for name, value in answer.headers.items()])
    return answer.status, fields.encode("ascii") + lines, answer.body
