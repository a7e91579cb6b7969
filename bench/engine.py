"""The figures of the embedded limiter: decisions per second against peers, denials, large tables, memory, pauses.

Everything runs on one core in one process (the interpreted core in a second one, started by this), and every figure
is a ratio of two things measured in turns in the same run. Times are CPU time of this thread: other work on a shared
machine is not counted, a pause of ours is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tidegate
from tidegate import Limit, Limiter, Tuning

IDENTIFIERS = [f"user_{i}" for i in range(1_000)]
QUOTA = 10**9
NOW_MS = 1_800_000_000_000
ROUNDS = 15


def cpu_ns_per_call(call: Callable[[str], Any], calls: int) -> float:
    """The best of several rounds over all identifiers, in CPU nanoseconds per call."""
    for identifier in IDENTIFIERS:
        call(identifier)
    laps = max(1, calls // len(IDENTIFIERS) // ROUNDS)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        for _ in range(laps):
            for identifier in IDENTIFIERS:
                call(identifier)
        best = min(best, (time.thread_time_ns() - started) / laps / len(IDENTIFIERS))
    return best


def peers() -> dict[str, tuple[str, Callable[[str], Any]]]:
    """name -> (algorithm, one accepted decision)."""
    import token_bucket
    from limits import RateLimitItemPerHour, storage, strategies
    from pyrate_limiter import Duration, InMemoryBucket, Rate
    from pyrate_limiter import Limiter as PyrateLimiter
    from throttled import MemoryStore, Throttled, per_hour

    sliding = strategies.SlidingWindowCounterRateLimiter(storage.MemoryStorage())
    item = RateLimitItemPerHour(QUOTA)
    throttled = Throttled(using="sliding_window", quota=per_hour(QUOTA), store=MemoryStore())
    pyrate = PyrateLimiter(InMemoryBucket([Rate(QUOTA, Duration.HOUR)]))
    bucket = token_bucket.Limiter(1e9, QUOTA, token_bucket.MemoryStorage())
    return {
        "limits": ("sliding window", lambda identifier: sliding.hit(item, identifier)),
        "throttled-py": ("sliding window", throttled.limit),
        "pyrate-limiter": ("sliding log", pyrate.try_acquire),
        "token-bucket": ("token bucket", bucket.consume),
    }


def decision_figures() -> dict[str, float]:
    """CPU nanoseconds of an accepted and of a denied `limiter.limit`, in turns."""
    limiter = Limiter()
    limit = limiter.limit
    plenty = Limit(QUOTA, duration_ms=3_600_000, namespace="accepted")
    nothing_left = Limit(1, duration_ms=3_600_000, namespace="denied")
    accepted: list[float] = []
    denied: list[float] = []
    for _ in range(3):
        accepted.append(cpu_ns_per_call(lambda identifier: limit(plenty, identifier), 300_000))
        denied.append(cpu_ns_per_call(lambda identifier: limit(nothing_left, identifier), 300_000))
    return {"accepted": min(accepted), "denied": min(denied)}


def table_figures() -> dict[str, float]:
    """The same thousand identifiers in a table of a thousand and in one of a million; bytes per subject."""
    per_minute = Limit(QUOTA, duration_ms=60_000, namespace="bench")
    small = Limiter()
    call_small = small.limit
    in_small = cpu_ns_per_call(lambda identifier: call_small(per_minute, identifier, now_ms=NOW_MS), 300_000)

    large = Limiter()
    call_large = large.limit
    for identifier in IDENTIFIERS:
        call_large(per_minute, identifier, now_ms=NOW_MS)
    before = resident_bytes()
    for number in range(1_000_000 - len(IDENTIFIERS)):
        call_large(per_minute, f"subject_{number:07d}", now_ms=NOW_MS)
    bytes_per_subject = (resident_bytes() - before) / (1_000_000 - len(IDENTIFIERS))
    in_large = cpu_ns_per_call(lambda identifier: call_large(per_minute, identifier, now_ms=NOW_MS), 300_000)

    eviction_us = [0.0]
    for number in range(300_000):
        started = time.thread_time_ns()
        call_large(per_minute, f"evicting_{number:07d}", now_ms=NOW_MS)
        eviction_us.append((time.thread_time_ns() - started) / 1_000)
    expiry_us = [0.0]
    for number in range(300_000):
        started = time.thread_time_ns()
        call_large(per_minute, f"expiring_{number:07d}", now_ms=NOW_MS + 400_000)
        expiry_us.append((time.thread_time_ns() - started) / 1_000)
    return {
        "in 1,000": in_small,
        "in 1,000,000": in_large,
        "bytes per subject": bytes_per_subject,
        "worst evicting call, us": max(eviction_us),
        "worst expiring call, us": max(expiry_us),
        "evicted": float(sum(large.statistics().subjects_evicted.values())),
        "expired": float(large.statistics().subjects_expired),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def interpreted() -> dict[str, float]:
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
    return dict(figures)


def main() -> None:
    """Measure and print."""
    if not tidegate.compiled:
        raise SystemExit("install the compiled package first: make bench does")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = peers()
    ours = decision_figures()
    plain = interpreted()
    theirs = {name: cpu_ns_per_call(call, 45_000) for name, (_, call) in found.items()}
    ours_again = decision_figures()
    ours = {name: min(ours[name], ours_again[name]) for name in ours}

    print("| one accepted decision | algorithm | ns | compiled Tidegate is | interpreted Tidegate is |")
    print("|---|---|---|---|---|")
    print(f"| **Tidegate, compiled** | two-cell sliding window | {ours['accepted']:.0f} | 1 | |")
    print(f"| **Tidegate, interpreted** | the same source | {plain['accepted']:.0f} | | 1 |")
    for name, ns in sorted(theirs.items(), key=lambda pair: pair[1]):
        faster, faster_plain = ns / ours["accepted"], ns / plain["accepted"]
        print(
            f"| {name} | {found[name][0]} | {ns:.0f} | {faster:.1f} × as fast | {faster_plain:.1f} × as fast |"
        )
    best = min(ns for name, ns in theirs.items() if found[name][0] == "sliding window")
    print()
    print(f"- against the best sliding-window peer: compiled {best / ours['accepted']:.1f} ×, ", end="")
    print(f"interpreted {best / plain['accepted']:.1f} ×")
    print(f"- denied / accepted: compiled {ours['denied'] / ours['accepted']:.2f}, ", end="")
    print(f"interpreted {plain['denied'] / plain['accepted']:.2f}")
    table = table_figures()
    print(f"- in a table of 1,000,000 / of 1,000: {table['in 1,000,000'] / table['in 1,000']:.2f}")
    print(f"- bytes per subject at 1,000,000, identifier text included: {table['bytes per subject']:.0f}")
    print(
        f"- worst call while evicting ({table['evicted']:.0f} evicted): {table['worst evicting call, us']:.0f} us"
    )
    print(
        f"- worst call while expiring ({table['expired']:.0f} expired): {table['worst expiring call, us']:.0f} us"
    )
    print(f"- the default bound is {Tuning().subjects_max:,} subjects")
