"""What a limiter reports about itself: one frozen value, made on request from the counters of its parts.

Names follow the metrics that telemetry makes of them; nothing here is labelled by workspace or identifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.runtime.latency import HistogramSnapshot

__all__ = ["Health", "Statistics"]


@dataclass(frozen=True)
class Health:
    """One dependency, for a line of `/readyz`."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Statistics:
    """A snapshot. Counters since the start, gauges as of now."""

    node_id: str
    region: str | None
    # Decisions: all, those that waited for the origin, and those that were made without its answer.
    allowed: int
    denied: int
    from_origin: int
    denied_from_origin: int
    from_degraded: int
    # Requests that limits in shadow mode would have denied; part of `allowed`.
    exceeded_in_shadow: int
    # Resets that were requested of this node, and those that it received from others.
    resets_made: int
    resets_received: int
    subjects: int
    subjects_bytes: int
    cells: int
    cells_created_by_traffic: int
    cells_created_by_import: int
    subjects_evicted: Mapping[str, int]
    subjects_expired: int
    strict_activations: int
    # The origin.
    origin_operations: Mapping[str, int] = field(default_factory=dict)
    origin_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    origin_latency: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    origin_dirty_subjects: int = 0
    origin_cells_merged: int = 0
    replay_lag_s: float = 0.0
    origin_heals: int = 0
    clock_offset_ms: int | None = None
    # Credit: messages, requests that waited and how long, denials because other nodes held the room, recalls received,
    # holds given back, subjects that may hold credit, and whether recalls arrive.
    credit_messages: int = 0
    credit_waits: int = 0
    credit_wait: HistogramSnapshot | None = None
    credit_denied_held: int = 0
    credit_recalls: int = 0
    credit_releases: int = 0
    credit_subjects: int = 0
    credit_is_listening: bool = False
    # The ledger.
    publish_rows: int = 0
    publish_errors: int = 0
    rows_set_aside: int = 0
    import_rows: int = 0
    import_rows_last: int = 0
    import_rows_unreadable: int = 0
    import_errors: int = 0
    global_lag_ms: Mapping[str, int] = field(default_factory=dict)
    regions: int = 0
    # The node that imports for this region, "" when each imports for itself; whether it is this one; for how long; how
    # old the region's last import is.
    importer: str = ""
    is_importer: bool = False
    importer_for_s: float = 0.0
    import_age_s: float | None = None
    # How long ago each region last wrote its heartbeat, by the clock of the ledger.
    heartbeat_age_ms: Mapping[str, int] = field(default_factory=dict)
    # Breakers by name: 0 closed, 1 half open, 2 open.
    breaker_states: Mapping[str, int] = field(default_factory=dict)
    loop_stall: HistogramSnapshot | None = None
