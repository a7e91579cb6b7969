"""How cells lie in Redis: keys, the commands that ask for them, and what the answers mean. Pure.

A key is `prefix:{tag}:` + the subject's digest + `:sequence`. The digest is raw bytes of fixed length behind a tag of
fixed length, so that no two cells share a key. The tag in braces decides the slot of a Redis Cluster: there are only
`BUCKETS` tags, so that cells meet in a few commands, and their slots are evenly spaced, so that every master gets its
share of them.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Final, NamedTuple

from tidegate.adapters.redis.wire import Reply, ReplyError, pack
from tidegate.core.model import Component, Heard
from tidegate.errors import DependencyUnavailable, InvalidInput

__all__ = [
    "BUCKETS",
    "CELLS_PER_COMMAND_MAX",
    "LOAD_SCRIPT",
    "SLOTS",
    "TAGS",
    "Command",
    "Layout",
    "Merge",
    "heard_from_merges",
    "heard_from_reads",
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

MERGE_SCRIPT: Final = files("tidegate.adapters.redis").joinpath("merge.lua").read_text("utf-8")
LOAD_SCRIPT: Final = ("SCRIPT", "LOAD", MERGE_SCRIPT)


def slot_of(tag: str) -> int:
    """The slot of every key that has `tag` in its braces (CRC16, the XMODEM variant)."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class Command(NamedTuple):
    """One command with one reply, for keys of one bucket."""

    bucket: int
    packed: bytes


class Merge(NamedTuple):
    """A call of the merge script: the command, and which components of the caller's it carries."""

    command: Command
    indexes: Sequence[int]


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

    def reads(self, wanted: Iterable[Component]) -> list[Command]:
        key = self.key
        return [
            Command(one.digest[0] % BUCKETS, pack((b"HMGET", key(one.digest, one.sequence), one.writer, b"")))
            for one in wanted
        ]

    def merges(self, components: Sequence[Component]) -> list[Merge]:
        """All components in as few commands as may be; those of one cell always in the same one."""
        heads = self._heads
        keys = [b"%b%b:%d" % (heads[digest[0] % BUCKETS], digest, sequence)
                for digest, sequence, _, _, _ in components]  # fmt: skip
        groups: dict[int, list[int]] = {}
        if self._spreads:
            for index, one in enumerate(components):
                groups.setdefault(one.digest[0] % BUCKETS, []).append(index)
        else:
            groups[0] = list(range(len(keys)))
        together = None if len(set(keys)) == len(keys) else keys
        return [
            Merge(Command(bucket, self._merge(components, keys, chunk)), chunk)
            for bucket, indexes in groups.items()
            for chunk in _chunks(indexes, together)
        ]

    def single_merges(self, components: Sequence[Component], indexes: Sequence[int]) -> list[Merge]:
        """The same, a command for each component: they pass while the slot moves from one master to another."""
        keys = {index: self.key(components[index].digest, components[index].sequence) for index in indexes}
        return [
            Merge(
                Command(components[index].digest[0] % BUCKETS, self._merge(components, keys, [index])),
                [index],
            )
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


def heard_from_merges(
    components: Sequence[Component], merges: Sequence[Merge], replies: Sequence[Reply]
) -> list[Heard]:
    """The answers in the order of the components."""
    new: Callable[[type[Heard], tuple[int, int]], Heard] = tuple.__new__  # twice as fast as Heard(…)
    if len(merges) == 1 and len({(one.digest, one.sequence) for one in components}) == len(components):
        flat = _numbers(replies[0], len(components))
        return [new(Heard, pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
    answers: list[Heard] = [Heard(0, 0)] * len(components)
    totals: dict[tuple[bytes, int], int] = {}
    befores: dict[tuple[bytes, int, str], int] = {}
    for merge, reply in zip(merges, replies, strict=True):
        flat = _numbers(reply, len(merge.indexes))
        for index, total, before in zip(merge.indexes, flat[::2], flat[1::2], strict=True):
            one = components[index]
            answers[index] = Heard(total, before)
            # Components of one cell were merged one after the other: the last total holds them all.
            cell = (one.digest, one.sequence)
            totals[cell] = max(total, totals.get(cell, 0))
            befores.setdefault((*cell, one.writer), before)
    if len(totals) == len(components):
        return answers
    return [
        Heard(totals[one.digest, one.sequence], befores[one.digest, one.sequence, one.writer])
        for one in components
    ]


def _numbers(reply: Reply, count: int) -> list[int]:
    if not isinstance(reply, list) or len(reply) != 2 * count:
        raise DependencyUnavailable(f"the merge script answered {reply!r:.80} for {count} components")
    return reply


def heard_from_reads(replies: Iterable[Reply]) -> list[Heard]:
    answers = []
    for reply in replies:
        if isinstance(reply, ReplyError) or not isinstance(reply, list):
            answers.append(Heard(0, 0))  # not a hash: damage, which the next merge repairs
        else:
            component, total = reply
            answers.append(Heard(_count(total), _count(component)))
    return answers


def _count(value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError:
        return 0  # damage, as above
