"""A known request of an embedded limiter is decided in one step, without a lock, where that is safe.

It is safe if nothing between check and commit can give up the GIL or run Python code: then no thread, signal handler,
finalizer or garbage collection can come between them. The first test proves it of the compiled code: it generates the C
source of the core and follows every call of `Engine.decide_known`.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from itertools import takewhile
from pathlib import Path
from typing import Final, NoReturn

import pytest

import tidegate
from tidegate.core.engine import Engine
from tidegate.core.gate import Gate
from tidegate.core.model import Decision, Limit, Tuning
from tidegate.runtime import environment
from tidegate.runtime.environment import decides_in_one_step

ROOT = Path(__file__).parent.parent.parent
NOW_MS = 1_700_000_000_000
LIMIT = Limit(5, duration_ms=60_000, namespace="default")

# The functions outside the compiled core that the compiled step may call, and why each runs no Python code. CPyTagged_…
# are sums and comparisons of integers.
HARMLESS: Final = {
    "CPyDict_GetWithNone": "a plain dict, whose keys are plain strings, or tuples of plain strings and an int",
    "CPyList_GetItemInt64": "a plain list and an int",
    "CPyObject_Hash": "of a plain str",
    "CPyLong_AsInt64": "of a hash, which is a plain int",
    "CPy_INCREF": "counts",
    "CPy_DECREF": "everything that it counts down is held by a table, a limit or the caller as well",
    "CPy_DecRef": "the same",
    "CPy_INCREF_NO_IMM": "the same from Python 3.12 on, for objects that are never immortal",
    "CPy_DECREF_NO_IMM": "the same from Python 3.12 on, for objects that are never immortal",
    "CPy_AddTraceback": "after an error only",
    "CPy_TypeErrorTraceback": "after an error only",
    "PyDict_Check": "a comparison",
    "PyErr_Occurred": "a field",
    "Py_TYPE": "a field",
    "Py_DECREF": "after an error only",
    "Py_SET_REFCNT": "a field",
    "tp_alloc": "of a Decision, which the garbage collector does not follow: a test below",
}
C_KEYWORDS: Final = {"if", "likely", "unlikely", "return", "sizeof"}
# The first line of a compiled function: its indentation and its name.
HEAD: Final = re.compile(r"( *)(?:static )?\w[\w ]*[ *](CPyDef_\w+)\([^;=]*\)(?: \{)?")
CALL: Final = re.compile(r"\b([A-Za-z_]\w*)\(")
TEXT: Final = re.compile(r'"(?:\\.|[^"\\])*"')

GENERATE: Final = """
import sys
from pathlib import Path
from mypyc.build import mypycify

target, core = sys.argv[1:]
modules = sorted(str(path) for path in Path(core).glob("*.py") if path.name != "_native.py")
options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={target}/cache"]
mypycify([*options, *modules], debug_level="0", group_name="tidegate_core", target_dir=target)
"""


def c_source(directory: Path, core: Path) -> str:
    """The C source of a core, as the build generates it."""
    subprocess.run(
        [sys.executable, "-c", GENERATE, str(directory), str(core)],
        cwd=core.parent.parent.parent,
        check=True,
        capture_output=True,
    )
    return (directory / "__native_tidegate_core.c").read_text()


def functions_in(source: str) -> dict[str, str]:
    """The bodies of the functions that the core was compiled to, by name."""
    bodies: dict[str, str] = {}
    lines = iter(source.splitlines())
    for line in lines:
        head = HEAD.fullmatch(line)
        if head is not None:
            end = head[1] + "}"
            bodies[head[2]] = TEXT.sub("", "\n".join(takewhile(lambda each: each != end, lines)))  # noqa: B023 - used at once
    return bodies


def calls_of(source: str, function: str) -> set[str]:
    """What a function calls outside the compiled core, directly or not."""
    bodies = functions_in(source)
    outside: set[str] = set()
    seen: set[str] = set()
    ahead = [function]
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        for called in set(CALL.findall(bodies[name])) - C_KEYWORDS:
            if called.startswith("CPyDef_"):
                ahead.append(called)
            else:
                outside.add(called)
    return outside


def harmful(calls: set[str]) -> set[str]:
    return {call for call in calls if call not in HARMLESS and not call.startswith("CPyTagged_")}


STEP: Final = "CPyDef_engine___Engine___decide_known"


@pytest.mark.slow
def test_the_compiled_step_calls_nothing_that_gives_up_the_gil_or_runs_python_code(tmp_path: Path) -> None:
    pytest.importorskip("mypyc", reason="the C source cannot be generated without mypy")
    calls = calls_of(c_source(tmp_path, ROOT / "src/tidegate/core"), STEP)
    assert "CPyDict_GetWithNone" in calls
    assert harmful(calls) == set()


@pytest.mark.slow
def test_a_step_that_calls_back_is_found(tmp_path: Path) -> None:
    pytest.importorskip("mypyc", reason="the C source cannot be generated without mypy")
    core = tmp_path / "src/tidegate/core"
    core.mkdir(parents=True)
    for file in (ROOT / "src/tidegate").glob("*.py"):
        (core.parent / file.name).write_text("" if file.name == "__init__.py" else file.read_text())
    for file in (ROOT / "src/tidegate/core").glob("*.py"):
        (core / file.name).write_text(file.read_text())
    engine = (core / "engine.py").read_text()
    broken = engine.replace(
        "        strict_until_ms = now_ms + duration_ms\n        room",
        "        print()\n        strict_until_ms = now_ms + duration_ms\n        room",
    )
    assert broken != engine
    (core / "engine.py").write_text(broken)
    assert harmful(calls_of(c_source(tmp_path, core), STEP)) != set()


@pytest.mark.skipif(not tidegate.compiled, reason="interpreted objects are all followed")
def test_the_garbage_collector_does_not_follow_a_compiled_decision() -> None:
    # An object that it follows could start a collection when it is allocated, and that runs finalizers.
    decision = Engine(Tuning(), node_id="n1").decide(LIMIT, "a", 1, NOW_MS)
    assert isinstance(decision, Decision)
    assert not gc.is_tracked(decision)


class CountingLock:
    """A lock that counts how often it was taken."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.RLock()

    def acquire(self) -> bool:
        self.taken += 1
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


