"""What the nodes of a region share about the ledger, in Redis: commands of `share.lua` and `lease.lua`. Pure.

What the ledger holds of a cell is stored in fields of the cell itself, so that credit and publishing read it
along with the cell. The lease has a key of its own, in the first slot.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidegate.adapters.redis.credit import CreditLayout
from tidegate.adapters.redis.layout import BUCKETS, NUMBER_MAX, Command
from tidegate.adapters.redis.scripts import LEASE_SHA, SHARE_SHA
from tidegate.adapters.redis.wire import Reply, pack
from tidegate.core.generations import cell_name
from tidegate.core.grants import GrantRules
from tidegate.core.reservations import is_reservation
from tidegate.core.sharing import ImportState, Lease, OriginUsage, RegionCount, Share, ShareReply
from tidegate.errors import DependencyUnavailable

__all__ = [
    "ShareCommand",
    "lease_command",
    "lease_of",
    "replies_of_shares",
    "share_commands",
    "usage_commands",
    "usage_reply",
]

# A script holds up every other client of its server while it runs: 100 shares take it about a millisecond.
SHARES_PER_COMMAND_MAX: Final = 100
REPLY_NUMBERS: Final = 4
LEASE_VALUES: Final = 11
FOREIGN: Final = b"!foreign:"
# A hold, as records.lua packs it.
HOLD: Final = struct.Struct("<7d")


class ShareCommand(NamedTuple):
    """A call of the script: the command, and which shares of the caller's it carries."""

    command: Command
    indexes: Sequence[int]


def share_commands(
    layout: CreditLayout, rules: GrantRules, shares: Sequence[Share], *, spreads: bool
) -> list[ShareCommand]:
    """All shares in as few commands as may be."""
    groups: dict[int, list[int]] = {}
    for index, share in enumerate(shares):
        groups.setdefault(share.digest[0] % BUCKETS if spreads else 0, []).append(index)
    return [
        ShareCommand((bucket, _packed(layout, rules, [shares[index] for index in chunk])), chunk)
        for bucket, indexes in groups.items()
        for start in range(0, len(indexes), SHARES_PER_COMMAND_MAX)
        for chunk in [indexes[start : start + SHARES_PER_COMMAND_MAX]]
    ]


def _packed(layout: CreditLayout, rules: GrantRules, shares: Sequence[Share]) -> bytes:
    keys: list[bytes] = []
    words: list[bytes | str | int] = [
        rules.recall_gap_ms,
        rules.publish_ms,
        rules.publish_pace_ms,
        layout.channel(""),
    ]
    for digest, duration_ms, sequence, region, counted, owner, epoch, generation in shares:
        keys.append(layout.holds_key(digest))
        keys += [
            layout.cell_key(digest, cell_name(sequence + ahead, generation, duration_ms))
            for ahead in (-1, 0, 1)
        ]
        expires_at_ms = min((sequence + 3) * duration_ms, NUMBER_MAX)
        name = region.encode("utf-8", "surrogatepass")
        words += (name, min(counted, NUMBER_MAX), owner, epoch, duration_ms, sequence, expires_at_ms)
    return pack((b"EVALSHA", SHARE_SHA, len(keys), *keys, *words))


def replies_of_shares(
    shares: Sequence[Share], commands: Sequence[ShareCommand], answers: Sequence[Reply]
) -> list[ShareReply]:
    """The answers in the order of the shares."""
    found = [ShareReply(0, 0, 0, 0)] * len(shares)
    for command, answer in zip(commands, answers, strict=True):
        if not isinstance(answer, list) or len(answer) != REPLY_NUMBERS * len(command.indexes):
            raise DependencyUnavailable(
                f"the share script answered {answer!r:.80} to {len(command.indexes)} shares"
            )
        for place, index in enumerate(command.indexes):
            found[index] = ShareReply(*answer[REPLY_NUMBERS * place : REPLY_NUMBERS * (place + 1)])
    return found


def usage_commands(layout: CreditLayout, digest: bytes, sequence: int) -> list[Command]:
    """All fields of the cell, and all holds of its subject."""
    bucket = digest[0] % BUCKETS
    keys = (layout.cell_key(digest, sequence), layout.holds_key(digest))
    return [(bucket, pack((b"HGETALL", key))) for key in keys]


def usage_reply(cell: Reply, holds: Reply, now_ms: int) -> OriginUsage:
    """What was counted, what is reserved, and what other regions have published; `now_ms` is the server's time."""
    reserved = 0
    for writer, value in _fields(holds).items():
        if is_reservation(writer.decode("utf-8", "replace")) and len(value) >= HOLD.size:
            _, spare, _, _, _, expires_at_ms, _ = HOLD.unpack_from(value)
            reserved += int(spare) if expires_at_ms > now_ms else 0
    fields = _fields(cell)
    total = fields.get(b"", b"")
    return OriginUsage(int(total) if total.isdigit() else 0, reserved, _region_counts(fields, now_ms))


def _fields(answer: Reply) -> dict[bytes, bytes]:
    # Not a hash: damage, which the next message repairs.
    return dict(zip(answer[::2], answer[1::2], strict=True)) if isinstance(answer, list) else {}


def _region_counts(fields: dict[bytes, bytes], now_ms: int) -> list[RegionCount]:
    found = []
    for name, count in fields.items():
        if name.startswith(FOREIGN) and count.isdigit():
            region = name.removeprefix(FOREIGN)
            at = fields.get(b"!at:" + region, b"")
            age_ms = max(0, now_ms - int(at)) if at.isdigit() else -1
            found.append(RegionCount(region.decode("utf-8", "surrogatepass"), int(count), age_ms))
    return found


def lease_command(
    key: bytes, node_id: str, life_ms: int, state: ImportState | None, *, has_lost: bool
) -> bytes:
    words: list[bytes | str | int] = [b"EVALSHA", LEASE_SHA, 1, key, node_id, life_ms, int(has_lost)]
    return pack((*words, *(() if state is None else state)))


def lease_of(answer: Reply) -> Lease:
    if not isinstance(answer, list) or len(answer) != LEASE_VALUES:
        raise DependencyUnavailable(f"the lease script answered {answer!r:.80}")
    holder, since_ms, until_ms, time_ms, lost_at_ms, cursor, *numbers = answer
    state = ImportState(cursor.decode(), *numbers)._replace(since_ms=since_ms)
    return Lease(holder.decode(), since_ms, until_ms, time_ms, lost_at_ms, state)
