"""Rules: which requests, by what key, under which limits, at what cost.

A rule is checked when it is made; what it needs for a request is prepared then too. It knows no framework and no
limiter. Laws: one rule's limits never share a counter; a shadow rule counts in namespaces of its own, so that it can
never take from a limit that is enforced; a rule for GET covers HEAD, which frameworks route to the same function.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from fnmatch import translate
from typing import Any, Final

from tidegate.core.model import Limit, checked_int, checked_on_outage
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.integrations.callers import Key, KeyFunction, key_of
from tidegate.integrations.incoming import Incoming

__all__ = [
    "LimitsLike",
    "Rule",
    "attach_rules",
    "guarded",
    "make_rules",
    "message_rules",
    "refuse_shared_names",
    "rules_of",
    "shadow_limit",
]

LimitsLike = str | Limit | Sequence[str | Limit]
LimitsFunction = Callable[[Any], LimitsLike | Awaitable[LimitsLike | None] | None]
CostFunction = Callable[[Any], int | Awaitable[int]]
Exemption = Callable[[Any], bool | Awaitable[bool]]

# A rule in an application's list that names no route and no path.
APPLICATION: Final = "application"
# A rule for messages over websockets that is only a text.
MESSAGES: Final = "messages"
SHADOW_SUFFIX: Final = ".shadow"
# Route names are few; texts from a customer's plan are few too, unless they contain a counter.
CACHE_MAX: Final = 1_024

ATTRIBUTE: Final = "__tidegate_rules__"


class Rule:
    """One rule, for the requests that match all of `path`, `methods`, `host` and `route` that are given.

    In these, `*` stands for anything. Routes have the names that the framework gives them.

    `limits` is a text of one or several quotas ("10/second; 1000/hour"), one or several `Limit`, or a function of the
    request that returns any of these, or None for no limit. Functions get the framework's request; in asynchronous
    frameworks they may be coroutine functions. Without `namespace` a rule counts under the name of its route.
    """

    __slots__ = (
        "_by_namespace",
        "_fixed",
        "_host",
        "_methods",
        "_path",
        "_routes",
        "cost",
        "exempt",
        "is_simple",
        "key",
        "limits",
        "matches_all",
        "namespace",
        "on_outage",
        "shadow",
        "text",
    )

    def __init__(
        self,
        limits: LimitsLike | LimitsFunction,
        *,
        by: Key | KeyFunction | None = None,
        cost: int | CostFunction = 1,
        exempt: Exemption | None = None,
        namespace: str | None = None,
        path: str | Sequence[str] = (),
        methods: str | Sequence[str] = (),
        host: str | Sequence[str] = (),
        route: str | Sequence[str] = (),
        shadow: bool = False,
        on_outage: str = "local",
    ) -> None:
        # None: the application's key.
        self.key = None if by is None else key_of(by)
        self.cost = cost if callable(cost) else checked_int("cost", cost, 0)
        if exempt is not None and not callable(exempt):
            raise InvalidInput("exempt", exempt, "a function of the request that returns True or False")
        self.exempt = exempt
        paths, routes = _texts("path", path), _texts("route", route)
        self._path = _pattern(paths)
        self._host = _pattern(tuple(one.lower() for one in _texts("host", host)))
        self._routes = _pattern(routes)
        self._methods = frozenset(one.upper() for one in _texts("methods", methods))
        if "GET" in self._methods:
            self._methods |= {"HEAD"}
        self.matches_all = not (self._path or self._host or self._routes or self._methods)
        self.shadow = shadow
        self.on_outage = checked_on_outage(on_outage)
        self.limits = limits
        self.namespace = namespace
        self.text = " ".join(paths or routes)
        # Nothing has to be called but the key.
        self.is_simple = not (callable(limits) or callable(cost) or exempt is not None or shadow)
        self._by_namespace: dict[object, tuple[Limit, ...]] = {}
        self._fixed: tuple[Limit, ...] | None = None
        if not callable(limits):
            # Also finds out now whether the limits can be read.
            ready = self._make(limits, APPLICATION if namespace is None else namespace)
            if namespace is not None or all(isinstance(one, Limit) for one in _sequence(limits)):
                self._fixed = ready

    @property
    def is_named(self) -> bool:
        """Whether it counts under a name that was given, and not under that of its route."""
        return self.namespace is not None or self._fixed is not None

    def matches(self, incoming: Incoming) -> bool:
        """Whether the rule is about this request."""
        if self.matches_all:
            return True
        if self._methods and incoming.method not in self._methods:
            return False
        if self._routes is not None and self._routes.fullmatch(incoming.route or "") is None:
            return False
        if self._path is not None and self._path.fullmatch(incoming.path) is None:
            return False
        return self._host is None or self._host.fullmatch(incoming.host) is not None

    def limits_for(self, limits: LimitsLike | None, route: str | None) -> tuple[Limit, ...]:
        """What applies, in the namespace of the rule or of the route. `limits` is what a function returned."""
        if self._fixed is not None:
            return self._fixed
        if limits is None:
            return ()
        namespace = self.namespace or route or self.text or APPLICATION
        known = limits if isinstance(limits, (str, Limit)) else tuple(map(_quota, _sequence(limits)))
        found = self._by_namespace.get((known, namespace))
        if found is None:
            found = self._make(limits, namespace)
            if len(self._by_namespace) < CACHE_MAX:
                self._by_namespace[known, namespace] = found
        return found

    def _make(self, limits: LimitsLike, namespace: str) -> tuple[Limit, ...]:
        made = [
            self._limit(text, namespace)
            for one in map(_quota, _sequence(limits))
            for text in (re.split(r"\s*[;,\n]\s*", one.strip(" ;,\n")) if isinstance(one, str) else [one])
        ]
        if not made:
            raise InvalidInput("limits", limits, 'at least one quota, such as "100/minute"')
        if len({limit.key for limit in made}) < len(made):
            raise InvalidInput(
                "limits", limits, "one quota per duration: two of them would count in the same place"
            )
        return tuple(made)

    def _limit(self, quota: str | Limit, namespace: str) -> Limit:
        if isinstance(quota, Limit):
            return shadow_limit(quota) if self.shadow else quota
        limit = Limit(quota, namespace=namespace, on_outage=self.on_outage)
        return shadow_limit(limit) if self.shadow else limit

    def __repr__(self) -> str:
        return f"<rule {self.limits!r:.60} by {self.key}>"


@functools.lru_cache(maxsize=CACHE_MAX)
def shadow_limit(limit: Limit) -> Limit:
    """The limit in shadow mode, in a namespace of its own, where counting cannot take from what is enforced."""
    if limit.shadow:
        return limit
    return Limit(
        limit.quota,
        duration_ms=limit.duration_ms,
        namespace=limit.namespace + SHADOW_SUFFIX,
        workspace=limit.workspace,
        on_outage=limit.on_outage,
        shadow=True,
    )


def _texts(field: str, value: object) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple, set, frozenset)) or not all(
        isinstance(one, str) and one for one in found
    ):
        raise InvalidInput(field, value, "a text or a list of texts")
    return tuple(found)


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """`*` stands for anything, slashes included."""
    return re.compile("|".join(translate(text) for text in texts)) if texts else None


def _sequence(limits: LimitsLike) -> Sequence[str | Limit]:
    if isinstance(limits, (str, Limit)):
        return (limits,)
    if isinstance(limits, (list, tuple)):
        return limits
    raise InvalidInput("limits", limits, 'quotas such as "10/second; 1000/hour", or Limit objects')


def _quota(one: object) -> str | Limit:
    if isinstance(one, (str, Limit)):
        return one
    raise InvalidInput("limits", one, 'quotas such as "100/minute", or Limit objects')


def make_rules(limits: Sequence[Rule | LimitsLike | LimitsFunction], **options: Any) -> tuple[Rule, ...]:
    """Rules as they are, everything else as a rule with these options; texts and limits become one rule."""
    rules: list[Rule] = []
    plain: list[str | Limit] = []
    for one in limits:
        if isinstance(one, Rule):
            rules.append(one)
        elif callable(one):
            rules.append(Rule(one, **options))
        else:
            plain.extend(_sequence(one))
    if plain:
        rules.insert(0, Rule(plain, **options))
    elif options and not any(callable(one) and not isinstance(one, Rule) for one in limits):
        raise ConfigurationError(
            f"{', '.join(options)}: give it to the Rule, it has no limits to apply to here"
        )
    return tuple(rules)


def message_rules(messages: str | Rule | Sequence[str | Rule]) -> tuple[Rule, ...]:
    """Rules for what arrives over a websocket, each message a request of its own."""
    given = (messages,) if isinstance(messages, (str, Rule)) else messages
    return tuple(one if isinstance(one, Rule) else Rule(one, namespace=MESSAGES) for one in given)


def attach_rules(function: Any, rules: Sequence[Rule]) -> None:
    """Note at a view or a handler what it is limited by; a second decorator adds to the first."""
    setattr(function, ATTRIBUTE, (*rules, *rules_of(function)))


def guarded(function: Any, rules: Sequence[Rule], verify: Callable[..., object]) -> Any:
    """A view that is limited by these rules. What decides is installed in the application; `verify` gets the view's
    arguments and raises if it is missing, so that a limit is never silently without effect."""
    if inspect.isclass(function):
        attach_rules(function, rules)
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            verify(*args, **kwargs)
            return await function(*args, **kwargs)

        limited = asynchronous
    else:

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            verify(*args, **kwargs)
            return function(*args, **kwargs)

        limited = synchronous
    attach_rules(limited, rules)
    return limited


def refuse_shared_names(routes: Iterable[tuple[str, object, Iterable[Rule]]]) -> None:
    """A limit counts under the name of its route: two routes (name, function, rules) with one name are an error."""
    seen: dict[str, object] = {}
    for name, function, rules in routes:
        if any(not rule.is_named for rule in rules) and seen.setdefault(name, function) is not function:
            raise ConfigurationError(
                f"two routes with limits have the name {name!r}; give one of them a name of its own, or its limits a "
                "namespace"
            )


def rules_of(function: Any) -> tuple[Rule, ...]:
    """What was noted at a function."""
    found: tuple[Rule, ...] = getattr(function, ATTRIBUTE, ())
    return found
