"""How credit is stored in Redis: the keys of a message, the command that carries many, and what its answer means. Pure.

A subject's holds are at the key of its cells with `h` in place of a sequence: the same tag, so the same slot of a Redis
Cluster, and one script answers both. All numbers of a command travel in one argument, as doubles: an argument for each
would cost Redis and this process more than everything else in a message. What `credit.lua` cannot count exactly is cut
in requests (`NUMBER_MAX`) and restored in replies, as in `layout.py`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple, cast

from tidegate.adapters.redis.layout import BUCKETS, NUMBER_MAX, TAGS, Command
from tidegate.adapters.redis.scripts import CREDIT_SHA
from tidegate.adapters.redis.wire import Reply, pack
from tidegate.core.generations import cell_name
from tidegate.core.grants import CellPart, CellTotals, CreditReply, CreditRequest, GrantRules
from tidegate.errors import DependencyUnavailable, InvalidInput

__all__ = ["CreditCommand", "CreditLayout", "parse_recall", "replies_of"]

# A script holds up every other client of its server while it runs: 100 messages take it about two milliseconds.
MESSAGES_PER_COMMAND_MAX: Final = 100

DIGEST_BYTES: Final = 16
# Numbers of an answer before those of its cells, and for each cell.
HEAD_NUMBERS: Final = 6
CELL_NUMBERS: Final = 8
# Of a `CellPart`.
SEQUENCE: Final = itemgetter(0)


class CreditCommand(NamedTuple):
    """A call of the script: the command, and which messages of the caller's it carries."""

    command: Command
    indexes: Sequence[int]


class CreditLayout:
    """Keys and commands under one prefix. `spreads`: a command must stay within one bucket (Redis Cluster)."""

    def __init__(self, prefix: str, rules: GrantRules, *, spreads: bool) -> None:
        self._heads: Final = [f"{prefix}:{{{tag}}}:".encode() for tag in TAGS]
        self._channels: Final = f"{prefix}:recall:".encode()
        self._spreads: Final = spreads
        self._rules: Final = (
            rules.margin_ms,
            rules.firm_ms,
            rules.unanswered_ms,
            rules.recall_gap_ms,
            rules.quiet_ms,
            rules.share,
            rules.publish_ms,
            rules.publish_pace_ms,
            self._channels,
        )

    def channel(self, node_id: str) -> bytes:
        """Where a node is asked to give back credit: a digest of 16 bytes, then the writer that holds it."""
        return self._channels + node_id.encode()

    def holds_key(self, digest: bytes) -> bytes:
        return b"%b%b:h" % (self._heads[digest[0] % BUCKETS], digest)

    def cell_key(self, digest: bytes, sequence: int) -> bytes:
        return b"%b%b:%d" % (self._heads[digest[0] % BUCKETS], digest, sequence)

    def commands(self, requests: Sequence[CreditRequest]) -> list[CreditCommand]:
        """All messages in as few commands as may be. Those of one subject keep their order."""
        groups: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.digest[0] % BUCKETS if self._spreads else 0, []).append(index)
        found = []
        for bucket, indexes in groups.items():
            for start in range(0, len(indexes), MESSAGES_PER_COMMAND_MAX):
                chunk = indexes[start : start + MESSAGES_PER_COMMAND_MAX]
                found.append(CreditCommand((bucket, self._pack([requests[index] for index in chunk])), chunk))
        return found

    def _pack(self, requests: Sequence[CreditRequest]) -> bytes:
        keys: list[bytes] = []
        numbers: list[int] = []
        writers: dict[str, int] = {}
        # Most messages of a command are about the same windows.
        names: dict[int, bytes] = {}
        for request in requests:
            (
                digest,
                writer,
                number,
                duration_ms,
                cells,
                quota,
                as_of_ms,
                runs,
                want,
                held,
                life_ms,
                floor,
                step,
                generation,
                joint,
                epoch,
                alone_at_ms,
            ) = request
            place = writers.get(writer)
            if place is None:
                if not writer or writer[0] == "!":
                    raise InvalidInput("writer", writer, "at least one character, the first one not '!'")
                place = writers[writer] = len(writers) + 1
            head = b"%b%b:" % (self._heads[digest[0] % BUCKETS], digest)
            keys.append(head + b"h")
            first = cells[0][0]
            for sequence in (first + 1, *map(SEQUENCE, cells)):
                name = sequence if generation == 0 else cell_name(sequence, generation, duration_ms)
                shown = names.get(name)
                if shown is None:
                    shown = names[name] = b"%d" % name
                keys.append(head + shown)
            start_ms = first * duration_ms
            numbers += (
                place,
                number,
                duration_ms,
                quota,
                as_of_ms - start_ms,
                want,
                held,
                life_ms,
                floor,
                step,
                joint,
                epoch,
                alone_at_ms,
                len(cells),
                len(runs),
            )
            for part in cells:
                numbers += part[1:]
                numbers.append((part[0] + 3) * duration_ms)
            for at_ms, cost, count in runs:
                numbers += (at_ms - start_ms, cost, count)
        return pack((b"EVALSHA", CREDIT_SHA, len(keys), *keys, *self._rules, _doubles(numbers), *writers))


