"""A circuit breaker on failure rate: a dependency that mostly fails is not called for a while.

Pure: time is an argument, in seconds of any monotonic clock. Closed, it counts calls in ten buckets and opens when
at least half of at least twenty in the window failed. Open, it refuses until its time is up, counted from the trip.
Then it admits a trial; trials are counted when admitted, so that other calls do not pass with the first one. A trial
that fails opens it again; one that succeeds closes it and clears the counts. Only a call that was admitted in the
present state counts: one from before the trip that ends later is not a trial.
"""

from __future__ import annotations

from typing import Final, Literal

from tidegate.core.model import Tuning

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half_open"]

BUCKETS: Final = 10


class Breaker:
    """One dependency's breaker."""

    def __init__(self, name: str, tuning: Tuning) -> None:
        self.name = name
        self._bucket_s = tuning.breaker_window_ms / 1000 / BUCKETS
        self._calls_min = tuning.breaker_calls_min
        self._failure_percent = tuning.breaker_failure_percent
        self._open_s = tuning.breaker_open_ms / 1000
        self._trials_max = tuning.breaker_trials
        # bucket number -> [calls, failures]; old ones are dropped when a new one begins.
        self._buckets: dict[int, list[int]] = {}
        # When it opened; None while closed.
        self._opened_at_s: float | None = None
        self._trials = 0
        # How often it has opened or closed, from 1. A call's ticket is the value at which it was admitted.
        self._era = 1
        self.trips: int = 0

    def state(self, now_s: float) -> BreakerState:
        if self._opened_at_s is None:
            return "closed"
        return "open" if now_s < self._opened_at_s + self._open_s else "half_open"

    def admit(self, now_s: float) -> int:
        """Whether a call may be made: 0 for no; otherwise a ticket, to be passed to `record` or `release` once."""
        state = self.state(now_s)
        if state == "closed":
            return self._era
        if state == "open" or self._trials >= self._trials_max:
            return 0
        self._trials += 1
        return self._era

    def release(self, ticket: int) -> None:
        """An admitted call was cancelled, which says nothing about the dependency."""
        if ticket == self._era and self._trials:
            self._trials -= 1

    def record(self, ticket: int, succeeded: bool, now_s: float) -> None:
        """How an admitted call went."""
        if ticket != self._era:
            return
        if self._opened_at_s is not None:
            if succeeded:
                self._turn(None)
            else:
                self._trip(now_s)
            return
        number = int(now_s / self._bucket_s)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets = {n: b for n, b in self._buckets.items() if n > number - BUCKETS}
            bucket = self._buckets[number] = [0, 0]
        bucket[0] += 1
        if succeeded:
            return
        bucket[1] += 1
        live = [b for n, b in self._buckets.items() if n > number - BUCKETS]
        calls = sum(b[0] for b in live)
        failures = sum(b[1] for b in live)
        if calls >= self._calls_min and failures * 100 >= calls * self._failure_percent:
            self._trip(now_s)

    def _trip(self, now_s: float) -> None:
        self.trips += 1
        self._turn(now_s)

    def _turn(self, opened_at_s: float | None) -> None:
        self._opened_at_s = opened_at_s
        self._era += 1
        self._trials = 0
        self._buckets.clear()
