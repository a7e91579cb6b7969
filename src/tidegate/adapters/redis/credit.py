"""How credit is stored in Redis: the keys of a message, the command that carries many, and what its answer means. Pure.

A subject's holds are at the key of its cells with `h` in place of a sequence: the same tag, so the same slot of a Redis
Cluster, and one script answers both. What `credit.lua` cannot count exactly is cut in requests (`NUMBER_MAX`) and
restored in replies, as in `layout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidegate.adapters.redis.layout import BUCKETS, NUMBER_MAX, TAGS, Command
from tidegate.adapters.redis.scripts import CREDIT_SHA
from tidegate.adapters.redis.wire import Reply, pack
from tidegate.core.generations import cell_name
from tidegate.core.grants import CellPart, CellTotals, CreditReply, CreditRequest, GrantRules, Run
from tidegate.errors import DependencyUnavailable, InvalidInput

__all__ = ["CreditCommand", "CreditLayout", "parse_recall", "replies_of"]

# A script holds up every other client of its server while it runs: 100 messages take it about two milliseconds.
MESSAGES_PER_COMMAND_MAX: Final = 100

DIGEST_BYTES: Final = 16
# Numbers of an answer before those of its cells, and for each cell.
HEAD_NUMBERS: Final = 5
CELL_NUMBERS: Final = 7


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
        words: list[bytes | str | int] = []
        before = ""
        for request in map(_cut, requests):
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
            ) = request
            if not writer or writer[0] == "!":
                raise InvalidInput("writer", writer, "at least one character, the first one not '!'")
            start_ms = cells[0].sequence * duration_ms
            head = b"%b%b:" % (self._heads[digest[0] % BUCKETS], digest)
            following = cell_name(cells[0].sequence + 1, generation, duration_ms)
            keys += (b"%bh" % head, b"%b%d" % (head, following))
            words += (
                b"" if writer == before else writer,
                number,
                duration_ms,
                quota,
                as_of_ms - start_ms,
                want,
                held,
                life_ms,
                min(NUMBER_MAX, floor),
                min(NUMBER_MAX, step),
                len(cells),
                len(runs),
            )
            before = writer
            for sequence, *numbers in cells:
                keys.append(b"%b%d" % (head, cell_name(sequence, generation, duration_ms)))
                expires_at_ms = (sequence + 3) * duration_ms
                words += (*numbers, min(NUMBER_MAX, expires_at_ms))
            for at_ms, cost, count in runs:
                words += (at_ms - start_ms, cost, count)
        return pack((b"EVALSHA", CREDIT_SHA, len(keys), *keys, *self._rules, *words))


def _cut(request: CreditRequest) -> CreditRequest:
    """Numbers that the script holds exactly. Nearly all messages stay as they are."""
    highest = max(
        request.duration_ms,
        request.quota,
        request.want,
        request.held,
        request.life_ms,
        *[max(part[1:]) for part in request.cells],
        *[cost for _, cost, _ in request.runs],
    )
    if highest <= NUMBER_MAX:
        return request
    return request._replace(
        duration_ms=min(NUMBER_MAX, request.duration_ms),
        quota=min(NUMBER_MAX, request.quota),
        want=min(NUMBER_MAX, request.want),
        held=min(NUMBER_MAX, request.held),
        life_ms=min(NUMBER_MAX, request.life_ms),
        cells=tuple(
            CellPart(part.sequence, *[min(NUMBER_MAX, number) for number in part[1:]])
            for part in request.cells
        ),
        runs=tuple(Run(run.at_ms, min(NUMBER_MAX, run.cost), run.requests) for run in request.runs),
    )


def replies_of(
    requests: Sequence[CreditRequest], commands: Sequence[CreditCommand], answers: Sequence[Reply]
) -> tuple[list[CreditReply], int]:
    """The answers in the order of the messages, and the server's time in ms."""
    found: list[CreditReply | None] = [None] * len(requests)
    now_ms = 0
    for command, answer in zip(commands, answers, strict=True):
        wanted = 1 + sum(HEAD_NUMBERS + CELL_NUMBERS * len(requests[i].cells) for i in command.indexes)
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
                totals.append(_totals(part, *numbers[at : at + CELL_NUMBERS]))
                at += CELL_NUMBERS
            granted, spare, firm, stuck, stuck_ms = head
            found[index] = CreditReply(granted, spare, firm, stuck, stuck_ms, tuple(totals))
    return [reply for reply in found if reply is not None], now_ms


def _totals(part: CellPart, total: int, before: int, *ledger: int) -> CellTotals:
    """One cell's answer. A component beyond `NUMBER_MAX` was sent as just that, and all of it is held."""
    if part.own > NUMBER_MAX:
        others = total - max(before, NUMBER_MAX)
        return CellTotals(others + part.own, before if before < NUMBER_MAX else part.own, *ledger)
    return CellTotals(total, before, *ledger)


def parse_recall(payload: bytes) -> tuple[bytes, str] | None:
    """(digest, writer) of a recall; None when it is not one."""
    if len(payload) <= DIGEST_BYTES:
        return None
    try:
        return payload[:DIGEST_BYTES], payload[DIGEST_BYTES:].decode()
    except UnicodeDecodeError:
        return None
