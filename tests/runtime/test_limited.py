"""The decorator: the same for threads and for tasks; mistakes are errors when a function is decorated."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, on_virtual_time
from tests.runtime.world import clock as virtual_clock
from tidegate import AsyncLimiter, InvalidInput, Limit, Limiter, LimitExceeded
from tidegate.errors import TidegateError
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

TWO_A_MINUTE = Limit("2/minute", namespace="tests")
THREE_AN_HOUR = Limit("3/hour", namespace="tests.hourly")


class Decorated:
    """A limiter of one kind, and a way to decorate and call a function with it: each test below runs for both."""

    def __init__(self, kind: str) -> None:
        self.clock = ManualClock(EPOCH_MS)
        self.is_async = kind == "async"
        self.limiter: Limiter | AsyncLimiter = (
            make_async_limiter(clock=self.clock)
            if self.is_async
            else make_limiter(
                clock=self.clock, sleep=lambda seconds: self.clock.advance(round(seconds * 1000))
            )
        )

    def decorate(self, function: Callable[..., Any], *limits: Limit, **options: Any) -> Callable[..., Any]:
        """Decorate `function`, as a coroutine function if needed; the result is called as a plain function."""
        if not self.is_async:
            decorated: Callable[..., Any] = self.limiter.limited(*limits, **options)(function)
            return decorated

        @functools.wraps(function)
        async def coroutine_function(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        limited: Callable[..., Any] = self.limiter.limited(*limits, **options)(coroutine_function)
        assert inspect.iscoroutinefunction(limited)

        @functools.wraps(limited)
        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run(limited(*args, **kwargs))

        return call

    def peek(self, limit: Limit, identifier: str) -> int:
        answer: Any = self.limiter.peek(limit, identifier)
        return int((asyncio.run(answer) if self.is_async else answer).effective)


@pytest.fixture(params=["sync", "async"])
def decorated(request: pytest.FixtureRequest) -> Decorated:
    return Decorated(request.param)


def test_calls_are_counted_by_key_and_a_denial_says_when_to_retry(decorated: Decorated) -> None:
    def send(user: str, *, text: str) -> str:
        """Sends."""
        return f"{user}: {text}"

    send = decorated.decorate(send, TWO_A_MINUTE, key=lambda user, *, text: f"{user}")
    assert (send.__name__, send.__doc__) == ("send", "Sends.")
    assert [send("ann", text="1"), send("ann", text="2"), send("bob", text="3")] == [
        "ann: 1",
        "ann: 2",
        "bob: 3",
    ]
    with pytest.raises(LimitExceeded) as caught:
        send("ann", text="4")
    assert str(caught.value) == "'ann' is over 2 per minute in 'tests': retry in 31 s"
    assert not caught.value.decision
    assert caught.value.decisions == (caught.value.decision,)
    assert caught.value.decision.retry_after is not None
    assert caught.value.transient


def test_without_a_key_all_calls_share_one_counter(decorated: Decorated) -> None:
    work = decorated.decorate(lambda number: number, TWO_A_MINUTE)
    assert [work(1), work(2)] == [1, 2]
    with pytest.raises(LimitExceeded, match="'all' is over 2 per minute"):
        work(3)
    assert decorated.peek(TWO_A_MINUTE, "all") == 2


def len_of(people: list[str]) -> int:
    return len(people)


def test_the_cost_may_be_a_number_or_a_function_of_the_arguments(decorated: Decorated) -> None:
    work = decorated.decorate(len_of, TWO_A_MINUTE, key=lambda people: "x", cost=len)
    assert work(["ann", "bob"]) == 2
    with pytest.raises(LimitExceeded):
        work(["cy"])
    assert work([]) == 0, "a cost of 0 consumes nothing"
    with pytest.raises(LimitExceeded, match="'x' is over 2 per minute in 'tests': a cost of 3 never fits"):
        work(["ann", "bob", "cy"])


def test_several_limits_are_one_batch_that_is_consumed_all_or_not_at_all(decorated: Decorated) -> None:
    work = decorated.decorate(lambda: "done", TWO_A_MINUTE, THREE_AN_HOUR, key=lambda: "x")
    assert [work(), work()] == ["done", "done"]
    with pytest.raises(LimitExceeded, match="2 per minute"):
        work()
    assert decorated.peek(THREE_AN_HOUR, "x") == 2, (
        "the hour was not charged for a call that the minute denied"
    )
    decorated.clock.advance(120_000)
    assert work() == "done"
    with pytest.raises(
        LimitExceeded, match=r"is over 3 per hour in 'tests\.hourly': retry in .* min"
    ) as caught:
        work()
    assert [bool(each) for each in caught.value.decisions] == [True, False]
    assert caught.value.decision.limit == THREE_AN_HOUR


def test_the_decision_is_the_denial_that_lasts_longest(decorated: Decorated) -> None:
    work = decorated.decorate(lambda: "done", TWO_A_MINUTE, THREE_AN_HOUR, key=lambda: "x", cost=2)
    work()
    with pytest.raises(LimitExceeded) as caught:
        work()
    first, second = caught.value.decisions
    assert not first and not second
    assert caught.value.decision is second
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (LimitExceeded, str(caught.value))
    assert again.decision.retry_after_ms == caught.value.decision.retry_after_ms


@pytest.mark.parametrize("limits", [(TWO_A_MINUTE,), (TWO_A_MINUTE, THREE_AN_HOUR)])
def test_a_timeout_waits_zero_refuses_and_none_waits_as_long_as_it_takes(limits: tuple[Limit, ...]) -> None:
    threads = Decorated("sync")
    calls: list[int] = []

    def note() -> None:
        calls.append(threads.clock.now_ms())

    patient = threads.decorate(note, *limits, key=lambda: "x", timeout=300)
    endless = threads.decorate(note, *limits, key=lambda: "x", timeout=None)
    patient()
    endless()
    endless()
    assert calls[2] > calls[1]
    hasty = threads.decorate(lambda: calls.append(0), *limits, key=lambda: "x", timeout=0.001)
    with pytest.raises(LimitExceeded):
        hasty()
    assert 0 not in calls


@on_virtual_time
async def test_a_timeout_of_a_task_waits_on_the_event_loop() -> None:
    limiter = make_async_limiter(clock=virtual_clock())
    loop = asyncio.get_running_loop()

    @limiter.limited(TWO_A_MINUTE, THREE_AN_HOUR, timeout=300)
    async def work() -> float:
        return loop.time()

    assert await work() == await work() < await work()
    with pytest.raises(LimitExceeded):
        await work()


# -- what is refused when a function is decorated


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


async def coroutine_function() -> None: ...


def plain_function() -> None: ...


class AsyncCallable:
    async def __call__(self) -> None: ...


class PlainCallable:
    def __call__(self) -> None: ...


NEITHER = [
    generator,
    async_generator,
    functools.partial(async_generator),
    dict,
    functools.partial(dict),
    5,
    None,
]
COROUTINE_FUNCTIONS = [
    coroutine_function,
    functools.partial(functools.partial(coroutine_function)),
    AsyncCallable(),
    AsyncCallable().__call__,
]
PLAIN_FUNCTIONS = [plain_function, functools.partial(plain_function), PlainCallable(), len, "".join]


@pytest.mark.parametrize("function", NEITHER)
def test_generators_classes_and_other_objects_are_refused(decorated: Decorated, function: Any) -> None:
    with pytest.raises(TypeError, match="limited: "):
        decorated.limiter.limited(TWO_A_MINUTE)(function)


def test_a_class_method_is_decorated_below_its_classmethod(decorated: Decorated) -> None:
    with pytest.raises(TypeError, match="put @classmethod above"):
        decorated.limiter.limited(TWO_A_MINUTE)(classmethod(plain_function))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS)
def test_a_limiter_for_threads_refuses_a_coroutine_function(function: Any) -> None:
    with pytest.raises(TypeError, match="decorate it with an AsyncLimiter"):
        Limiter().limited(TWO_A_MINUTE)(function)
    AsyncLimiter().limited(TWO_A_MINUTE)(function)


@pytest.mark.parametrize("function", PLAIN_FUNCTIONS)
def test_a_limiter_for_tasks_refuses_a_plain_function_before_it_counts_or_runs_it(function: Any) -> None:
    limiter = AsyncLimiter()
    with pytest.raises(TypeError, match="decorate it with a Limiter"):
        limiter.limited(TWO_A_MINUTE)(function)
    assert limiter.statistics().allowed == 0
    Limiter().limited(TWO_A_MINUTE)(function)


@pytest.mark.parametrize(
    ("field", "limits", "options"),
    [
        ("limits", (), {}),
        ("limits", ("2/minute",), {}),
        ("limits", (plain_function,), {}),
        ("key", (TWO_A_MINUTE,), {"key": "user"}),
        ("cost", (TWO_A_MINUTE,), {"cost": -1}),
        ("cost", (TWO_A_MINUTE,), {"cost": True}),
        ("cost", (TWO_A_MINUTE,), {"cost": None}),
        ("timeout", (TWO_A_MINUTE,), {"timeout": -1}),
        ("timeout", (TWO_A_MINUTE,), {"timeout": "1"}),
        ("timeout", (TWO_A_MINUTE,), {"timeout": float("nan")}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_before_anything_is_decorated(
    decorated: Decorated, field: str, limits: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        decorated.limiter.limited(*limits, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("identifier", [None, 5, "", "x" * 513, b"x"])
def test_a_key_that_returns_no_identifier_is_refused_by_name(decorated: Decorated, identifier: Any) -> None:
    ran: list[int] = []
    work = decorated.decorate(lambda: ran.append(1), TWO_A_MINUTE, key=lambda: identifier)
    with pytest.raises(InvalidInput) as caught:
        work()
    assert (caught.value.field, caught.value.value) == ("key", identifier)
    assert "returns the identifier" in str(caught.value)
    assert not ran


@pytest.mark.parametrize("cost", [None, "1", -1, 1.5, True])
@pytest.mark.parametrize("limits", [(TWO_A_MINUTE,), (TWO_A_MINUTE, THREE_AN_HOUR)])
def test_a_cost_function_that_returns_no_cost_is_refused_by_name(
    decorated: Decorated, cost: Any, limits: tuple[Limit, ...]
) -> None:
    work = decorated.decorate(lambda: None, *limits, cost=lambda: cost)
    with pytest.raises(TidegateError) as caught:
        work()
    assert isinstance(caught.value, InvalidInput)
    assert caught.value.field == "cost"
    assert decorated.limiter.statistics().allowed == 0
