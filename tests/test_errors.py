"""Errors cross processes: what a worker raises arrives whole."""

from __future__ import annotations

import inspect
import pickle

import pytest

from tidegate import Limit, LimitExceeded, errors
from tidegate.testing import ManualClock
from tidegate.testing.limiters import make_limiter


def denied() -> LimitExceeded:
    limiter = make_limiter(clock=ManualClock())
    return LimitExceeded("too much", [limiter.limit(Limit("1/minute", namespace="n"), "x", 2)])


ERRORS = [
    errors.InvalidInput("cost", -1, "at least 0"),
    errors.MissingExtra("redis", "redis://localhost"),
    errors.RegionMismatch("fra", "iad"),
    errors.TooManyReservations("acme"),
    errors.TooManyResets("acme"),
    denied(),
]


def test_every_error_with_a_constructor_of_its_own_is_tried() -> None:
    own = {
        each
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.TidegateError) and "__init__" in vars(each)
    }
    assert own == {type(each) for each in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_whole_in_another_process(error: errors.TidegateError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), repr(vars(again))) == (type(error), str(error), repr(vars(error)))
