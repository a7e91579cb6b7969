"""`RateLimits`: the piece that does all the work for every framework.

It turns a request and its rules into one batch, asks the limiter, and says what to answer. What it must do is written
once, as a generator (`_steps`) that yields what has to be waited for: the synchronous driver asks a `Limiter`, the
asynchronous one awaits an `AsyncLimiter`. Laws:

- All limits that are enforced for a request are one all-or-nothing batch: a denied request spends nothing anywhere.
- Shadow limits are counted only after the request was allowed, each by itself; the limiter does that.
- A request is decided once, wherever several parts of an application ask for it.
- A limiter that was created here is started and stopped here. The caller starts and stops a limiter that it passes in.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar, cast

from tidegate.core.model import NAME_LENGTH_MAX, Decision, Limit, Request
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.integrations.answers import Answers, Denial, Outcome, closest
from tidegate.integrations.callers import Key, KeyFunction, Proxies, bounded, ip, key_of
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rules import CACHE_MAX, Exemption, LimitsFunction, LimitsLike, Rule, shadow_limit
from tidegate.integrations.settings import read_settings
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.limiter import Limiter

__all__ = ["AsyncRateLimits", "RateLimits", "SyncRateLimits"]

logger = logging.getLogger("tidegate.integrations")

UNLIMITED = Outcome(True)
UNKNOWN: Final = object()

LimiterT = TypeVar("LimiterT", Limiter, AsyncLimiter)
Batch = list[Request]
Simple = tuple[Limit, Key, int]
Steps = Generator[Batch | Awaitable[Any], Any, Outcome]


class RateLimits(Generic[LimiterT]):
    """The rules of an application, its limiter, and how its answers look.

    `rules` are `Rule` objects; a text such as "10/second; 1000/hour" is a rule for every request, by `by`.
    """

    _kind: type[LimiterT]

    def __init__(
        self,
        *rules: Rule | LimitsLike | LimitsFunction,
        limiter: LimiterT | None = None,
        by: Key | KeyFunction | None = None,
        exempt: Exemption | None = None,
        proxies: Proxies | None = None,
        answers: Answers | None = None,
        shadow: bool = False,
        on_outcome: Callable[[Any, Outcome], object] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        # The key of rules that give none, at routes as well.
        self.key = ip if by is None else key_of(by)
        self.rules = tuple(one if isinstance(one, Rule) else Rule(one) for one in rules)
        self.proxies = Proxies() if proxies is None else proxies
        self.answers = Answers() if answers is None else answers
        self.exempt = exempt
        # Nothing is refused: for the first days of new rules.
        self.shadow = shadow
        # Called with the framework's request after each decision, and when shadow mode would have refused.
        self.on_outcome = on_outcome
        self._settings = settings or {}
        if limiter is not None:
            self._check(limiter)
        self._given: LimiterT | None = limiter
        self._made: LimiterT | None = None
        # By rule and route: see `_simple`.
        self._known: dict[tuple[Rule, str | None], Simple | None] = {}

    @property
    def limiter(self) -> LimiterT:
        """The limiter in use: the one that was given, or one that is made from the settings at the first use."""
        if self._given is not None:
            return self._given
        if self._made is None:
            # If two threads create one at once, one of them is dropped unused: it was not started and has counted
            # nothing.
            made = self._kind(**read_settings(self._settings, os.environ))
            if self._made is None:
                self._made = made
                self._own(made)
        found = self._made
        assert found is not None
        return found

    def _check(self, limiter: object) -> None:
        """Test doubles need not be subclasses, but a limiter of the other kind would be awaited, or not awaited."""
        wrong = isinstance(limiter, Limiter | AsyncLimiter) and not isinstance(limiter, self._kind)
        if wrong or not hasattr(limiter, "limit_many"):
            raise InvalidInput("limiter", limiter, f"a {self._kind.__name__} for this integration")

    def _own(self, limiter: LimiterT) -> None:
        """A limiter was made here."""

    @contextmanager
    def override(self, limiter: LimiterT) -> Iterator[LimiterT]:
        """Use another limiter for a while: for tests."""
        self._check(limiter)
        before, self._given = self._given, limiter
        try:
            yield limiter
        finally:
            self._given = before

    # -- deciding

    def applicable(self, incoming: Incoming) -> list[Rule]:
        """The application's rules that are about this request."""
        return [rule for rule in self.rules if rule.matches(incoming)]

    def _simple(
        self, incoming: Incoming, rules: Sequence[Rule], route_rules: Sequence[Rule]
    ) -> Simple | None:
        """What is asked, where one limit applies and nothing has to be called but the key.

        Most requests are like that, and the generators of `_steps` cost more than a decision.
        """
        if len(rules) + len(route_rules) != 1:
            return None
        if rules:
            rule, route = rules[0], None
        else:
            rule, route = route_rules[0], incoming.route
            if not rule.matches_all and not rule.matches(incoming):
                return None
        known = self._known.get((rule, route), UNKNOWN)
        return self._make_simple(rule, route) if known is UNKNOWN else cast("Simple | None", known)

    def _make_simple(self, rule: Rule, route: str | None) -> Simple | None:
        simple: Simple | None = None
        if rule.is_simple and self.exempt is None and not self.shadow:
            limits = rule.limits_for(cast("LimitsLike", rule.limits), route)
            if len(limits) == 1 and not limits[0].shadow:
                simple = limits[0], rule.key or self.key, cast("int", rule.cost)
        if len(self._known) < CACHE_MAX:
            self._known[rule, route] = simple
        return simple

    def _steps(self, incoming: Incoming, rules: Sequence[Rule], route_rules: Sequence[Rule]) -> Steps:
        native = incoming.native
        if self.exempt is not None:
            verdict = self.exempt(native)
            if (yield verdict) if hasattr(verdict, "__await__") else verdict:
                return UNLIMITED
        batch: Batch = []
        for rule in rules:
            batch += yield from self._requests(rule, incoming, None)
        for rule in route_rules:
            if rule.matches(incoming):
                batch += yield from self._requests(rule, incoming, incoming.route)
        if not batch:
            return UNLIMITED
        if len(batch) > 1:
            _refuse_shared_counters(batch)
        decisions: Sequence[Decision] = yield batch
        is_allowed = all(decisions)
        enforced = [decision for decision in decisions if not decision.limit.shadow]
        shadow = [decision for decision in decisions if decision.limit.shadow] if is_allowed else ()
        return self._report(
            native, Outcome(is_allowed, enforced, shadow, closest(enforced) if enforced else None)
        )

    def _requests(
        self, rule: Rule, incoming: Incoming, route: str | None
    ) -> Generator[Awaitable[Any], Any, Batch]:
        """What one rule asks for; nothing if the request is exempt or has no limit."""
        native = incoming.native
        if rule.exempt is not None:
            verdict = rule.exempt(native)
            if (yield verdict) if hasattr(verdict, "__await__") else verdict:
                return []
        limits: Any = rule.limits
        if callable(limits):
            limits = limits(native)
            if hasattr(limits, "__await__"):
                limits = yield limits
        applied = rule.limits_for(limits, route)
        if not applied:
            return []
        key = rule.key or self.key
        identifier = key.find(incoming, self.proxies)
        if hasattr(identifier, "__await__"):
            identifier = yield identifier
        identifier = _checked_caller(key, identifier)
        cost: Any = rule.cost
        if callable(cost):
            cost = cost(native)
            if hasattr(cost, "__await__"):
                cost = yield cost
        if self.shadow and not rule.shadow:
            return [Request(shadow_limit(limit), identifier, cost) for limit in applied]
        return [Request(limit, identifier, cost) for limit in applied]

    def _report(self, native: Any, outcome: Outcome) -> Outcome:
        if outcome.shadow:
            for decision in outcome.shadow_denied:
                # No identifier: it may be a person's address.
                logger.info("shadow: %s in %r would be denied", decision.limit, decision.limit.namespace)
        if self.on_outcome is not None:
            self.on_outcome(native, outcome)
        return outcome

    def _reported(self, incoming: Incoming, decision: Decision) -> Outcome:
        """The same for one decision that was enforced."""
        outcome = Outcome(decision.allowed, (decision,), (), decision)
        if self.on_outcome is not None:
            self.on_outcome(incoming.native, outcome)
        return outcome

    # -- answering

    def headers(self, outcome: Outcome) -> dict[str, str]:
        """Header fields of an answer to a request that was allowed."""
        return {} if outcome.closest is None else self.answers.fields(outcome.closest)

    def denial(self, decisions: Sequence[Decision]) -> tuple[Denial, str, bytes]:
        """The denial, and the content type and bytes of its body."""
        denial = self.answers.denial(decisions)
        content_type, body = self.answers.body(denial)
        return denial, content_type, body


