"""The figures of the embedded limiter: decisions against peers, large tables, memory, pauses, threads, import.

Everything except the threads runs on one core, in one process; the interpreted core runs in a second process, which
this one starts. Compared figures are measured in turns, every other round in reverse order, and shown as median and
range. Times are CPU time of this thread: other programs do not count, pauses of Tidegate do.
"""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import os
import random
import subprocess
import sys
import threading
import time
from asyncio import Handle
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import tidegate
from bench.turns import Figures, in_turns
from tidegate import Limit, Limiter, Tuning
from tidegate.testing import ManualClock, RedisServer, make_async_limiter, make_limiter

IDENTIFIERS = [f"user_{i}" for i in range(1_000)]
QUOTA = 10**9
NOW_MS = 1_800_000_000_000
ROUNDS = 9
CALLS = 20_000
# For a peer that has a fortieth of Tidegate's speed.
PEER_CALLS = 2_000
ACCESSES = 100_000
SUBJECTS = 1_000_000
EXPIRING = 50_000

Decide = Callable[[Limit, str], Any]

PEERS = ("limits", "throttled-py", "pyrate-limiter", "token-bucket")


def ns_per_call(decide: Decide, limit: Limit, identifiers: Sequence[str]) -> float:
    """CPU nanoseconds of one call, without a function of the benchmark in between."""
    started = time.thread_time_ns()
    for identifier in identifiers:
        decide(limit, identifier)
    return (time.thread_time_ns() - started) / len(identifiers)


def ns_per_look_up(table: dict[str, int], identifiers: Sequence[str]) -> float:
    """The same of `dict.get`."""
    get = table.get
    started = time.thread_time_ns()
    for identifier in identifiers:
        get(identifier)
    return (time.thread_time_ns() - started) / len(identifiers)


def rounds_of(measures: Mapping[str, Callable[[], float]]) -> dict[str, Figures]:
    """Run each once per round, after one round that is not counted."""
    found = {name: Figures() for name in measures}
    for measure in measures.values():
        measure()
    for name in in_turns(measures, ROUNDS):
        found[name].append(measures[name]())
    return found


def laps(identifiers: Iterable[str], calls: int) -> list[str]:
    return list(islice(cycle(identifiers), calls))


def peers() -> dict[str, tuple[str, Decide]]:
    """name -> (algorithm, one accepted decision), of those that are installed."""
    found: dict[str, tuple[str, Decide]] = {}
    if find_spec("limits"):
        from limits import RateLimitItemPerHour, storage, strategies

        sliding = strategies.SlidingWindowCounterRateLimiter(storage.MemoryStorage())
        item = RateLimitItemPerHour(QUOTA)
        found["limits"] = ("sliding window", lambda _, identifier: sliding.hit(item, identifier))
    if find_spec("throttled"):
        from throttled import MemoryStore, Throttled, per_hour

        throttled = Throttled(using="sliding_window", quota=per_hour(QUOTA), store=MemoryStore())
        found["throttled-py"] = ("sliding window", lambda _, identifier: throttled.limit(identifier))
    if find_spec("pyrate_limiter"):
        from pyrate_limiter import Duration, InMemoryBucket, Rate
        from pyrate_limiter import Limiter as PyrateLimiter

        pyrate = PyrateLimiter(InMemoryBucket([Rate(QUOTA, Duration.HOUR)]))
        found["pyrate-limiter"] = ("sliding log", lambda _, identifier: pyrate.try_acquire(identifier))
    if find_spec("token_bucket"):
        import token_bucket

        bucket = token_bucket.Limiter(1e9, QUOTA, token_bucket.MemoryStorage())
        found["token-bucket"] = ("token bucket", lambda _, identifier: bucket.consume(identifier))
    return found


PLENTY = Limit(QUOTA, duration_ms=3_600_000, namespace="accepted")
NOTHING_LEFT = Limit(1, duration_ms=3_600_000, namespace="denied")


def decision_figures(others: Mapping[str, Decide] | None = None) -> dict[str, Figures]:
    """CPU nanoseconds of an accepted and of a denied `limiter.limit`, and of peers, in turns."""
    limit = Limiter().limit
    many, few = laps(IDENTIFIERS, CALLS), laps(IDENTIFIERS, PEER_CALLS)
    measures: dict[str, Callable[[], float]] = {
        "accepted": lambda: ns_per_call(limit, PLENTY, many),
        "denied": lambda: ns_per_call(limit, NOTHING_LEFT, many),
    }
    for name, decide in (others or {}).items():
        measures[name] = lambda decide=decide: ns_per_call(decide, PLENTY, few)  # type: ignore[misc] # the default binds it
    return rounds_of(measures)


class Threads(NamedTuple):
    """Calls of two threads divided by those of one."""

    rate: Figures
    """Decisions per second of real time, which other programs affect."""
    decisions: Figures
    """Decisions per second of CPU time."""
    nothing: Figures
    """The same of a C function that does nothing: what two threads of this interpreter can reach."""


