"""Messages about one subject that nodes might send, and some that no node sends. All origins must give the same
answers."""

from __future__ import annotations

from random import Random
from secrets import token_bytes

from tidegate.core.grants import CellPart, CreditReply, CreditRequest, Hold, Run, SubjectRecord
from tidegate.core.sharing import Share

# Later than the wall clock of any test run, because Redis expires keys by its own clock.
START_MS = 4_000_000_000_000


def hold_numbers(hold: Hold) -> tuple[int, ...]:
    return (
        hold.number,
        hold.spare,
        hold.firm,
        hold.firm_until_ms,
        hold.quota,
        hold.expires_at_ms,
        hold.recalled_at_ms,
    )


WRITERS = ("a", "b", "b~7", "b~12", "c")


class Steps:
    """A random sequence of such messages."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.digest = token_bytes(16)
        self.duration_ms = random.choice((1_000, 7_919, 60_000, 86_400_000))
        self.size = random.choice((3, 20, 1_000, 50_000_000))
        self.now_ms = START_MS
        self.number = 10
        self.own: dict[tuple[str, int], int] = {}
        self.ids: dict[int, int] = {}

    def next(self) -> tuple[int, CreditRequest]:
        random = self.random
        self.now_ms += random.choice((0, 0, 1, 2, 5, 49, 50, 99, 100, 5_000, 6_000))
        self.number += 1
        writer = random.choice(WRITERS)
        start = START_MS // self.duration_ms
        sequence = start + random.randrange(3)
        cells = [self.part(writer, sequence), self.part(writer, sequence - 1)]
        if random.random() < 0.3:
            cells.append(self.part(writer, start + random.randrange(-3, 4)))
        elapsed_ms = random.randrange(self.duration_ms)
        runs = tuple(
            Run(
                sequence * self.duration_ms + random.randrange(elapsed_ms + 1),
                random.randint(1, max(1, self.size // 4)),
                random.randint(1, 5),
            )
            for _ in range(random.choice((0, 0, 1, 1, 3)))
        )
        return self.now_ms, CreditRequest(
            self.digest,
            writer,
            self.number - random.choice((0, 0, 0, 1, 3)),
            self.duration_ms,
            tuple(cells),
            random.choice((1, 1, 2)) * self.size,
            sequence * self.duration_ms + elapsed_ms,
            runs,
            random.choice((0, 1, self.size // 3, self.size)),
            random.choice((0, 0, self.size // 5)),
            random.choice((0, 5_000, 5_000, 100)),
            random.choice((0, 1, self.size // 5)),
            random.choice((0, 1, self.size // 8)),
            joint=random.choice((0, 0, 1, self.size // 6)),
            epoch=random.choice((0, 0, 0, 1)),
            alone_at_ms=random.choice((0, 1, self.now_ms, self.now_ms + 1)),
        )

    def next_share(self) -> tuple[int, Share]:
        """What an importer or a publisher might report about one of its cells."""
        random = self.random
        self.now_ms += random.choice((0, 0, 1, 2, 99, 100, 250, 1_999, 2_000))
        return self.now_ms, Share(
            self.digest,
            self.duration_ms,
            START_MS // self.duration_ms + random.randrange(-1, 3),
            random.choice(("", "", "eu", "us", "\N{SNOWMAN}")),
            random.choice((0, 1, random.randrange(self.size), self.size)),
            random.choice(("a", "b", "c")),
            random.choice((0, 0, 0, 1)),
        )

    def drop_aged(self, record: SubjectRecord) -> None:
        """Drop aged cells, as origins do that use the time of the test."""
        for sequence in [q for q in record.cells if (q + 3) * self.duration_ms <= self.now_ms]:
            del record.cells[sequence]

    def part(self, writer: str, sequence: int) -> CellPart:
        random = self.random
        key = (writer, sequence)
        self.own[key] = self.own.get(key, 0) + random.choice((0, 0, 1, self.size // 7))
        own = max(0, self.own[key] - random.choice((0, 0, 1)))
        known = own + random.choice((0, 0, 0, self.size // 10))
        acked, sent = sorted(random.choice((0, own // 2, own, own + 1)) for _ in range(2))
        published = random.choice((0, 0, own // 3, own))
        # The id of this record, if the test knows it; of an earlier one; of a later one; or none.
        id_ = random.choice((0, 7, self.ids.get(sequence, 0), self.ids.get(sequence, 0), self.now_ms + 1))
        return CellPart(
            sequence, own, known, random.choice((0, 0, self.size // 9)), acked, sent, published, known, id_
        )

    def answered(self, request: CreditRequest, reply: CreditReply) -> None:
        """The answer names the records, which later messages repeat."""
        for part, totals in zip(request.cells, reply.cells, strict=True):
            self.ids[part.sequence] = totals.id
