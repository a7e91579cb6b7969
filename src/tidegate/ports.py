"""What Tidegate needs from the outside, as protocols. Each docstring is a contract, and the suites in
`tidegate.testing.contracts` test adapters against it.

Every call that can block takes `timeout_s` and keeps it by itself, connecting included: it returns or raises
`DependencyTimeout` no later than that, also when the peer hangs, and leaves the adapter usable. Cancelling a call
is allowed at any await and never leaves a connection that could answer the wrong call.

Failures are `DependencyError`s; a driver's own exception never escapes. Configuration faults are
`ConfigurationError`s, raised by `open`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply

__all__ = [
    "Catalog",
    "CatalogChanges",
    "Changes",
    "Clock",
    "KeyRow",
    "Ledger",
    "LedgerOverview",
    "NamespaceRow",
    "Origin",
    "OverrideRow",
    "Pulse",
    "RegionBeat",
    "WorkspaceRow",
]


class Clock(Protocol):
    """Where `now_ms` comes from when the caller does not give it."""

    def now_ms(self) -> int:
        """Unix time in whole milliseconds."""


class Pulse(NamedTuple):
    """The answer of `Origin.pulse`: the region name that the origin holds, and its time."""

    region: str
    """The region name that the origin holds, after this call claimed it if it held none."""
    was_empty: bool
    """True when it held none: new, wiped, or failed over to a copy from before the first node started; also when it
    was emptied and claimed again by another node since this adapter last looked."""
    time_ms: int
    """The origin's own clock, the reference against which nodes report their offset."""
    resets: int = 0
    """The number of the last reset that it keeps; 0 for none."""


class Origin(Protocol):
    """The region's shared counter: a G-Counter of nodes for every cell.

    A component is (subject digest, sequence, writer) -> own. Merging keeps the maximum, atomically and for all
    components of a call that share a cell; the total of a cell is the sum of its components, kept exactly.
    """

    async def open(self, region: str, *, timeout_s: float) -> None:
        """Check the configuration and claim the origin for `region`.

        Raises `RegionMismatch` when it holds another name, `ConfigurationError` when it can never work, and a
        `DependencyError` when it is only down: the caller continues and calls `pulse` later.
        """

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        """One round trip: for each wanted (cell, writer) the cell's total and the writer's component.

        `expires_at_ms` of what is wanted is ignored; nothing is written; unknown cells answer 0, 0. `own` matters only
        to a store that holds no count beyond 2^53 and was given more: it answers that it holds all of it.
        """

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        """One round trip: `component = max(component, own)`; the answers are in the order of the arguments.

        `OriginReply.total` is the total after the merge; `OriginReply.component` is what was held for this writer
        *before* it, so that the caller notices a wiped or older origin. The cell expires by itself at `expires_at_ms`,
        set in the same command. Safe to repeat, reorder and duplicate. Totals are exact up to 2^53; counts and expiries
        beyond that are accepted too, and no answer reports more for a writer than it ever sent.
        """

    @property
    def rules(self) -> GrantRules:
        """The constants of credit. All nodes of an origin use the same."""

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        """One round trip: answer each message as `tidegate.core.grants.grant` does, in the order of the arguments.

        Each answer is one atomic step. Recalls of credit are pushed to the nodes that `listen`. Safe to
        repeat, reorder and duplicate.
        """

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        """Call `on_recall(digest, writer)` for each request to give credit back, until cancelled.

        Connects and reconnects by itself; never raises for a peer that does not answer.
        """

    @property
    def can_be_recalled(self) -> bool:
        """Whether recalls arrive at the moment. A node that gets none requests no credit in advance."""

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        """Keep what the ledger holds of these cells, as `tidegate.core.grants.share` does, in their order.

        Each is one atomic step; a cell is created if the origin has none, and expires as others do. Credit that no
        longer fits beside the counts of other regions is recalled. Safe to repeat, reorder and duplicate.
        """

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        """What nodes and other regions have counted in a cell, as messages and `share` have reported it, and what is
        reserved of its subject.

        Ages are by the origin's clock. Nothing is written; of what it does not know, nothing is used.
        """

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        """Keep or end reservations, as `tidegate.core.reservations.claim` does, in their order.

        Each is one atomic step. The end of one is remembered for `life_ms` of the claim that ended it. Safe to repeat.
        """

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        """Take, renew or (with a life of 0) give back the import of the region, as
        `tidegate.core.sharing.take_lease` does, in one atomic step; the answer says who has it. `has_lost`: this node
        has seen that the origin lost counts."""

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        """Keep these resets, by maximum, until they expire; answer those that were kept after number `since` (0: all).

        One atomic step; at most 1,000 an answer, in the order of their numbers. Numbers rise, and begin with the
        origin's time in ms, so that those after a wipe are higher than those before. If the origin has lost resets
        since it answered `since`, the number is 0, and no resets are answered. Safe to repeat and reorder.
        """

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        """Claim the region name if none is held (never overwrite one), and answer it with the origin's clock."""

    async def close(self) -> None:
        """Release connections. Idempotent; never raises for a dead peer."""

    def statistics(self) -> Mapping[str, int]:
        """Counters for telemetry: at least commands, connections_opened."""


