"""How reservations are stored in Redis: commands of `reserve.lua`. Pure.

A reservation is a hold like those of credit. That one has ended is a key of its own, beside the holds: no message reads
it, however many there are.
"""

from __future__ import annotations

from tidegate.adapters.redis.credit import CreditLayout
from tidegate.adapters.redis.layout import BUCKETS, NUMBER_MAX, Command
from tidegate.adapters.redis.scripts import RESERVE_SHA
from tidegate.adapters.redis.wire import Reply, pack
from tidegate.core.generations import cell_name
from tidegate.core.reservations import HOLDS_MAX, Claim, ClaimReply
from tidegate.errors import DependencyUnavailable

__all__ = ["claim_command", "claim_reply"]


def claim_command(layout: CreditLayout, entry: Claim) -> Command:
    """One claim: those of a call may be in different slots, and are few."""
    holds_key = layout.holds_key(entry.digest)
    keys = (
        holds_key,
        layout.cell_key(entry.digest, cell_name(entry.sequence, entry.generation, entry.duration_ms)),
        b"%b:e:%b" % (holds_key[:-2], entry.holder.encode()),
    )
    words = (
        HOLDS_MAX,
        entry.holder,
        min(entry.amount, NUMBER_MAX),
        min(entry.life_ms, NUMBER_MAX),
        int(entry.is_final),
        min((entry.sequence + 3) * entry.duration_ms, NUMBER_MAX),
    )
    return entry.digest[0] % BUCKETS, pack((b"EVALSHA", RESERVE_SHA, len(keys), *keys, *words))


def claim_reply(answer: Reply) -> ClaimReply:
    if not isinstance(answer, list) or len(answer) != len(ClaimReply._fields):
        raise DependencyUnavailable(f"the reserve script answered {answer!r:.80}")
    return ClaimReply(*answer)