class SyncRateLimits(RateLimits[Limiter]):
    """For WSGI and whatever else decides in threads."""

    _kind = Limiter

    def check(self, incoming: Incoming, rules: Sequence[Rule], route_rules: Sequence[Rule] = ()) -> Outcome:
        """Decide."""
        limiter = self.limiter
        simple = self._simple(incoming, rules, route_rules)
        if simple is not None:
            limit, key, cost = simple
            found = key.find(incoming, self.proxies)
            if type(found) is not str or not 0 < len(found) <= NAME_LENGTH_MAX:
                if hasattr(found, "__await__"):
                    raise _unawaitable(found)
                found = _checked_caller(key, found)
            return self._reported(incoming, limiter.limit(limit, found, cost))
        steps = self._steps(incoming, rules, route_rules)
        try:
            wanted = next(steps)
            while True:
                if not isinstance(wanted, list):
                    raise _unawaitable(wanted)
                if len(wanted) == 1:
                    limit, identifier, cost = wanted[0]
                    wanted = steps.send((limiter.limit(limit, identifier, cost),))
                else:
                    wanted = steps.send(limiter.limit_many(wanted))
        except StopIteration as done:
            return cast("Outcome", done.value)

    def _own(self, limiter: Limiter) -> None:
        """There is no hook for the end of a WSGI application: the last counts go out when the process ends."""
        atexit.register(limiter.stop)

    def start(self) -> None:
        """Connect now, and raise what can never work; otherwise the first request does it."""
        self.limiter.start()

    def stop(self) -> None:
        """Flush the last counts of a limiter that was made here. The next request makes a new one."""
        made, self._made = self._made, None
        if made is not None:
            atexit.unregister(made.stop)
            made.stop()