class RegionBeat(NamedTuple):
    """One region's heartbeat in the ledger."""

    region: str
    beat_at_ms: int
    """The time of the last heartbeat, by the ledger's clock."""


class Changes(NamedTuple):
    """One answer of `Ledger.changes`."""

    rows: list[LedgerRow]
    cursor: str
    """Pass it to the next call to continue from here. Opaque; a later cursor never skips a row that committed late."""
    lag_ms: Mapping[str, int]
    """For each region in `rows`: ledger clock minus the newest `updated_at` of its rows."""
    more: bool = False
    """There were too many rows for one answer: ask again, with this cursor, at once."""
    lost: bool = False
    """The ledger holds less than the cursor had seen: it was wiped, or is an older copy. A full read finds it."""
    unreadable: int = 0
    """Rows that were skipped, because their names are not UTF-8."""


class LedgerOverview(NamedTuple):
    """What `tidegate ledger` shows."""

    regions: list[RegionBeat]
    rows: Mapping[str, int]
    """Live rows by region."""
    expired_rows: int
    hottest: list[LedgerRow]
    clock_ms: int


class Ledger(Protocol):
    """The cross-region table: a G-Counter of regions for every cell. Keys are byte-exact."""

    async def open(self, *, timeout_s: float) -> None:
        """Connect and check the schema. Raises `SchemaMissing` (names `tidegate migrate --ledger URL`),
        `ConfigurationError`, or a `DependencyError` when it is only down."""

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        """Upsert one chunk (at most 5,000 rows, in any order) with `count = GREATEST(count, regional)`.

        The adapter writes them in the order of its unique key, so that concurrent writers cannot deadlock. All or
        nothing. `updated_at` comes from the database's clock and moves only when the count rose.
        A deadlock or lock timeout is repeated inside the time allowed, then raised as `DependencyUnavailable`.
        `RowsRejected` when the database refuses the content (too long, bad encoding, constraint): the caller
        bisects. `duration_ms` etc. are stored as given; identifiers up to 512 characters of any Unicode.
        """

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        """Rows of all regions that changed since `cursor` (None: all), unless expired at `now_ms`.

        A transaction that commits late is never missed; a row may come more than once.
        At most 50,000 rows an answer: when more are left the cursor continues inside, and `more` is true.
        """

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        """Write the heartbeat of `region` and return those of all regions, this one included."""

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        """Delete at most `rows_max` rows with `expires_at < cutoff_ms`; return how many were deleted."""

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        """An overview: regions, rows by region, the cells with the highest counts."""

    async def close(self) -> None:
        """Release connections. Idempotent; never raises for a dead peer."""

    def statistics(self) -> Mapping[str, int]:
        """Counters for telemetry: at least statements, connections_opened."""


class WorkspaceRow(NamedTuple):
    """A tenant: everything else in the catalog belongs to one."""

    id: str
    name: str
    enabled: bool
    quota: int | None
    """How many API calls its keys may make together in `quota_duration_ms`; None: no quota."""
    quota_duration_ms: int | None
    version: int = 0
    """The catalog version that wrote this row. Ignored when a row is written."""


class KeyRow(NamedTuple):
    """A root key, known only by its digest."""

    id: str
    workspace_id: str
    digest: bytes
    """32 bytes; see `tidegate.server.catalog.keys` for why a plain digest is enough."""
    name: str
    """A description; may be empty."""
    hint: str
    """The first characters of the key, to recognise it by."""
    permissions: tuple[str, ...]
    created_at_ms: int
    expires_at_ms: int | None
    enabled: bool
    revoked_at_ms: int | None
    version: int = 0


class NamespaceRow(NamedTuple):
    """A namespace; unique by (workspace, name), byte for byte."""

    id: str
    workspace_id: str
    name: str
    created_at_ms: int
    deleted_at_ms: int | None
    version: int = 0


