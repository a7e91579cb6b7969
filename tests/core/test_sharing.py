from __future__ import annotations

from tidegate.core.sharing import DUE, NOT_DUE, PRESSED, Mark

LIFE_MS = 2_000
PACE_MS = 100
NOW_MS = 1_000_000


class Marked:
    """One cell's mark, and the clock."""

    def __init__(self) -> None:
        self.mark = Mark()
        self.now_ms = NOW_MS

    def due(self, total: int, owner: str, *, after_ms: int = 0, step: int = 10) -> int:
        self.now_ms += after_ms
        return self.mark.assign(total, step, owner, self.now_ms, LIFE_MS, PACE_MS)


def test_growth_within_the_pace_is_left_to_the_node_that_publishes() -> None:
    cell = Marked()
    assert cell.due(50, "a") == PRESSED
    assert cell.due(60, "b", after_ms=PACE_MS - 1) == NOT_DUE
    assert cell.due(60, "b", after_ms=1) == PRESSED
    # Every step that the publisher itself reports begins its time again.
    assert cell.due(70, "b", after_ms=PACE_MS - 1) == PRESSED
    assert cell.due(80, "a", after_ms=PACE_MS - 1) == NOT_DUE


def test_what_comes_after_a_publish_within_the_pace_waits_for_a_tick_and_has_a_publisher() -> None:
    cell = Marked()
    assert cell.due(50, "a") == PRESSED
    cell.mark.published = 50
    assert cell.due(50, "a", after_ms=5) == NOT_DUE
    assert cell.due(65, "b", after_ms=5) == DUE
    assert cell.due(66, "a", after_ms=5) == NOT_DUE
    assert cell.due(66, "b", after_ms=5) == DUE
    # The publisher of before, after its publish: at once.
    cell.mark.published = 66
    assert cell.due(76, "b", after_ms=5) == PRESSED


def test_a_publisher_that_is_silent_is_replaced_when_its_time_is_over() -> None:
    cell = Marked()
    assert cell.due(50, "a") == PRESSED
    assert cell.due(51, "b", after_ms=LIFE_MS - 1) == NOT_DUE
    assert cell.due(51, "b", after_ms=1, step=0) == PRESSED


def test_a_mark_from_before_the_clock_was_set_back_delays_no_node() -> None:
    cell = Marked()
    assert cell.due(50, "a") == PRESSED
    assert cell.due(60, "b", after_ms=-10) == PRESSED
