"""Limit, Request, Decision, Tuning, and the messages of convergence.

All are immutable. A value is validated where it is made, so that the code behind can trust it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, final

from tidegate.core._native import Text, Whole, check_keywords, mypyc_attr, set_once
from tidegate.core.header_fields import ratelimit_headers
from tidegate.core.quota import QUOTA_EXPECTED, format_quota, parse_quota
from tidegate.errors import InvalidInput

__all__ = [
    "DEGRADED",
    "DURATION_MS_MAX",
    "LOCAL",
    "NAME_LENGTH_MAX",
    "ORIGIN",
    "REGION_EXPECTED",
    "TIME_MS_MAX",
    "Component",
    "Decision",
    "LedgerRow",
    "Limit",
    "OriginReply",
    "Request",
    "Tuning",
    "checked_bool",
    "checked_int",
    "checked_name",
    "checked_on_outage",
    "checked_region",
    "make_limit",
    "subject_digest",
]

# A name (workspace, namespace, identifier) may have this many characters at every layer: the HTTP API promises
# 512, and a column of the ledger must hold what the API accepts.
NAME_LENGTH_MAX: Final = 512

# A region's name is written into every ledger row and into metric labels: short, plain, and the same for years.
REGION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REGION_EXPECTED: Final = "a name of 1 to 64 letters, digits, dots, hyphens and underscores, such as fra"

# Shorter windows would roll over faster than a slow round trip.
DURATION_MS_MIN: Final = 1000

# A hundred years: the longest window that a client of the server may ask for. Its end, and the moment when its counts
# expire, fit into 64 bits: a database refuses rows beyond that, one by one, and they would delay those of others.
DURATION_MS_MAX: Final = 3_155_760_000_000
# The end of the year 9999, in Unix ms: the last moment that a date can name. Numbers made from it fit everywhere.
TIME_MS_MAX: Final = 253_402_300_799_999

# How a decision was made; `Decision.source` spells it out.
LOCAL: Final = 0  # from memory that was fresh enough, or that already denied
ORIGIN: Final = 1  # after a read of the origin
DEGRADED: Final = 2  # a read was needed and failed; made from memory instead

SOURCE_NAMES: Final = ("local", "origin", "degraded")


def checked_name(field: str, value: object) -> str:
    """`value` as a name, or an `InvalidInput` that says what is wrong with it.

    The answer is a plain str: what is remembered must not run a subclass's code when it is hashed or dropped.
    """
    if not isinstance(value, str):
        raise InvalidInput(field, value, "a str")
    if not value:
        raise InvalidInput(field, value, "at least one character")
    if len(value) > NAME_LENGTH_MAX:
        raise InvalidInput(field, value, f"at most {NAME_LENGTH_MAX} characters")
    return value if type(value) is str else str.__str__(value)


def checked_int(field: str, value: object, minimum: int) -> int:
    """`value` as an int that is not a bool and not below `minimum`, or an `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(field, value, "an int")
    if value < minimum:
        raise InvalidInput(field, value, f"at least {minimum}")
    return value


def checked_bool(field: str, value: object) -> bool:
    """`value` as True or False, or an `InvalidInput`."""
    if not isinstance(value, bool):
        raise InvalidInput(field, value, "True or False")
    return value


def checked_region(value: object) -> str:
    """`value` as the name of a region, or an `InvalidInput`: the same rule for the library and the server."""
    if not isinstance(value, str) or REGION.fullmatch(value) is None:
        raise InvalidInput("region", value, REGION_EXPECTED)
    return value


def checked_on_outage(value: object) -> str:
    """`value` as what a limit does when its origin does not answer, or an `InvalidInput`."""
    if value == "deny":
        return "deny"
    if value == "local":
        return "local"
    raise InvalidInput("on_outage", value, '"local" or "deny"')


def subject_digest(workspace: str, namespace: str, identifier: str, duration_ms: int) -> bytes:
    """The fixed-length key of a subject, at the origin and in the ledger alike (BLAKE2b-128).

    Every part is prefixed with its length, so that no two subjects are ever written the same way. Lone surrogates
    pass: a Python str may hold them, and an identifier that cannot be hashed could never be replayed.
    """
    parts: list[bytes] = []
    for name in (workspace, namespace, identifier):
        encoded = name.encode("utf-8", "surrogatepass")
        parts.append(len(encoded).to_bytes(4, "big"))
        parts.append(encoded)
    parts.append(str(duration_ms).encode())
    return blake2b(b"".join(parts), digest_size=16).digest()


@final
@mypyc_attr(acyclic=True)
class Limit:
    """A rule: how much, per what time, for which endpoint or action.

    `Limit("100/minute", namespace="email.send")`, or in numbers
    `Limit(100, duration_ms=60_000, namespace="email.send")`.

    `workspace`, `namespace` and `duration_ms` identify the counter together with the identifier. The quota is not
    part of that identity: two limits with the same namespace and duration judge the same counter.

    `on_outage` is what happens when Redis, the origin of the region, should be read and does not answer: "local"
    decides from memory, "deny" denies. A limiter without an origin has no outages.

    `shadow=True` tries a limit out: it is judged and counted as if it were enforced, `Decision.exceeded` says what it
    would have denied, and every request is allowed.
    """

    __slots__ = ("denies_on_outage", "duration_ms", "key", "namespace", "quota", "shadow", "workspace")

    def __init__(
        self,
        quota: str | Whole,
        *,
        namespace: Text,
        duration_ms: Whole | None = None,
        workspace: Text = "default",
        on_outage: Text = "local",
        shadow: Whole = False,
        _quota_min: int = 1,  # 0 for overrides, where a quota of 0 denies every request
    ) -> None:
        count: int
        length_ms: int
        if isinstance(quota, str):
            if duration_ms is not None:
                raise InvalidInput(
                    "duration_ms", duration_ms, f"no value, because {quota!r} names its duration"
                )
            count, length_ms = parse_quota(quota)
        else:
            if isinstance(quota, bool) or not isinstance(quota, int):
                raise InvalidInput("quota", quota, QUOTA_EXPECTED)
            count = checked_int("quota", quota, _quota_min)
            if duration_ms is None:
                expected = f'milliseconds, as in duration_ms=60_000; or write the quota as "{count}/minute"'
                raise InvalidInput("duration_ms", duration_ms, expected)
            length_ms = checked_int("duration_ms", duration_ms, DURATION_MS_MIN)
        self.quota: Final[int] = count
        self.duration_ms: Final[int] = length_ms
        self.namespace: Final[str] = checked_name("namespace", namespace)
        self.workspace: Final[str] = checked_name("workspace", workspace)
        self.denies_on_outage: Final[bool] = checked_on_outage(on_outage) == "deny"
        self.shadow: Final[bool] = checked_bool("shadow", shadow)
        # Typed as an object so that the compiled class keeps one tuple, rather than making one at every look-up.
        self.key: Final[object] = (self.workspace, self.namespace, length_ms)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Limit)
            and self.quota == other.quota
            and self.key == other.key
            and self.denies_on_outage == other.denies_on_outage
            and self.shadow == other.shadow
        )

    def __hash__(self) -> int:
        return hash((self.quota, self.key))

    @property
    def on_outage(self) -> str:
        """What happens when the origin should be read and does not answer: "local" or "deny"."""
        return "deny" if self.denies_on_outage else "local"

    def __reduce__(self) -> tuple[object, tuple[int, int, str, str, str, bool]]:
        return make_limit, (
            self.quota,
            self.duration_ms,
            self.namespace,
            self.workspace,
            self.on_outage,
            self.shadow,
        )

    def __repr__(self) -> str:
        more = f", workspace={self.workspace!r}" if self.workspace != "default" else ""
        if self.denies_on_outage:
            more += ", on_outage='deny'"
        if self.shadow:
            more += ", shadow=True"
        return f"Limit({self.quota}, duration_ms={self.duration_ms}, namespace={self.namespace!r}{more})"

    def __str__(self) -> str:
        return format_quota(self.quota, self.duration_ms)


set_once(Limit)


def make_limit(
    quota: int,
    duration_ms: int,
    namespace: str,
    workspace: str,
    on_outage: str = "local",
    shadow: bool = False,
) -> Limit:
    """A limit whose quota may be 0, which denies every request: for overrides, copies and pickles."""
    return Limit(
        quota,
        duration_ms=duration_ms,
        namespace=namespace,
        workspace=workspace,
        on_outage=on_outage,
        shadow=shadow,
        _quota_min=0,
    )


class Request(NamedTuple):
    """One item of a batch: `Request(limit, identifier, cost)`."""

    limit: Limit
    identifier: str
    cost: int = 1


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Decision:
    """The answer to a request: truthy when allowed.

    Names ending in `_at` are points in time (Unix time), names ending in `_after` count from the decision. Seconds,
    unless the name ends in `_ms`.
    """

    # Private, and shown by properties: interpreted, a slot could be assigned to.
    __slots__ = (
        "_allowed",
        "_decided_at_ms",
        "_effective",
        "_global_age_ms",
        "_limit",
        "_regional_age_ms",
        "_remaining",
        "_retry_after_ms",
        "_source",
    )

    def __init__(
        self,
        allowed: bool,
        limit: Limit,
        remaining: int,
        decided_at_ms: int,
        effective: int,
        retry_after_ms: int,
        source: int,
        regional_age_ms: int,
        global_age_ms: int,
    ) -> None:
        # Whether it fitted. A limit in shadow mode allows what does not.
        self._allowed: Final[bool] = allowed
        self._limit: Final[Limit] = limit
        self._remaining: Final[int] = remaining
        self._decided_at_ms: Final[int] = decided_at_ms
        self._effective: Final[int] = effective
        self._source: Final[int] = source
        # -1 means None in these: an optional int would be boxed in the compiled class.
        self._retry_after_ms: Final[int] = retry_after_ms
        self._regional_age_ms: Final[int] = regional_age_ms
        self._global_age_ms: Final[int] = global_age_ms

    def __bool__(self) -> bool:
        return self._allowed or self._limit.shadow

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Decision, (
            self._allowed,
            self._limit,
            self._remaining,
            self._decided_at_ms,
            self._effective,
            self._retry_after_ms,
            self._source,
            self._regional_age_ms,
            self._global_age_ms,
        )

    @property
    def allowed(self) -> bool:
        """Whether the request may pass: its cost fitted and was counted, or the limit is in shadow mode."""
        return self._allowed or self._limit.shadow

    @property
    def exceeded(self) -> bool:
        """Whether the cost did not fit, and was not counted: denied, unless the limit is in shadow mode."""
        return not self._allowed

    @property
    def limit(self) -> Limit:
        """The limit that was applied."""
        return self._limit

    @property
    def remaining(self) -> int:
        """How much more would fit now; 0 when the limit is exceeded."""
        return self._remaining

    @property
    def effective(self) -> int:
        """What counts in the sliding window, the cost of this request included."""
        return self._effective

    @property
    def decided_at_ms(self) -> int:
        """When it was decided, in Unix milliseconds."""
        return self._decided_at_ms

    @property
    def reset_at_ms(self) -> int:
        """The end of the current fixed window, in Unix milliseconds."""
        duration_ms = self._limit.duration_ms
        return (self._decided_at_ms // duration_ms + 1) * duration_ms

    @property
    def reset_at(self) -> float:
        """`reset_at_ms` in seconds."""
        return self.reset_at_ms / 1000

    @property
    def retry_after_ms(self) -> int | None:
        """Milliseconds until this cost fits if no other request comes: 0 when it fitted, None when it never fits."""
        return None if self._retry_after_ms < 0 else self._retry_after_ms

    @property
    def retry_after(self) -> float | None:
        """`retry_after_ms` in seconds."""
        return None if self._retry_after_ms < 0 else self._retry_after_ms / 1000

    @property
    def source(self) -> str:
        """How it was made: "local", "origin", or "degraded" when a read was needed and failed."""
        return SOURCE_NAMES[self._source]

    @property
    def regional_age_ms(self) -> int | None:
        """Age of what the origin last answered for this cell; None without an origin, or before its first answer."""
        return None if self._regional_age_ms < 0 else self._regional_age_ms

    @property
    def global_age_ms(self) -> int | None:
        """Age of the last import from the ledger; None without a ledger, or before the first import."""
        return None if self._global_age_ms < 0 else self._global_age_ms

    def headers(self) -> dict[str, str]:
        """HTTP header fields for a response: RateLimit-Policy, RateLimit, and Retry-After on a denial that can pass."""
        limit = self._limit
        return ratelimit_headers(
            limit.namespace,
            limit.quota,
            limit.duration_ms,
            self._remaining,
            self.reset_at_ms - self._decided_at_ms,
            None if self.allowed else self.retry_after_ms,
        )

    def _outcome(self) -> str:
        if self._allowed:
            return "allowed"
        return "exceeded" if self._limit.shadow else "denied"

    def __repr__(self) -> str:
        return (
            f"Decision({self._outcome()}, limit={self._limit!r}, remaining={self._remaining}, "
            f"effective={self._effective}, reset_at_ms={self.reset_at_ms}, retry_after_ms={self.retry_after_ms}, "
            f"source={self.source!r})"
        )


class Component(NamedTuple):
    """One writer's part of a cell at the origin."""

    digest: bytes
    """`subject_digest` of the cell's subject."""
    sequence: int
    """The name of the cell: its sequence, unless the subject was reset (`tidegate.core.generations`)."""
    writer: str
    """The node's id, with a suffix for subjects that were created after an eviction."""
    own: int
    """What the writer has accepted in this cell, in total."""
    expires_at_ms: int
    """(sequence + 3) * duration_ms: no request needs the cell any more."""


class OriginReply(NamedTuple):
    """What the origin answers for one component."""

    total: int
    """Sum of all components of the cell."""
    component: int
    """The asking writer's component as the origin held it (before the merge, if this was one)."""


class LedgerRow(NamedTuple):
    """One region's published count for one cell."""

    workspace: str
    namespace: str
    identifier: str
    duration_ms: int
    sequence: int
    """The name of the cell: its sequence, unless the subject was reset (`tidegate.core.generations`)."""
    region: str
    regional: int
    """All that the region is known to have accepted in the cell: the ledger's `count`."""
    expires_at_ms: int
    """(sequence + 2) * duration_ms: no decision counts the cell after that."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The constants of convergence, each with its reason. Milliseconds, counts and percentages are ints.

    The server has no option for them, because all nodes of a fleet must use the same ones. Tests and the simulator
    pass their own.
    """

    # Accept only what the origin has granted (docs/adr/0015-credit.md): with it the region is exact, without it a read
    # or replay is trusted for `fresh_ms`.
    credit: bool = True
    # A report that no request waits for rests this long, so that a busy subject costs few messages. A crash loses what
    # rests.
    report_interval_ms: int = 5
    # A read or replay is trusted this long. Peers' counts are at most this old when nothing is replayed.
    fresh_ms: int = 5_000
    # Longest wait of a caller for a read, connecting included; then the decision is local.
    read_timeout_ms: int = 300
    # After a failed read the next try for that subject comes no sooner: an origin that is down is not asked for every
    # request.
    read_retry_ms: int = 300
    # A cell that began while its subject was warm was empty then: no read in its first second, so that not all
    # subjects are read at the start of a minute. Longer than a round trip, shorter than `fresh_ms`.
    rollover_grace_ms: int = 1_000
    # Cells carried by one merge command: about 1 ms of a Redis server's time.
    replay_cells_max: int = 250
    # Collect counts for about this long before sending them; 0 sends at once. For an origin in a file on the same
    # machine, where writing each count alone would cost more than deciding it.
    replay_interval_ms: int = 0
    replay_timeout_ms: int = 1_000
    # Backoff of a failing loop, doubled from first to last; a random part of the upper half of it is waited.
    backoff_first_ms: int = 100
    backoff_last_ms: int = 5_000
    # How long a graceful stop may spend on its last flush.
    flush_timeout_ms: int = 2_000
    # How often a node asks its origin for the region's name and the time. Finds a wiped origin without traffic.
    pulse_interval_ms: int = 1_000
    # A clock offset above this is logged as a warning. It is never corrected: NTP does that.
    clock_offset_warn_ms: int = 100

    # Windows shorter than this stay regional: the cadence of the ledger is too coarse for them.
    ledger_duration_ms_min: int = 60_000
    publish_interval_ms: int = 5_000
    # While cells are hot the tick is this short, so that regions see each other's counts within a second
    # (docs/adr/0008-hot-tick.md); it gets longer when it would write more rows per second than the next value.
    publish_hot_interval_ms: int = 500
    publish_hot_rows_per_s: int = 1_000
    import_interval_ms: int = 5_000
    # Share of an interval that is random in each cycle, so that nodes do not act at the same moment.
    jitter_percent: int = 20
    # Pressure: at most one early publish per node in this time (docs/adr/0009-anticipation-and-pressure.md), and
    # import this often while cells are hot.
    pressure_interval_ms: int = 100
    import_hot_interval_ms: int = 250
    # The node that imports for its region asks this often after an answer with rows, or after a publish of its own.
    import_busy_interval_ms: int = 100
    # A cell is published early when it has grown by headroom / (pressure_parts * regions seen on it).
    pressure_parts: int = 4
    # One node of a region imports for all (docs/adr/0020-one-importer.md). Its lease lasts this long, and every node
    # asks for it this often: together less than two seconds until another has taken over.
    import_lease_ms: int = 1_200
    import_lease_interval_ms: int = 400
    # A node that imports for itself alone asks at least this often, so that it gets resets.
    reset_interval_ms: int = 1_000
    # A full read of the ledger heals what an incremental cursor could not see.
    import_full_interval_ms: int = 300_000
    # Rows of one upsert statement; larger ones hold locks long enough to conflict with other writers.
    publish_rows_max: int = 5_000
    ledger_timeout_ms: int = 10_000
    # A row the ledger refused is tried again after this long, doubled each time.
    set_aside_ms: int = 60_000
    # A region whose heartbeat is older than this is not counted as live.
    region_live_ms: int = 60_000
    # Between two imports a decision adds what foreign components have probably grown since.
    anticipation: bool = True

    # Breaker: opens when at least half of at least 20 calls in the window failed; stays open 5 s from the trip.
    breaker_window_ms: int = 10_000
    breaker_calls_min: int = 20
    breaker_failure_percent: int = 50
    breaker_open_ms: int = 5_000
    breaker_trials: int = 1

    # About 380 bytes each, compiled: an attacker who sprays identifiers cannot take more than this.
    subjects_max: int = 1_000_000
    # The same in bytes, by estimate: names may be long, and a table of its own for each subject costs more than the
    # subject. A million subjects with short names need a third of it.
    subjects_bytes_max: int = 1_073_741_824
    # How exact "least recently used" is. Finer would move a list node on every decision.
    touch_ms: int = 1_000


# Fields for which 0 has a meaning: at once, always, or not at all.
MAY_BE_ZERO: Final = frozenset(
    {
        "clock_offset_warn_ms",
        "flush_timeout_ms",
        "fresh_ms",
        "jitter_percent",
        "ledger_duration_ms_min",
        "pressure_interval_ms",
        "read_retry_ms",
        "replay_interval_ms",
        "report_interval_ms",
        "rollover_grace_ms",
        "set_aside_ms",
        "touch_ms",
    }
)


def check_tuning(values: Mapping[str, object]) -> None:
    """Refuse a value that its field cannot have. An unknown name is left to Python."""
    for name, value in values.items():
        if name in ("anticipation", "credit"):
            if not isinstance(value, bool):
                raise InvalidInput(name, value, "True or False")
            continue
        number = checked_int(name, value, 0 if name in MAY_BE_ZERO else 1)
        if name.endswith("_percent") and number > 100:
            raise InvalidInput(name, value, "a percentage of at most 100")


check_keywords(Tuning, check_tuning)
