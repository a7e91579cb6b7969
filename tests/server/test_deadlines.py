from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.server.schedule import Wheel


class Item:
    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.expires = 0
        self.scheduled = 0
        self.fired: list[int] = []

    def on_deadline(self) -> None:
        self.fired.append(self.wheel.now)


def run(wheel: Wheel, ticks: int) -> None:
    for _ in range(ticks):
        wheel.run_once()


def test_a_deadline_fires_once_at_its_tick() -> None:
    wheel = Wheel(0.25)
    item = Item(wheel)
    wheel.watch(item, 3)
    run(wheel, 2)
    assert item.fired == []
    run(wheel, 10)
    assert item.fired == [4]
    assert len(wheel) == 0


def test_a_deadline_that_is_moved_by_assignment_fires_at_the_later_tick() -> None:
    wheel = Wheel(0.25)
    item = Item(wheel)
    wheel.watch(item, 3)
    item.expires = wheel.now + 8
    run(wheel, 7)
    assert item.fired == []
    run(wheel, 1)
    assert item.fired == [9]


def test_what_is_forgotten_is_neither_fired_nor_held() -> None:
    wheel = Wheel(0.25)
    item = Item(wheel)
    wheel.watch(item, 3)
    wheel.forget(item)
    assert len(wheel) == 0
    run(wheel, 10)
    assert item.fired == []


def test_seconds_become_enough_ticks() -> None:
    wheel = Wheel(0.25)
    assert [wheel.ticks(seconds) for seconds in (0.1, 0.25, 0.26, 1.0)] == [2, 2, 3, 5]


@given(st.lists(st.tuples(st.sampled_from(["watch", "move", "clear", "forget", "tick"]), st.integers(1, 9))))
def test_it_fires_exactly_when_the_latest_deadline_is_reached(steps: list[tuple[str, int]]) -> None:
    wheel = Wheel(1.0)
    item = Item(wheel)
    expected: list[int] = []
    due: int | None = None
    for step, number in steps:
        if step == "watch":
            wheel.watch(item, number)
            due = wheel.now + number
        elif step == "move" and due is not None:
            item.expires = max(item.expires, wheel.now + number)
            due = item.expires
        elif step == "clear":
            item.expires = 0
            due = None
        elif step == "forget":
            wheel.forget(item)
            due = None
        else:
            for _ in range(number):
                wheel.run_once()
                if due == wheel.now:
                    expected.append(due)
                    due = None
        if due is None:
            item.expires = 0
    assert item.fired == expected
    assert len(wheel) <= 1
