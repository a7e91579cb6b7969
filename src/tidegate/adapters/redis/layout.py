"""How cells are stored in Redis: keys, the commands that ask for them, and what the answers mean. Pure.

A key is `prefix:{tag}:` + the subject's digest + `:sequence`. The digest is raw bytes of fixed length behind a tag of
fixed length, so that no two cells share a key. The tag in braces decides the slot of a Redis Cluster: there are only
`BUCKETS` tags, so that cells meet in a few commands, and their slots are evenly spaced, so that every master gets its
share of them.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, cast

from tidegate.adapters.redis.wire import Reply, pack
from tidegate.core.model import Component, OriginReply
from tidegate.errors import DependencyUnavailable, InvalidInput

__all__ = [
    "BUCKETS",
    "CELLS_PER_COMMAND_MAX",
    "SLOTS",
    "TAGS",
    "Command",
    "Layout",
    "Merge",
    "MergePlan",
    "replies_from_merges",
    "replies_from_reads",
    "slot_of",
]

SLOTS: Final = 16_384  # of a Redis Cluster, by its specification
BUCKETS: Final = 64  # even shares for up to some twenty masters; 250 dirty cells make four to a command

# Found by search: the slot of tag i is the middle of the i-th of 64 equal ranges, give or take one. Which tag a cell
# has must never change: nodes of two versions would count in two places.
TAG_LIST: Final = (
    "53t j3j if5 kec 574 74b akm 6bk 96a frw 0ip oin d1i 38o 0m0 2nf "
    "he6 box 40w c9q hav 7ah 447 67a 1js fcu 0xr gqt 1n3 3me e2j gu4 "
    "712 52d cmk 4dm 75r h5l 7av ice 3y7 1za 2k6 8ax wu7 931 2ov 8e8 "
    "7d8 5gn 621 41g jc0 qkn 66q i6o 3h5 1kc 2z4 0yb 3lu des o94 802"
)
TAGS: Final = tuple(TAG_LIST.split())

# A script holds up every other client of its server while it runs: 250 cells take it less than a millisecond.
CELLS_PER_COMMAND_MAX: Final = 250

# Lua's numbers are doubles, exact up to here, and a later expiry than any server takes fails the command when half of
# it is done. So both stop here: no limit distinguishes such a count from a larger one, and the year is 287396. Answers
# are turned back, so that a node that has counted more is answered that all of its own is held.
NUMBER_MAX: Final = 2**53


def slot_of(tag: str) -> int:
    """The slot of every key that has `tag` in its braces (CRC16, the XMODEM variant)."""
    return crc_hqx(tag.encode(), 0) % SLOTS


# One command with one reply: the bucket of its keys, and its bytes. A plain tuple, because there is one for each read.
Command = tuple[int, bytes]


class Merge(NamedTuple):
    """A call of the merge script: the command, and which components of the caller's it carries."""

    command: Command
    indexes: Sequence[int]


class MergePlan(NamedTuple):
    """A whole call of `merge`."""

    merges: list[Merge]
    are_distinct: bool
    """No two components belong to the same cell."""


class Layout:
    """Keys and commands under one prefix. `spreads`: a command must stay within one bucket (Redis Cluster)."""

    def __init__(self, prefix: str, *, script_sha: str, spreads: bool) -> None:
        self._heads: Final = [f"{prefix}:{{{tag}}}:".encode() for tag in TAGS]
        self._sha: Final = script_sha.encode()
        self._spreads: Final = spreads

    def key(self, digest: bytes, sequence: int) -> bytes:
        return b"%b%b:%d" % (self._heads[digest[0] % BUCKETS], digest, sequence)

    def region_key(self, bucket: int) -> bytes:
        """Where a bucket keeps the region's name. Shorter than any cell's key."""
        return self._heads[bucket] + b"region"

    def format_key(self, bucket: int) -> bytes:
        """Where a version that writes records differently says so, before it writes any (docs/adr/0015-credit.md)."""
        return self._heads[bucket] + b"format"

    def lease_key(self) -> bytes:
        """Which node imports for the region. In bucket 0."""
        return self._heads[0] + b"lease"

    def resets_key(self) -> bytes:
        """The generations of subjects that were reset. In bucket 0."""
        return self._heads[0] + b"resets"

    def reads(self, wanted: Iterable[Component]) -> list[Command]:
        heads = self._heads
        return [
            (
                bucket := digest[0] % BUCKETS,
                pack((b"HMGET", b"%b%b:%d" % (heads[bucket], digest, sequence), writer, b"")),
            )
            for digest, sequence, writer, _, _ in wanted
        ]

    def merges(self, components: Sequence[Component]) -> MergePlan:
        """All components in as few commands as may be; those of one cell always in the same one."""
        heads = self._heads
        keys = [
            b"%b%b:%d" % (heads[digest[0] % BUCKETS], digest, sequence)
            for digest, sequence, _, _, _ in components
        ]
        groups: dict[int, list[int]] = {}
        if self._spreads:
            for index, one in enumerate(components):
                bucket = one[0][0] % BUCKETS
                if bucket in groups:
                    groups[bucket].append(index)
                else:
                    groups[bucket] = [index]
        else:
            groups[0] = list(range(len(keys)))
        are_distinct = len(set(keys)) == len(keys)
        together = None if are_distinct else keys
        merges = [
            Merge((bucket, self._merge(components, keys, chunk)), chunk)
            for bucket, indexes in groups.items()
            for chunk in _chunks(indexes, together)
        ]
        return MergePlan(merges, are_distinct)

    def single_merges(self, components: Sequence[Component], indexes: Sequence[int]) -> list[Merge]:
        """The same, a command for each component: they pass while the slot moves from one master to another."""
        keys = {index: self.key(components[index].digest, components[index].sequence) for index in indexes}
        return [
            Merge((components[index].digest[0] % BUCKETS, self._merge(components, keys, [index])), [index])
            for index in indexes
        ]

    def _merge(
        self,
        components: Sequence[Component],
        keys: Sequence[bytes] | dict[int, bytes],
        indexes: Sequence[int],
    ) -> bytes:
        words: list[bytes | str | int] = [b"EVALSHA", self._sha, len(indexes)]
        words += [keys[index] for index in indexes]
        before = ""
        for index in indexes:
            _, _, writer, own, expires_at_ms = components[index]
            if own + expires_at_ms > NUMBER_MAX:  # one look for both: neither comes near it in practice
                own, expires_at_ms = min(own, NUMBER_MAX), min(expires_at_ms, NUMBER_MAX)
            if writer == before:
                words += (b"", own, expires_at_ms)
            elif writer:
                words += (writer, own, expires_at_ms)
                before = writer
            else:
                raise InvalidInput("writer", writer, "at least one character")
        return pack(tuple(words))