class AsyncRateLimits(RateLimits[AsyncLimiter]):
    """For asyncio. Nothing here blocks: what must be waited for is awaited."""

    _kind = AsyncLimiter

    async def check(
        self, incoming: Incoming, rules: Sequence[Rule], route_rules: Sequence[Rule] = ()
    ) -> Outcome:
        """Decide."""
        limiter = self.limiter
        simple = self._simple(incoming, rules, route_rules)
        if simple is not None:
            limit, key, cost = simple
            found = key.find(incoming, self.proxies)
            if type(found) is not str or not 0 < len(found) <= NAME_LENGTH_MAX:
                if hasattr(found, "__await__"):
                    found = await found
                found = _checked_caller(key, found)
            return self._reported(incoming, await limiter.limit(limit, found, cost))
        steps = self._steps(incoming, rules, route_rules)
        try:
            wanted = next(steps)
            while True:
                if not isinstance(wanted, list):
                    wanted = steps.send(await wanted)
                elif len(wanted) == 1:
                    limit, identifier, cost = wanted[0]
                    wanted = steps.send((await limiter.limit(limit, identifier, cost),))
                else:
                    wanted = steps.send(await limiter.limit_many(wanted))
        except StopIteration as done:
            return cast("Outcome", done.value)

    async def start(self) -> None:
        """Connect now, and raise what can never work; otherwise the first request does it."""
        await self.limiter.start()

    async def stop(self) -> None:
        """Flush the last counts of a limiter that was made here. The next request makes a new one."""
        made, self._made = self._made, None
        if made is not None:
            await made.stop()


def _checked_caller(key: Key, found: object) -> str:
    """What a key has found, as an identifier; an `InvalidInput` that says what to do if it found nothing."""
    if isinstance(found, str) and found:
        return bounded(found)
    if key is ip:
        raise InvalidInput(
            "the key 'ip'",
            found,
            "a connection with an address; behind a proxy on a Unix socket, configure "
            'Proxies(trusted_networks=["unix"])',
        )
    raise InvalidInput(
        f"the key {key.name!r}",
        found,
        "the caller as a str that is not empty; use a fallback such as `user | ip`, or exempt the request",
    )


def _refuse_shared_counters(batch: Batch) -> None:
    if len({request.limit.key for request in batch}) < len(batch):
        names = ", ".join(sorted({repr(request.limit.namespace) for request in batch}))
        raise ConfigurationError(
            f"two rules for one request count in the same place ({names}, same duration); give one of them a namespace"
        )


def _unawaitable(wanted: Awaitable[Any]) -> ConfigurationError:
    close = getattr(wanted, "close", None)
    if close is not None:
        close()
    return ConfigurationError(
        "a function of a rule (limits, by, cost or exempt) is a coroutine function, which a synchronous application "
        "cannot await; make it an ordinary function"
    )