def thread_figures() -> Threads:
    """One limiter, the same identifiers in both threads."""
    limit = Limiter().limit
    each = laps(IDENTIFIERS, 200_000)

    def rate(call: Decide, threads: int, clock: Callable[[], float]) -> float:
        def work() -> None:
            for identifier in each:
                call(PLENTY, identifier)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        started = clock()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return threads * len(each) / (clock() - started)

    def two_by_one(call: Decide, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: rate(call, 2, clock) / rate(call, 1, clock)

    found = rounds_of(
        {
            "rate": two_by_one(limit, time.perf_counter),
            "decisions": two_by_one(limit, time.process_time),
            "nothing": two_by_one(operator.is_, time.process_time),
        }
    )
    return Threads(found["rate"], found["decisions"], found["nothing"])


def import_figures() -> Figures:
    """CPU milliseconds of `import tidegate` in a new process, without those of the interpreter."""

    def ms(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        spent_s = after.children_user + after.children_system - before.children_user - before.children_system
        return 1_000 * spent_s

    found = rounds_of({"bare": lambda: ms("pass"), "ours": lambda: ms("import tidegate")})
    bare = found["bare"].middle
    return Figures(ours - bare for ours in found["ours"])


class Access(NamedTuple):
    """Time of random access to a million subjects, divided by that to a thousand."""

    decisions: Figures
    plain: Figures
    """The same for a dict with the same keys: the effect of this machine's caches on any table."""
    added: Figures
    """What a million subjects add to a decision, divided by what they add to a look-up in the dict."""
    bytes_per_subject: float


def access_figures() -> Access:
    """Large tables, whose subjects are not in a cache of the processor."""
    small, large = Limiter(), Limiter()
    for identifier in IDENTIFIERS:
        small.limit(PLENTY, identifier)
    gc.collect()
    before = resident_bytes()
    for number in range(SUBJECTS):
        large.limit(PLENTY, f"subject_{number:07d}")
    bytes_per_subject = (resident_bytes() - before) / SUBJECTS
    few: dict[str, int] = {identifier: number for number, identifier in enumerate(IDENTIFIERS)}
    many: dict[str, int] = {f"subject_{number:07d}": number for number in range(SUBJECTS)}
    draw = random.Random(1)
    of_small = draw.choices(IDENTIFIERS, k=ACCESSES)
    of_large = [f"subject_{draw.randrange(SUBJECTS):07d}" for _ in range(ACCESSES)]
    # Once before the rounds, because the first access in a second also marks the subject as used.
    ns = rounds_of(
        {
            "small": lambda: ns_per_call(small.limit, PLENTY, of_small),
            "large": lambda: ns_per_call(large.limit, PLENTY, of_large),
            "few": lambda: ns_per_look_up(few, of_small),
            "many": lambda: ns_per_look_up(many, of_large),
        }
    )
    return Access(
        ns["large"].over(ns["small"]),
        ns["many"].over(ns["few"]),
        ns["large"].minus(ns["small"]).over(ns["many"].minus(ns["few"])),
        bytes_per_subject,
    )


def pause_figures() -> dict[str, float]:
    """The longest call, in CPU microseconds, while a full table evicts and while all of it expires."""
    clock = ManualClock(NOW_MS)
    limiter = make_limiter(clock=clock)
    per_minute = Limit(QUOTA, duration_ms=60_000, namespace="bench")

    def longest_us(prefix: str, calls: int) -> float:
        longest = 0
        for number in range(calls):
            started = time.thread_time_ns()
            limiter.limit(per_minute, f"{prefix}_{number:07d}")
            longest = max(longest, time.thread_time_ns() - started)
        return longest / 1_000

    longest_us("subject", SUBJECTS)
    evicting_us = longest_us("evicting", 300_000)
    clock.advance(400_000)
    expiring_us = longest_us("expiring", 300_000)
    statistics = limiter.statistics()
    return {
        "evicting": evicting_us,
        "expiring": expiring_us,
        "evicted": float(sum(statistics.subjects_evicted.values())),
        "expired": float(statistics.subjects_expired),
    }


async def longest_hold_ms(url: str) -> tuple[float, int]:
    """The longest hold of the event loop, in CPU milliseconds, while subjects of a limiter with Redis expire; and how
    many did. The garbage collector is part of it, and other subjects are in use meanwhile."""
    clock = ManualClock(NOW_MS)
    per_minute = Limit(QUOTA, duration_ms=60_000, namespace="bench")
    longest_ns = 0
    run = Handle._run  # noqa: SLF001 - every callback of an event loop passes through it

    def run_and_measure(handle: Handle) -> None:
        nonlocal longest_ns
        started = time.thread_time_ns()
        run(handle)
        longest_ns = max(longest_ns, time.thread_time_ns() - started)

    async with make_async_limiter(clock=clock, region="bench", origin=url) as limiter:
        for start in range(0, EXPIRING, 100):
            names = [f"subject_{number:05d}" for number in range(start, start + 100)]
            await asyncio.gather(*(limiter.limit(per_minute, name) for name in names))
        while limiter.statistics().origin_dirty_subjects:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
        clock.advance(400_000)
        setattr(Handle, "_run", run_and_measure)  # noqa: B010 - a plain assignment is refused by the type checker
        try:
            deadline_s = time.monotonic() + 60
            while limiter.statistics().subjects_expired < EXPIRING and time.monotonic() < deadline_s:
                for identifier in IDENTIFIERS[:10]:
                    limiter.limit_nowait(per_minute, identifier)
                await asyncio.sleep(0.001)
        finally:
            setattr(Handle, "_run", run)  # noqa: B010 - the same
        return longest_ns / 1_000_000, limiter.statistics().subjects_expired


def hold_figures() -> tuple[Figures, int]:
    """`longest_hold_ms` as in the server, where the garbage collector ignores the objects created at the start."""
    gc.collect()
    gc.freeze()
    with RedisServer() as server:
        found = [asyncio.run(longest_hold_ms(server.url)) for _ in range(3)]
    gc.unfreeze()
    return Figures(ms for ms, _ in found), min(expired for _, expired in found)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def interpreted() -> dict[str, Figures]:
    """`decision_figures` of the same source uncompiled, in a process of its own."""
    source = Path(__file__).parent.parent / "src"
    code = "import json, bench.engine as e; print(json.dumps([e.tidegate.compiled, e.decision_figures()]))"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{source.parent}"}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    is_compiled, figures = json.loads(output)
    if is_compiled:
        raise SystemExit("the interpreted run was compiled: build outside of the source tree")
    return {name: Figures(each) for name, each in figures.items()}


def main() -> None:
    """Measure and print."""
    if not tidegate.compiled:
        raise SystemExit("install the compiled package first: make bench does")
    everywhere = os.sched_getaffinity(0)
    one_core = {max(everywhere)}
    os.sched_setaffinity(0, one_core)
    found = peers()
    ours = decision_figures({name: decide for name, (_, decide) in found.items()})
    plain = interpreted()
    accepted, denied = ours["accepted"], ours["denied"]

    print(f"Medians of {ROUNDS} rounds (and range).")
    for name in PEERS:
        print(
            f"- {name}: {'runs' if name in found else 'not run, it is not installed: make bench installs it'}"
        )
    print()
    print("| one accepted decision | algorithm | ns | compiled Tidegate is | interpreted Tidegate is |")
    print("|---|---|---|---|---|")
    print(f"| **Tidegate, compiled** | two-cell sliding window | {accepted.shown()} | | |")
    print(f"| **Tidegate, interpreted** | the same source | {plain['accepted'].shown()} | | |")
    for name in sorted(found, key=lambda name: ours[name].middle):
        faster = ours[name].over(accepted).shown(1)
        plainly = ours[name].middle / plain["accepted"].middle
        print(f"| {name} | {found[name][0]} | {ours[name].shown()} | {faster} × as fast | {plainly:.1f} × |")
    print()
    print(f"- denied / accepted: compiled {denied.over(accepted).shown(2)}, ", end="")
    print(f"interpreted {plain['denied'].over(plain['accepted']).shown(2)}")
    print(f"- CPU of `import tidegate`: {import_figures().shown()} ms")
    os.sched_setaffinity(0, everywhere)
    threads = thread_figures()
    print(f"- decisions of two threads / of one: {threads.rate.shown(2)}")
    print(f"- the same per second of CPU: {threads.decisions.shown(2)}")
    print(f"- the same of a C function that does nothing: {threads.nothing.shown(2)}")
    os.sched_setaffinity(0, one_core)
    access = access_figures()
    print(f"- random access to {SUBJECTS:,} subjects / to 1,000: {access.decisions.shown(2)}")
    print(f"- the same of a plain dict with the same keys: {access.plain.shown(2)}")
    print(f"- what {SUBJECTS:,} add to a decision / to a look-up in the dict: {access.added.shown(2)}")
    print(f"- bytes per subject at {SUBJECTS:,}, identifier text included: {access.bytes_per_subject:.0f}")
    pauses = pause_figures()
    print(f"- longest call while evicting ({pauses['evicted']:,.0f} evicted): {pauses['evicting']:.0f} us")
    print(f"- longest call while expiring ({pauses['expired']:,.0f} expired): {pauses['expiring']:.0f} us")
    holds, expired = hold_figures()
    print(f"- longest hold of the event loop, {expired:,} expire, with Redis: {holds.shown(1)} ms")
    print(f"- the default bound is {Tuning().subjects_max:,} subjects")
