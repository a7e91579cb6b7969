from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate import Tuning
from tidegate.runtime.breaker import Breaker

TUNING = Tuning()  # 20 calls at least, half of them failed, in 10 s; open for 5 s; one trial
WINDOW_S = TUNING.breaker_window_ms / 1000
OPEN_S = TUNING.breaker_open_ms / 1000
MIN = TUNING.breaker_calls_min


def breaker() -> Breaker:
    return Breaker("test", TUNING)


def call(tested: Breaker, succeeded: bool, now_s: float) -> None:
    ticket = tested.admit(now_s)
    assert ticket
    tested.record(ticket, succeeded, now_s)


def tripped(at_s: float = 100.0) -> Breaker:
    tested = breaker()
    for _ in range(MIN):
        call(tested, False, at_s)
    assert tested.state(at_s) == "open"
    return tested


def test_nineteen_failures_do_not_open_it_and_twenty_do() -> None:
    tested = breaker()
    for _ in range(MIN - 1):
        call(tested, False, 1.0)
    assert tested.state(1.0) == "closed"
    call(tested, False, 1.0)
    assert tested.state(1.0) == "open"
    assert tested.trips == 1


def test_it_is_the_rate_that_opens_it_and_never_a_count() -> None:
    tested = breaker()
    for _ in range(2000):
        call(tested, True, 1.0)
        call(tested, True, 1.0)
        call(tested, False, 1.0)
    assert tested.state(1.0) == "closed"


def test_exactly_half_is_enough() -> None:
    tested = breaker()
    for _ in range(MIN // 2):
        call(tested, True, 1.0)
    for _ in range(MIN // 2):
        call(tested, False, 1.0)
    assert tested.state(1.0) == "open"


def test_calls_before_the_window_do_not_count() -> None:
    tested = breaker()
    for _ in range(MIN - 1):
        call(tested, False, 1.0)
    call(tested, False, 1.0 + WINDOW_S)
    assert tested.state(1.0 + WINDOW_S) == "closed"


def test_it_stays_open_for_its_time_counted_from_the_trip_whatever_is_asked_meanwhile() -> None:
    tested = tripped(100.0)
    for tenth in range(1, 50):
        assert not tested.admit(100.0 + tenth / 10)
    assert tested.state(100.0 + OPEN_S) == "half_open"
    assert tested.admit(100.0 + OPEN_S)


def test_only_one_call_is_admitted_as_the_trial() -> None:
    tested = tripped()
    assert tested.admit(100.0 + OPEN_S)
    assert not tested.admit(100.0 + OPEN_S)
    assert not tested.admit(100.0 + OPEN_S + 1)


def test_a_failed_trial_opens_it_again_for_the_full_time() -> None:
    tested = tripped()
    call(tested, False, 106.0)
    assert tested.state(106.0 + OPEN_S - 0.001) == "open"
    assert tested.state(106.0 + OPEN_S) == "half_open"
    assert tested.trips == 2


def test_a_trial_that_succeeds_closes_it_and_the_past_is_forgotten() -> None:
    tested = tripped()
    call(tested, True, 106.0)
    for _ in range(MIN - 1):
        call(tested, False, 106.0)
    assert tested.state(106.0) == "closed"


def test_after_an_abandoned_trial_the_next_one_is_admitted() -> None:
    tested = tripped()
    tested.release(tested.admit(106.0))
    assert tested.admit(106.0)


def test_a_call_from_before_the_trip_is_not_a_trial_however_late_it_ends() -> None:
    tested = breaker()
    slow = tested.admit(99.0)
    for _ in range(MIN):
        call(tested, False, 100.0)
    trial = tested.admit(106.0)
    tested.record(slow, True, 106.0)
    assert tested.state(106.0) == "half_open", "the slow call did not close it"
    tested.release(slow)
    assert not tested.admit(106.0), "and the trial is still reserved"
    tested.record(trial, False, 106.5)
    assert tested.state(106.5) == "open"


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against a model that keeps every call it has ever counted."""

    def __init__(self) -> None:
        super().__init__()
        self.tested = breaker()
        self.now_s = 1000.0
        self.era = 0
        self.opened_at_s: float | None = None
        self.counted: list[tuple[float, bool]] = []
        self.trials = 0
        self.flying: list[tuple[int, int]] = []  # ticket, era of the model

    def expected_state(self) -> str:
        if self.opened_at_s is None:
            return "closed"
        return "open" if self.now_s < self.opened_at_s + OPEN_S else "half_open"

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 2.5, 4.75, 5.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 12))
    def calls_begin(self, count: int) -> None:
        for _ in range(count):
            state = self.expected_state()
            allowed = state == "closed" or (state == "half_open" and self.trials == 0)
            ticket = self.tested.admit(self.now_s)
            assert bool(ticket) == allowed
            if allowed:
                self.trials += state == "half_open"
                self.flying.append((ticket, self.era))

    @precondition(lambda self: self.flying)
    @rule(succeeded=st.booleans(), count=st.integers(1, 12), newest=st.booleans())
    def calls_end(self, succeeded: bool, count: int, newest: bool) -> None:
        for _ in range(min(count, len(self.flying))):
            ticket, era = self.flying.pop(-1 if newest else 0)
            self.tested.record(ticket, succeeded, self.now_s)
            if era != self.era:
                continue
            if self.opened_at_s is not None:
                self.turn(None if succeeded else self.now_s)
                continue
            self.counted.append((self.now_s, succeeded))
            bucket = int(self.now_s / (WINDOW_S / 10))
            live = [ok for at_s, ok in self.counted if int(at_s / (WINDOW_S / 10)) > bucket - 10]
            if not succeeded and len(live) >= MIN and 2 * live.count(False) >= len(live):
                self.turn(self.now_s)

    @precondition(lambda self: self.flying)
    @rule()
    def a_call_is_given_up(self) -> None:
        ticket, era = self.flying.pop()
        self.tested.release(ticket)
        if era == self.era and self.opened_at_s is not None:
            self.trials -= 1

    def turn(self, opened_at_s: float | None) -> None:
        self.opened_at_s = opened_at_s
        self.era += 1
        self.trials = 0
        self.counted.clear()

    @invariant()
    def both_agree(self) -> None:
        assert self.tested.state(self.now_s) == self.expected_state()


TestBreakerMachine = BreakerMachine.TestCase
