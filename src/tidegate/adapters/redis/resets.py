"""How resets are stored in Redis: commands of `resets.lua`. Pure.

All of them are in the first slot: there are few, and every node asks for those that it has not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.adapters.redis.layout import NUMBER_MAX
from tidegate.adapters.redis.scripts import RESETS_SHA
from tidegate.adapters.redis.wire import Reply, pack
from tidegate.adapters.resets import RESETS_PER_ANSWER, reset_of, subject_of
from tidegate.core.resets import Reset, ResetsReply
from tidegate.errors import DependencyUnavailable

__all__ = ["resets_command", "resets_reply"]

HEAD_VALUES: Final = 2


def resets_command(key: bytes, known: Sequence[Reset], since: int) -> bytes:
    words: list[bytes | str | int] = [since, RESETS_PER_ANSWER]
    for reset in known:
        words += (subject_of(reset), reset.generation, min(reset.expires_at_ms, NUMBER_MAX))
    return pack((b"EVALSHA", RESETS_SHA, 3, key, key + b":numbers", key + b":expiries", *words))


def resets_reply(answer: Reply) -> ResetsReply:
    if not isinstance(answer, list) or len(answer) < HEAD_VALUES or len(answer) % 2:
        raise DependencyUnavailable(f"the resets script answered {answer!r:.80}")
    number, more, *found = answer
    pairs = zip(found[::2], found[1::2], strict=True)
    resets = [reset_of(subject.decode(), generation) for subject, generation in pairs]
    return ResetsReply(number, [reset for reset in resets if reset is not None], bool(more))