def _chunks(indexes: list[int], together: list[bytes] | None) -> Iterable[list[int]]:
    """`indexes` in parts of bounded size; with `together`, indexes of equal keys stay in one part."""
    if together is None:
        for start in range(0, len(indexes), CELLS_PER_COMMAND_MAX):
            yield indexes[start : start + CELLS_PER_COMMAND_MAX]
        return
    by_key: dict[bytes, list[int]] = {}
    for index in indexes:
        by_key.setdefault(together[index], []).append(index)
    chunk: list[int] = []
    for equals in by_key.values():
        if chunk and len(chunk) + len(equals) > CELLS_PER_COMMAND_MAX:
            yield chunk
            chunk = []
        chunk += equals
    if chunk:
        yield chunk


# Twice as fast as OriginReply(…), for up to a thousand answers at a time.
_new_reply: Final = cast("Callable[[type[OriginReply], tuple[int, int]], OriginReply]", tuple.__new__)


def replies_from_merges(
    components: Sequence[Component], plan: MergePlan, replies: Sequence[Reply]
) -> list[OriginReply]:
    """The answers in the order of the components."""
    if len(plan.merges) == 1 and plan.are_distinct:
        flat = _numbers(replies[0], len(components))
        answers = [_new_reply(OriginReply, pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
        return answers if max(flat) < NUMBER_MAX else _with_all_of_ours(components, answers)
    answers = [OriginReply(0, 0)] * len(components)
    highest = 0
    for merge, reply in zip(plan.merges, replies, strict=True):
        flat = _numbers(reply, len(merge.indexes))
        for index, pair in zip(merge.indexes, zip(flat[::2], flat[1::2], strict=True), strict=True):
            answers[index] = _new_reply(OriginReply, pair)
        highest = max(highest, *flat)
    if not plan.are_distinct:
        answers = _as_of_the_whole_call(components, answers)
    return answers if highest < NUMBER_MAX else _with_all_of_ours(components, answers)


def _with_all_of_ours(components: Sequence[Component], answers: list[OriginReply]) -> list[OriginReply]:
    """The answers to a merge, where a component beyond `NUMBER_MAX` was sent as just that."""
    for index, one in enumerate(components):
        if one.own > NUMBER_MAX:
            total, before = answers[index]
            others = total - max(before, NUMBER_MAX)
            answers[index] = OriginReply(others + one.own, before if before < NUMBER_MAX else one.own)
    return answers


def _as_of_the_whole_call(
    components: Sequence[Component], answers: Sequence[OriginReply]
) -> list[OriginReply]:
    """Components of one cell were merged one after the other; each gets the last total, and what was held first."""
    totals: dict[tuple[bytes, int], int] = {}
    befores: dict[tuple[bytes, int, str], int] = {}
    for (digest, sequence, writer, _, _), (total, before) in zip(components, answers, strict=True):
        totals[digest, sequence] = max(total, totals.get((digest, sequence), 0))
        befores[digest, sequence, writer] = min(before, befores.get((digest, sequence, writer), before))
    return [
        OriginReply(totals[one.digest, one.sequence], befores[one.digest, one.sequence, one.writer])
        for one in components
    ]


def _numbers(reply: Reply, count: int) -> list[int]:
    if not isinstance(reply, list) or len(reply) != 2 * count:
        raise DependencyUnavailable(f"the merge script answered {reply!r:.80} for {count} components")
    return reply


def replies_from_reads(wanted: Sequence[Component], replies: Iterable[Reply]) -> list[OriginReply]:
    """The answers to HMGETs, in their order."""
    answers = []
    for one, reply in zip(wanted, replies, strict=True):
        try:
            component, total = cast("list[bytes | None]", reply)
            pair = (0 if total is None else int(total), 0 if component is None else int(component))
        except (TypeError, ValueError):
            pair = (0, 0)  # not a hash, or not numbers: damage, which the next merge repairs
        if pair[1] >= NUMBER_MAX and one.own > NUMBER_MAX:
            pair = (pair[0] - pair[1] + one.own, one.own)
        answers.append(_new_reply(OriginReply, pair))
    return answers
