from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.world import on_virtual_time
from tidegate.adapters.backoff import Backoff
from tidegate.runtime.loops import Metronome, wait_for_event


@given(seed=st.integers(), start_s=st.floats(0, 1e6), delays_s=st.lists(st.floats(0, 30), max_size=50))
def test_ticks_never_drift_however_slow_the_cycles_are(
    seed: int, start_s: float, delays_s: list[float]
) -> None:
    metronome = Metronome(5.0, 20, Random(seed), start_s)
    now_s = start_s
    anchors = []
    for delay_s in delays_s:
        tick_s = metronome.next_s(now_s)
        # The target is on the grid, plus or minus a tenth of the interval, and not in the past.
        anchors.append(metronome._anchor_s)
        assert abs(tick_s - anchors[-1]) <= 0.5 + 1e-9
        assert anchors[-1] > now_s
        now_s = max(now_s, tick_s) + delay_s
    for anchor_s in anchors:
        steps = (anchor_s - anchors[0]) / 5.0
        assert abs(steps - round(steps)) < 1e-4


def test_the_first_tick_is_drawn_from_a_whole_interval_so_that_nodes_do_not_tick_together() -> None:
    firsts = [Metronome(5.0, 20, Random(seed), 0.0).next_s(0.0) for seed in range(200)]
    assert min(firsts) < 1.0
    assert max(firsts) > 4.0


def test_each_cycle_has_a_jitter_of_its_own() -> None:
    metronome = Metronome(5.0, 20, Random(7), 0.0)
    now_s = 0.0
    gaps = set()
    for _ in range(20):
        tick_s = metronome.next_s(now_s)
        gaps.add(round(tick_s - now_s, 6))
        now_s = tick_s
    assert len(gaps) > 15


@given(seed=st.integers(), failures=st.integers(1, 60))
def test_backoff_doubles_up_to_its_ceiling_with_jitter_and_forgets_after_a_success(
    seed: int, failures: int
) -> None:
    backoff = Backoff(0.1, 5.0, Random(seed))
    for failure in range(failures):
        ceiling_s = min(5.0, 0.1 * 2**failure)
        assert ceiling_s / 2 <= backoff.pause_s() <= ceiling_s
    backoff.succeeded()
    assert backoff.pause_s() <= 0.1


@on_virtual_time
async def test_waiting_for_an_event_ends_with_the_event_or_with_the_time() -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    assert not await wait_for_event(event, 2.0)
    assert loop.time() == 2.0
    assert not await wait_for_event(event, -1.0)
    loop.call_later(1.0, event.set)
    assert await wait_for_event(event, 5.0)
    assert loop.time() == 3.0
    assert await wait_for_event(event, 0.0), "already set"
