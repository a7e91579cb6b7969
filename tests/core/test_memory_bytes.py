"""The bound on memory in bytes: the estimate holds for every kind of name, and long names evict earlier."""

from __future__ import annotations

import tracemalloc

import pytest

from tidegate.core.model import Tuning
from tidegate.core.subjects import Subjects

COUNT = 2_000
EPOCH_MS = 1_700_000_000_000


def filled(subjects: Subjects, kind: str, count: int) -> None:
    for number in range(count):
        identifier = f"{number:06}"
        key = ("workspace", "namespace", 60_000)
        if kind == "long":
            identifier += "x" * 506
        elif kind == "emoji":
            identifier += "\U0001f600" * 506
        elif kind == "tables":
            key = (f"{number:06}" + "w" * 506, "n" * 506 + f"{number:06}", 60_000)
        created = subjects.create(key, identifier, EPOCH_MS // 60_000, EPOCH_MS)
        subjects.make_room(EPOCH_MS, created)


@pytest.mark.parametrize("kind", ["short", "long", "emoji", "tables"])
def test_the_estimate_is_not_below_what_subjects_take(kind: str) -> None:
    subjects = Subjects(Tuning(), has_origin=True, has_ledger=True)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        filled(subjects, kind, COUNT)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    taken = after - before
    assert taken <= subjects.bytes * 1.1, (taken / COUNT, subjects.bytes / COUNT)


@pytest.mark.parametrize("kind", ["short", "long", "emoji", "tables"])
def test_the_bound_holds_whatever_the_names_are(kind: str) -> None:
    subjects = Subjects(Tuning(subjects_bytes_max=400_000), has_origin=False, has_ledger=False)
    filled(subjects, kind, COUNT)
    assert subjects.bytes <= 400_000
    assert 1 <= subjects.count < COUNT
    assert subjects.evicted_clean == COUNT - subjects.count


def test_what_is_dropped_is_given_back() -> None:
    subjects = Subjects(Tuning(subjects_max=1), has_origin=False, has_ledger=False)
    filled(subjects, "tables", 10)
    (left,) = [each for each in subjects.slots if each is not None]
    subjects.drop(left, EPOCH_MS)
    assert (subjects.count, subjects.bytes) == (0, 0)


def test_a_table_that_was_dropped_is_not_found_again() -> None:
    subjects = Subjects(Tuning(), has_origin=False, has_ledger=False)
    key = ("workspace", "namespace", 60_000)
    first = subjects.create(key, "user", EPOCH_MS // 60_000, EPOCH_MS)
    assert subjects.find(key, "user") is first
    subjects.drop(first, EPOCH_MS)
    assert subjects.find(key, "user") is None
    second = subjects.create(key, "user", EPOCH_MS // 60_000, EPOCH_MS)
    assert subjects.find(key, "user") is second


def test_room_is_made_at_once_for_all_subjects_that_were_created_before() -> None:
    subjects = Subjects(Tuning(subjects_max=1_000), has_origin=False, has_ledger=False)
    for number in range(20):
        subjects.create(("workspace", "namespace", 60_000), f"old{number}", EPOCH_MS // 60_000, EPOCH_MS)
    subjects.make_room(EPOCH_MS, None)
    aged_ms = EPOCH_MS + 600_000
    subjects.make_room(aged_ms, None)
    assert subjects.count == 20, "nothing was created, so nothing is done"
    for number in range(20):
        subjects.create(("workspace", "namespace", 60_000), f"new{number}", aged_ms // 60_000, aged_ms)
    subjects.make_room(aged_ms, None)
    assert (subjects.count, subjects.expired) == (20, 20)