class OverrideRow(NamedTuple):
    """An override; unique by (namespace, identifier), byte for byte. `identifier` may hold `*` wildcards."""

    id: str
    namespace_id: str
    identifier: str
    limit: int
    duration_ms: int
    deleted_at_ms: int | None
    version: int = 0
    shadow: bool = False
    """Counted and reported; denies nothing."""


class CatalogChanges(NamedTuple):
    """One answer of `Catalog.changes`."""

    version: int
    """Pass it to the next call to continue from here; every row up to it has been returned."""
    is_complete: bool
    """False when more rows are left: ask again at once."""
    workspaces: list[WorkspaceRow]
    keys: list[KeyRow]
    namespaces: list[NamespaceRow]
    overrides: list[OverrideRow]
    unreadable: tuple[tuple[str, str], ...] = ()
    """(table, id) of each row that was skipped, because it holds what Tidegate never writes."""


class Catalog(Protocol):
    """Workspaces, root keys, namespaces and overrides, in the same database as the ledger.

    One number, the catalog version, is raised by every writing transaction, under a lock that is held until the commit;
    each row it writes carries that number. So versions become visible in the order of their numbers, and
    `changes(since)` can never miss a transaction that commits late. Rows are marked before they are deleted: a reader
    that was disconnected sees the mark. One that was disconnected until the row was purged finds `purged_version` above
    the version it had reached, and must read everything. Names and identifiers are compared byte for byte, whatever
    they hold.
    """

    async def open(self, *, timeout_s: float) -> None:
        """Connect and check the schema. Raises `SchemaMissing`, `ConfigurationError`, or a `DependencyError` when
        it is only down."""

    async def version(self, *, timeout_s: float) -> int:
        """The current version: one row, one column. Every node reads it once a second."""

    async def changes(self, since: int, *, timeout_s: float) -> CatalogChanges:
        """Rows written after version `since` (0: all), marked ones included, a bounded number an answer. A row that
        cannot be read is named in `unreadable`: one such row must not keep all others from being read."""

    async def purged_version(self, *, timeout_s: float) -> int:
        """The highest version of a row that was purged, 0 if none was. Ask after `changes`: if it is above the
        `since` of that reading, a mark may have been missed."""

    async def purge(self, cutoff_ms: int, *, timeout_s: float) -> int:
        """Delete permanently a bounded number of overrides and keys that were deleted or revoked before `cutoff_ms`;
        returns how many, 0 when none is left. Namespaces are kept, because a deleted one differs from one that never
        existed. The key that was written last stays too, because a catalog without keys counts as new."""

    async def put_workspace(self, row: WorkspaceRow, *, timeout_s: float) -> WorkspaceRow:
        """Create or replace the workspace `row.id`; answers the row as stored."""

    async def put_key(self, row: KeyRow, *, timeout_s: float) -> KeyRow:
        """Create or replace the key `row.id`. Its workspace must exist, and no other key may have its digest:
        `InvalidInput` otherwise."""

    async def expire_key(self, key_id: str, *, expires_at_ms: int, timeout_s: float) -> KeyRow | None:
        """Let the key expire then, unless it was revoked; answers the row as stored, None when there is no such key."""

    async def revoke_key(self, key_id: str, *, revoked_at_ms: int, timeout_s: float) -> KeyRow | None:
        """Revoke the key permanently; answers the row as stored, with the moment at which it was first revoked, None
        when there is no such key, or when its row cannot be read."""

    async def create_namespace(self, row: NamespaceRow, *, timeout_s: float) -> NamespaceRow:
        """Create it unless the workspace has a namespace of that name; answers the one that is there, also a
        deleted one. Concurrent calls for one name create one. Raises `InvalidInput` (field `id`) when another
        namespace has this id."""

    async def delete_namespace(
        self, namespace_id: str, *, deleted_at_ms: int | None, timeout_s: float
    ) -> bool:
        """Mark as deleted, or restore with None. False when there is no such namespace."""

    async def set_override(self, row: OverrideRow, *, timeout_s: float) -> OverrideRow:
        """Create, change or restore the override of (namespace, identifier); answers the row as stored, with the
        id it has always had."""

    async def delete_override(
        self, namespace_id: str, identifier: str, *, deleted_at_ms: int, timeout_s: float
    ) -> OverrideRow | None:
        """Mark as deleted; answers the marked row, None when there is no live one."""

    async def close(self) -> None:
        """Release connections. Idempotent; never raises for a dead peer."""

    def statistics(self) -> Mapping[str, int]:
        """Counters for telemetry: at least statements, connections_opened."""