class Name(str):
    """A str whose hash is Python code."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def never(*_arguments: object) -> NoReturn:
    raise AssertionError("nothing needs to be read")


def counted(lock: CountingLock, *, is_one_step: bool, has_origin: bool = False) -> Gate:
    engine = Engine(Tuning(), node_id="n1", has_origin=has_origin)
    return Gate(
        engine,
        lambda: NOW_MS * 1_000_000,
        lambda: None,
        never,
        lock.acquire,
        lock.release,
        is_one_step=is_one_step,
    )


def test_a_known_request_takes_no_lock_and_every_other_one_does() -> None:
    lock = CountingLock()
    gate = counted(lock, is_one_step=True)
    assert gate.limit(LIMIT, "a").remaining == 4
    assert lock.taken == 1  # it was new
    assert [gate.limit(LIMIT, "a").remaining for _ in range(4)] == [3, 2, 1, 0]
    assert lock.taken == 1
    assert not gate.limit(LIMIT, "a")
    assert lock.taken == 2  # its first denial moves it to another queue
    assert not gate.limit(LIMIT, "a")
    assert not gate.limit(LIMIT, "a")
    assert lock.taken == 2
    gate.limit(LIMIT, Name("a"))
    assert lock.taken == 3  # looking it up runs Python code
    gate.limit(LIMIT, "a", 6)
    assert lock.taken == 4  # never fits
    gate.limit(LIMIT, "a", now_ms=NOW_MS + 60_000)
    assert lock.taken == 5  # another cell


def test_without_the_proof_every_request_takes_the_lock() -> None:
    lock = CountingLock()
    gate = counted(lock, is_one_step=False)
    for _ in range(3):
        gate.limit(LIMIT, "a")
    assert lock.taken == 3


@pytest.mark.parametrize("is_one_step", [True, False])
def test_the_step_without_a_lock_gives_the_same_answers(is_one_step: bool) -> None:
    gate = counted(CountingLock(), is_one_step=is_one_step)
    answers = [
        gate.limit(LIMIT, "a", cost, now_ms=NOW_MS + at_ms)
        for cost in (1, 3, 2, 1, 0, 2, 9)
        for at_ms in (0, 1, 70_000)
    ]
    expected = Engine(Tuning(), node_id="n1", has_ledger=True)
    for answer, (cost, at_ms) in zip(
        answers, ((cost, at_ms) for cost in (1, 3, 2, 1, 0, 2, 9) for at_ms in (0, 1, 70_000)), strict=True
    ):
        plain = expected.decide(LIMIT, "a", cost, NOW_MS + at_ms)
        assert isinstance(plain, Decision)
        assert (answer.allowed, answer.remaining, answer.effective, answer.retry_after_ms) == (
            plain.allowed,
            plain.remaining,
            plain.effective,
            plain.retry_after_ms,
        )


def test_one_step_needs_compiled_code_and_a_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tidegate.compiled or decides_in_one_step() == getattr(sys, "_is_gil_enabled", lambda: True)()
    monkeypatch.setattr(environment, "is_compiled", lambda: True)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert decides_in_one_step()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False)
    assert not decides_in_one_step()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    monkeypatch.setattr(environment, "is_compiled", lambda: False)
    assert not decides_in_one_step()
