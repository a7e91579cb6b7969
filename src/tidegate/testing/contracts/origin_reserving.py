"""What an origin must do with reservations: one suite, run on every origin as a part of `OriginContract`."""

from __future__ import annotations

import secrets

from tidegate.core.grants import CellPart, CreditReply, CreditRequest, Run
from tidegate.core.reservations import ENDED, ENDED_BEFORE, ENDED_MS, GONE, HELD, Claim, ClaimReply
from tidegate.ports import Origin

__all__ = ["ReservingContract"]

TIMEOUT_S = 10.0
HOUR_MS = 3_600_000
# A cell that has not expired by the clock of any origin.
SEQUENCE = 2**53 // HOUR_MS - 10


def ask(digest: bytes, writer: str, cost: int, *, quota: int = 10, number: int = 1) -> CreditRequest:
    """A message with one waiting request, at the beginning of the cell."""
    at_ms = SEQUENCE * HOUR_MS
    cells = (CellPart(SEQUENCE, 0), CellPart(SEQUENCE - 1, 0))
    runs = (Run(at_ms, cost, 1),)
    return CreditRequest(digest, writer, number, HOUR_MS, cells, quota, at_ms, runs, 0, 0, 5_000)


class ReservingContract:
    """Tests of `claim`."""

    async def take(
        self, origin: Origin, digest: bytes, holder: str, amount: int, *, quota: int = 10
    ) -> ClaimReply:
        (reply,) = await origin.exchange([ask(digest, holder, amount, quota=quota)], timeout_s=TIMEOUT_S)
        assert reply.granted == amount
        return await self.claim(origin, digest, holder, amount, is_final=False, life_ms=HOUR_MS)

    async def claim(
        self,
        origin: Origin,
        digest: bytes,
        holder: str,
        amount: int,
        *,
        is_final: bool = True,
        life_ms: int = ENDED_MS,
        sequence: int = SEQUENCE,
    ) -> ClaimReply:
        entry = Claim(digest, holder, HOUR_MS, sequence, amount, life_ms, is_final)
        (reply,) = await origin.claim([entry], timeout_s=TIMEOUT_S)
        return reply

    async def granted(
        self, origin: Origin, digest: bytes, cost: int, *, quota: int = 10, number: int = 1
    ) -> CreditReply:
        """The answer to another node that needs `cost`."""
        request = ask(digest, "other", cost, quota=quota, number=number)
        (reply,) = await origin.exchange([request], timeout_s=TIMEOUT_S)
        return reply

    async def test_a_reservation_is_taken_from_what_others_may_have(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        assert (await self.take(origin, digest, "node+1", 7)).state == HELD
        refused = await self.granted(origin, digest, 4)
        assert (refused.granted, refused.spare, refused.firm) == (0, 7, 7)
        assert (await self.granted(origin, digest, 3, number=2)).granted == 3

    async def test_usage_counts_what_is_reserved_until_it_ends_and_no_credit(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.granted(origin, digest, 2, quota=100)
        await self.take(origin, digest, "node+1", 7, quota=100)
        await self.take(origin, digest, "node+2", 4, quota=100)
        assert (await origin.usage(digest, SEQUENCE, timeout_s=TIMEOUT_S)).reserved == 11
        await self.claim(origin, digest, "node+2", 1)
        assert (await origin.usage(digest, SEQUENCE, timeout_s=TIMEOUT_S)).reserved == 7

    async def test_a_reservation_does_not_lower_the_limit_of_others(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.take(origin, digest, "node+1", 7, quota=10)
        assert (await self.granted(origin, digest, 90, quota=100)).granted == 90

    async def test_settling_lower_frees_the_rest_and_counts_what_was_used(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.take(origin, digest, "node+1", 7)
        assert await self.claim(origin, digest, "node+1", 2) == ClaimReply(ENDED, 2)
        found = await self.granted(origin, digest, 8)
        assert (found.granted, found.spare, found.cells[0].total) == (8, 0, 2)

    async def test_settling_higher_counts_all_of_it_beyond_the_limit(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.take(origin, digest, "node+1", 7)
        assert await self.claim(origin, digest, "node+1", 25) == ClaimReply(ENDED, 25)
        assert (await self.granted(origin, digest, 1)).granted == 0

    async def test_an_end_that_is_repeated_counts_nothing_in_any_window(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.take(origin, digest, "node+1", 7)
        await self.claim(origin, digest, "node+1", 2)
        assert await self.claim(origin, digest, "node+1", 5) == ClaimReply(ENDED_BEFORE, 2)
        later = await self.claim(origin, digest, "node+1", 5, sequence=SEQUENCE + 1)
        assert later == ClaimReply(ENDED_BEFORE, 0)
        again = await self.claim(origin, digest, "node+1", 5, is_final=False)
        assert again.state == ENDED_BEFORE

    async def test_what_is_released_counts_nothing(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await self.take(origin, digest, "node+1", 7)
        assert await self.claim(origin, digest, "node+1", 0) == ClaimReply(ENDED, 0)
        assert (await self.granted(origin, digest, 10)).granted == 10

    async def test_what_was_never_reserved_is_gone_and_counts_nothing(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        assert await self.claim(origin, digest, "node+1", 5) == ClaimReply(GONE, 0)
        assert await self.claim(origin, digest, "node+1", 5, is_final=False) == ClaimReply(GONE, 0)
        await self.take(origin, digest, "node+1", 2)
        assert (await self.claim(origin, digest, "node+2", 5)).state == GONE

    async def test_more_than_was_granted_is_not_kept(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await origin.exchange([ask(digest, "node+1", 3)], timeout_s=TIMEOUT_S)
        reply = await self.claim(origin, digest, "node+1", 4, is_final=False, life_ms=HOUR_MS)
        assert reply.state == GONE
        assert (await self.granted(origin, digest, 10)).granted == 10

    async def test_keeping_a_reservation_twice_changes_nothing(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        for _ in range(2):
            reply = await self.claim(origin, digest, "node+1", 3, is_final=False, life_ms=HOUR_MS)
            if reply.state == GONE:
                await self.take(origin, digest, "node+1", 3)
        assert (await self.granted(origin, digest, 8)).spare == 3

    async def test_reservations_of_one_subject_end_separately(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        for name, amount in ("node+1", 2), ("node+2", 3), ("node~4+1", 4):
            await self.take(origin, digest, name, amount)
        assert await self.claim(origin, digest, "node+2", 1) == ClaimReply(ENDED, 1)
        assert await self.claim(origin, digest, "node~4+1", 2) == ClaimReply(ENDED, 3)
        assert (await self.granted(origin, digest, 9)).spare == 2