def _doubles(numbers: list[int]) -> bytes:
    """Little-endian. Each is one that the script holds exactly; nearly all are as they were given."""
    if sum(numbers) > NUMBER_MAX:
        numbers = [min(NUMBER_MAX, number) for number in numbers]
    packed = array("d", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def replies_of(
    requests: Sequence[CreditRequest], commands: Sequence[CreditCommand], answers: Sequence[Reply]
) -> tuple[list[CreditReply], int]:
    """The answers in the order of the messages, and the server's time in ms."""
    found: list[CreditReply | None] = [None] * len(requests)
    now_ms = 0
    for command, answer in zip(commands, answers, strict=True):
        cells = sum([len(requests[index].cells) for index in command.indexes])
        wanted = 1 + HEAD_NUMBERS * len(command.indexes) + CELL_NUMBERS * cells
        if not isinstance(answer, list) or len(answer) != wanted:
            raise DependencyUnavailable(
                f"the credit script answered {answer!r:.80} to {len(command.indexes)} messages"
            )
        numbers: list[int] = answer
        now_ms = numbers[0]
        at = 1
        for index in command.indexes:
            head = numbers[at : at + HEAD_NUMBERS]
            at += HEAD_NUMBERS
            totals = []
            for part in requests[index].cells:
                one = _new_totals(CellTotals, numbers[at : at + CELL_NUMBERS])
                totals.append(one if part.own <= NUMBER_MAX else _with_all_of_ours(part, one))
                at += CELL_NUMBERS
            found[index] = _new_reply(CreditReply, (*head, tuple(totals)))
    return [reply for reply in found if reply is not None], now_ms


# Twice as fast as CellTotals(…) and CreditReply(…), for a hundred answers at a time.
_new_totals: Final = cast("Callable[[type[CellTotals], list[int]], CellTotals]", tuple.__new__)
_new_reply: Final = cast("Callable[[type[CreditReply], tuple[object, ...]], CreditReply]", tuple.__new__)


def _with_all_of_ours(part: CellPart, totals: CellTotals) -> CellTotals:
    """One cell's answer, where a component beyond `NUMBER_MAX` was sent as just that, and all of it is held."""
    total, before = totals[:2]
    others = total - max(before, NUMBER_MAX)
    return totals._replace(total=others + part.own, component=before if before < NUMBER_MAX else part.own)


def parse_recall(payload: bytes) -> tuple[bytes, str] | None:
    """(digest, writer) of a recall; None when it is not one."""
    if len(payload) <= DIGEST_BYTES:
        return None
    try:
        return payload[:DIGEST_BYTES], payload[DIGEST_BYTES:].decode()
    except UnicodeDecodeError:
        return None
