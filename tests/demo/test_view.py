from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.demo.session import KEYS, Key, parse_script
from tidegate.demo.traffic import HOT, Tally
from tidegate.demo.view import NodePicture, Picture, log_line, screen
from tidegate.errors import InvalidInput

PICTURE = Picture(
    title="two nodes",
    at_s=12.3,
    nodes=(
        NodePicture("fra-1", "fra", "ok", "ok", 30.0, 10.0, 900),
        NodePicture("iad-1", "iad", "killed", "cut off", 20.0, 5.0, 850),
    ),
    hot="hot-2",
    hot_accepted=900,
    rounds=("hot-1, limit 600: 601 accepted; all nodes saw 601",),
    totals=(("hot", 900, 100), ("attacker", 10, 500), ("users", 700, 0)),
    failed=0,
    p99_ms=1.5,
    events=("  5.0 s  origin of iad killed",),
    addresses=("key: tg_x",),
)


def test_a_screen_shows_every_node_its_faults_and_what_it_believes() -> None:
    text = "\n".join(screen(PICTURE))
    for expected in (
        "fra-1",
        "iad-1",
        "killed",
        "cut off",
        "900 accepted",
        "nodes see 850 to 900",
        "hot-1, limit",
        "tg_x",
    ):
        assert expected in text


def test_the_bar_of_a_node_shows_its_part_of_the_limit_and_what_is_beyond() -> None:
    def bar(sees: int) -> str:
        picture = replace(PICTURE, nodes=(replace(PICTURE.nodes[0], sees=sees),))
        (line,) = [line for line in screen(picture) if "fra-1" in line]
        return line.split()[-1]

    assert bar(HOT.quota) == "█" * 24 and bar(0) == "·" * 24 and bar(HOT.quota // 2) == "█" * 12 + "·" * 12
    assert bar(HOT.quota * 5 // 4) == "█" * 24 + "▒" * 6 and len(bar(HOT.quota * 100)) == 48


def test_a_line_names_the_faults_or_says_that_all_nodes_agree() -> None:
    assert "iad database cut off, iad origin killed" in log_line(PICTURE)
    well = replace(PICTURE, nodes=tuple(replace(PICTURE.nodes[0], name=name) for name in ("a", "b")))
    assert "all 2 nodes see 900; all well" in log_line(well)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(KEYS)), min_size=1))
def test_a_script_gives_its_keys_in_the_order_of_time(keys: list[tuple[int, str]]) -> None:
    text = ", ".join(f"{key}@{at_s / 10}" for at_s, key in keys)
    assert parse_script(text) == sorted(Key(at_s / 10, key) for at_s, key in keys)


@pytest.mark.parametrize("word", ["", "k", "k@", "x@5", "k@-1", "k@5s", "@5", "kp@5", "k@1.2.3"])
def test_a_wrong_word_of_a_script_is_named(word: str) -> None:
    with pytest.raises(InvalidInput, match="script") as caught:
        parse_script(f"h@1,{word}")
    assert repr(word) in str(caught.value) and "k@5,h@10" in str(caught.value)


def test_a_tally_computes_the_sliding_window_of_the_hot_identifier() -> None:
    tally = Tally()
    end_ms = 2 * HOT.duration_ms
    for reset in (end_ms - HOT.duration_ms, end_ms, end_ms):
        tally.add("fra-1", HOT, "hot-1", {"success": True, "reset": reset}, 1.0)
    tally.add("fra-1", HOT, "hot-1", {"success": False, "reset": end_ms}, 1.0)
    tally.add("fra-1", HOT, "hot-1", None, 1.0)
    assert tally.hot_accepted("hot-1", end_ms - HOT.duration_ms) == 3
    assert tally.hot_accepted("hot-1", end_ms - 1) == 2
    assert tally.hot_accepted("hot-2", end_ms - 1) == 0
    total = tally.total()
    assert (total.allowed, total.denied, total.failed, total.decisions) == (3, 1, 1, 4)
