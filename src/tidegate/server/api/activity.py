"""What this process has decided, in bounded memory: for the console, and to explain denials.

Five things: counts by namespace, the hottest and the most denied identifiers of the last minute (sketches), the last
denials of an identifier with the counts behind them, how long operations took, and the requests of the last minutes
(`recording`). Decisions feed it, so it must cost
them next to nothing: up to `SAMPLED_PER_S` operations in a second are all recorded, above it one in `SHARE`, drawn at
random; the rest pay for one comparison. It decides nothing, and knows neither HTTP nor the console.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from random import random
from time import perf_counter_ns
from typing import Final, NamedTuple

import msgspec

from tidegate.core.model import Decision, Limit
from tidegate.runtime.inspection import Inspection
from tidegate.server.api.plans import Counts, Skips
from tidegate.server.api.recording import Followed, Recording
from tidegate.server.catalog.overrides import Override
from tidegate.telemetry.topk import SpaceSaving

# Operations that are recorded in full. One costs 2.4 µs (bench/RESULTS.md): less than a hundredth of a core.
SAMPLED_PER_S: Final = 1_000
SHARE: Final = 64
# Sketches of this many keys: the count of a key is too high by at most 1/500 of all.
SKETCH_KEYS: Final = 500
# "Now" is the last minute: short enough to follow an attack, long enough for rates that do not jump.
SPAN_S: Final = 60
# Namespaces that are counted apart. A caller can create many; what comes after these is counted together.
NAMESPACES_MAX: Final = 5_000
OTHER_NAMESPACES: Final = "(other namespaces)"
# Identifiers whose denials are kept, and denials of each, spread over time. With the longest names that is 10 MB.
DENIED_MAX: Final = 1_000
DENIALS_EACH_MAX: Final = 16

Name = tuple[str, str, str]
"""(workspace id, name of the namespace, identifier)"""


class Sample(NamedTuple):
    """An operation that is recorded: when it began, and how many it represents."""

    started_ns: int
    weight: int


class Denial(msgspec.Struct, gc=False):
    """The first denial of an identifier within one second, and how many came in that second."""

    at_ms: int
    count: int
    cost: int
    quota: int
    duration_ms: int
    source: str
    effective: int
    retry_after_ms: int | None
    regional_age_ms: int | None
    global_age_ms: int | None
    current: tuple[int, int, int]
    """own, others, foreign of the current cell at that moment"""
    previous: tuple[int, int, int]
    override_id: str | None = None
    override_identifier: str | None = None
    is_shadow: bool = False
    """The limit is in shadow mode: the request was allowed anyway."""


class Recent:
    """The heaviest keys of about the last `span_s`: two sketches, of which the older one fades."""

    def __init__(self, capacity: int, span_s: int, now_s: float) -> None:
        self._capacity = capacity
        self._span_s = span_s
        self._begun_s = now_s
        self._since_s = now_s
        self._current: SpaceSaving[Name] = SpaceSaving(capacity)
        self._previous: SpaceSaving[Name] = SpaceSaving(capacity)

    def add(self, key: Name, weight: int, now_s: float) -> None:
        if now_s - self._since_s >= self._span_s:
            self._turn(now_s)
        self._current.add(key, weight)

    def _turn(self, now_s: float) -> None:
        spans = int((now_s - self._since_s) // self._span_s)
        self._previous = self._current if spans == 1 else SpaceSaving(self._capacity)
        self._current = SpaceSaving(self._capacity)
        self._since_s += spans * self._span_s

    def top(self, workspace: str, at_most: int, now_s: float) -> list[tuple[Name, float]]:
        """The heaviest keys of a workspace, with their rate per second."""
        if now_s - self._since_s >= self._span_s:
            self._turn(now_s)
        left = 1 - (now_s - self._since_s) / self._span_s
        weights: dict[Name, float] = {}
        for sketch, share in ((self._previous, left), (self._current, 1.0)):
            for heavy in sketch.top(self._capacity):
                if heavy.key[0] == workspace:
                    # The lower bound: a key that has just replaced another one inherits its count as an error.
                    weight = (heavy.weight - heavy.error) * share
                    weights[heavy.key] = weights.get(heavy.key, 0.0) + weight
        over_s = min(float(self._span_s), max(1.0, now_s - self._begun_s))
        rates = [(key, weight / over_s) for key, weight in weights.items() if weight > 0]
        rates.sort(key=lambda rate: (-rate[1], rate[0]))
        return rates[:at_most]


class Activity:
    """One per process; used by the loop's thread only."""

    def __init__(
        self,
        inspection: Callable[[], Inspection],
        *,
        time_ns: Callable[[], int] = perf_counter_ns,
        random: Callable[[], float] = random,
    ) -> None:
        self._inspection = inspection
        self._time_ns = time_ns
        self._random = random
        # Counted down by the operations.
        self.skips = Skips()
        # For how many the next one stands.
        self._weight = 1
        self._second = 0
        self._taken = 0
        now_s = time_ns() / 1e9
        self.hot = Recent(SKETCH_KEYS, SPAN_S, now_s)
        self.denied = Recent(SKETCH_KEYS, SPAN_S, now_s)
        self.recording = Recording()
        # Operations by the time they took, in buckets of `bucket_of`.
        self.latency: dict[int, int] = {}
        self._counts: dict[tuple[str, str], Counts] = {}
        # The quota that was last seen, by namespace id and duration. The limit comes with the request, so that what is
        # in memory of a subject does not say it.
        self._quotas: dict[tuple[str, int], int] = {}
        # The identifier that was denied last is at the end.
        self._denials: OrderedDict[Name, list[Denial]] = OrderedDict()

    def decisions(self) -> dict[str, int]:
        """Decisions since the start, by workspace id."""
        found: dict[str, int] = {}
        for (workspace, _), counts in self._counts.items():
            # A namespace whose requests all asked not to be counted has none.
            if total := counts.allowed + counts.denied:
                found[workspace] = found.get(workspace, 0) + total
        return found

    def counts(self, workspace: str, namespace: str) -> Counts:
        """Where decisions of this namespace are counted."""
        found = self._counts.get((workspace, namespace))
        if found is None:
            if len(self._counts) >= NAMESPACES_MAX:
                return self._counts.setdefault((workspace, OTHER_NAMESPACES), Counts())
            found = self._counts[workspace, namespace] = Counts()
        return found

    def note_quota(self, limit: Limit) -> None:
        """Called for each new combination of namespace, quota and duration."""
        key = (limit.namespace, limit.duration_ms)
        if key in self._quotas or len(self._quotas) < NAMESPACES_MAX:
            self._quotas[key] = limit.quota

    def quota(self, namespace_id: str, duration_ms: int) -> int | None:
        """The quota that a request for this namespace and duration had, if one is known."""
        return self._quotas.get((namespace_id, duration_ms))

    # Operations. Each one begins with `take`; one that is recorded calls `end` when it has its answer.

    def take(self) -> Sample | None:
        """Whether to record this operation."""
        if self.skips.left:
            self.skips.left -= 1
            return None
        return self.begin()

    def begin(self) -> Sample:
        started_ns = self._time_ns()
        weight = self._weight
        second = started_ns // 1_000_000_000
        if second != self._second:
            self._second = second
            self._taken = 0
        self._taken += 1
        if self._taken <= SAMPLED_PER_S:
            self._weight = 1
        else:
            # From 0 to 126 are left out, 63 on average. A fixed number could keep step with a pattern of the traffic.
            self.skips.left = int(self._random() * (2 * SHARE - 1))
            self._weight = SHARE
        return Sample(started_ns, weight)

    def end(self, sample: Sample, key: Name) -> None:
        now_ns = self._time_ns()
        bucket = bucket_of(now_ns - sample.started_ns)
        self.latency[bucket] = self.latency.get(bucket, 0) + sample.weight
        self.hot.add(key, sample.weight, now_ns / 1e9)

    def follow(self, identifier: str) -> Followed | None:
        """Record all requests of this identifier from now on, if there is room. Called for sampled operations."""
        return self.recording.follow(identifier, self._time_ns() / 1e9)

    def record_denial(
        self,
        key: Name,
        limit: Limit,
        override: Override | None,
        decision: Decision,
        cost: int,
        now_ms: int,
        weight: int,
    ) -> None:
        """A denial that stands for `weight` of them."""
        if not decision.allowed:
            self.denied.add(key, weight, self._time_ns() / 1e9)
        kept = self._denials.get(key)
        if kept is None:
            if len(self._denials) >= DENIED_MAX:
                self._denials.popitem(last=False)
            kept = self._denials[key] = []
        else:
            self._denials.move_to_end(key)
            last = kept[-1]
            if (
                last.at_ms // 1000 == now_ms // 1000
                and last.quota == limit.quota
                and last.is_shadow == limit.shadow
            ):
                last.count += weight
                return
        current, previous = self._inspection().parts(
            (limit.workspace, limit.namespace, limit.duration_ms), key[2], now_ms
        )
        kept.append(
            Denial(
                now_ms,
                weight,
                cost,
                limit.quota,
                limit.duration_ms,
                decision.source,
                decision.effective,
                decision.retry_after_ms,
                decision.regional_age_ms,
                decision.global_age_ms,
                current,
                previous,
                None if override is None else override.id,
                None if override is None else override.identifier,
                limit.shadow,
            )
        )
        if len(kept) > DENIALS_EACH_MAX:
            _thin_out(kept)

    # Reading.

    def namespaces(self, workspace: str, at_most: int) -> dict[str, tuple[int, int]]:
        """(allowed, denied) of the busiest namespaces of a workspace, by name."""
        found = [
            (name, (counts.allowed, counts.denied))
            for (owner, name), counts in self._counts.items()
            if owner == workspace
        ]
        found.sort(key=lambda item: (-sum(item[1]), item[0]))
        return dict(found[:at_most])

    def hottest(self, workspace: str, at_most: int) -> list[tuple[Name, float]]:
        return self.hot.top(workspace, at_most, self._time_ns() / 1e9)

    def most_denied(self, workspace: str, at_most: int) -> list[tuple[Name, float]]:
        return self.denied.top(workspace, at_most, self._time_ns() / 1e9)

    def denials_of(self, workspace: str, namespace: str | None, identifier: str) -> list[tuple[Name, Denial]]:
        """The last denials of an identifier, the newest first; in all namespaces with None."""
        if namespace is not None:
            keys = [(workspace, namespace, identifier)]
        else:
            keys = [key for key in self._denials if key[0] == workspace and key[2] == identifier]
        found = [(key, denial) for key in keys for denial in self._denials.get(key, ())]
        found.sort(key=lambda item: -item[1].at_ms)
        return found

    def last_denials(self, workspace: str, at_most: int) -> list[tuple[Name, Denial]]:
        """The last denial of each of the identifiers that were denied last, the newest first."""
        found: list[tuple[Name, Denial]] = []
        for key in reversed(self._denials):
            if key[0] == workspace:
                found.append((key, self._denials[key][-1]))
                if len(found) == at_most:
                    break
        return found

    def search(self, workspace: str, text: str, at_most: int) -> list[Name]:
        """Identifiers that hold `text`, among those that were seen lately."""
        names: dict[Name, None] = {}
        for key in reversed(self._denials):
            names[key] = None
        for key, _ in [*self.hottest(workspace, SKETCH_KEYS), *self.most_denied(workspace, SKETCH_KEYS)]:
            names[key] = None
        wanted = text.casefold()
        found = [key for key in names if key[0] == workspace and wanted in key[2].casefold()]
        found.sort(key=lambda key: (not key[2].casefold().startswith(wanted), len(key[2]), key))
        return found[:at_most]


def _thin_out(kept: list[Denial]) -> None:
    """Drop the one whose neighbours are closest to each other. The first and the last stay, and the others are spread
    over the time between: it can be explained why denials of an hour began."""
    kept.pop(min(range(1, len(kept) - 1), key=lambda index: kept[index + 1].at_ms - kept[index - 1].at_ms))


def bucket_of(nanoseconds: int) -> int:
    """Four buckets to each doubling: a percentile is exact to within a fifth."""
    exponent = max(0, nanoseconds.bit_length() - 3)
    return exponent * 4 + (nanoseconds >> exponent) % 4


def upper_ns(bucket: int) -> int:
    """The largest duration in a bucket."""
    exponent, quarter = divmod(bucket, 4)
    return ((quarter + 5) << exponent) - 1


def percentile(counts: dict[int, int], share: float) -> float | None:
    """The duration in seconds that `share` of all do not exceed; None if there are none."""
    total = sum(counts.values())
    if total == 0:
        return None
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= share * total:
            return upper_ns(bucket) / 1e9
    raise AssertionError("the last bucket reaches the total")
