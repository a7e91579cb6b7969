"""What an origin must do with resets: one suite, run on every origin as a part of `OriginContract`."""

from __future__ import annotations

import secrets

from tidegate.core.generations import cell_name
from tidegate.core.grants import CellPart, CreditRequest, Run
from tidegate.core.model import Component
from tidegate.core.reservations import ENDED, Claim
from tidegate.core.resets import Reset
from tidegate.core.sharing import Share
from tidegate.ports import Origin

__all__ = ["ResetsContract"]

TIMEOUT_S = 10.0
DAY_MS = 86_400_000
# A cell, and a reset in it, that no origin has forgotten.
SEQUENCE = 2**53 // 16 // DAY_MS - 10
GENERATION = SEQUENCE * DAY_MS + 5


def reset(identifier: str, generation: int = GENERATION) -> Reset:
    return Reset("acme", "email", identifier, DAY_MS, generation)


def message(
    digest: bytes,
    own: int,
    *,
    generation: int = 0,
    cost: int = 0,
    number: int = 1,
    sequence: int = SEQUENCE,
    writer: str = "node",
) -> CreditRequest:
    """What a node has counted, and one waiting request."""
    at_ms = sequence * DAY_MS
    cells = (CellPart(sequence, own), CellPart(sequence - 1, 0))
    runs = (Run(at_ms, cost, 1),) if cost else ()
    request = CreditRequest(digest, writer, number, DAY_MS, cells, 10, at_ms, runs, 0, 0, 5_000)
    return request._replace(generation=generation)


async def latest(origin: Origin) -> int:
    """The number of the last reset."""
    number, more = 0, True
    while more:
        reply = await origin.resets([], since=number, timeout_s=TIMEOUT_S)
        number, more = reply.number, reply.more
    return number


class ResetsContract:
    """Tests of `resets`, and of cells under new names."""

    async def test_a_reset_is_answered_to_nodes_that_do_not_have_it(self, origin: Origin) -> None:
        before = await latest(origin)
        name = secrets.token_hex(8)
        first = await origin.resets([reset(name)], since=before, timeout_s=TIMEOUT_S)
        assert (first.resets, first.more) == ([reset(name)], False)
        assert first.number > before
        assert (await origin.resets([], since=before, timeout_s=TIMEOUT_S)).resets == [reset(name)]
        again = await origin.resets([], since=first.number, timeout_s=TIMEOUT_S)
        assert (again.number, again.resets) == (first.number, [])

    async def test_the_pulse_names_the_number_of_the_last_reset(self, origin: Origin) -> None:
        region = (await origin.pulse("fra", timeout_s=TIMEOUT_S)).region
        await origin.resets([reset(secrets.token_hex(8))], since=0, timeout_s=TIMEOUT_S)
        assert (await origin.pulse(region, timeout_s=TIMEOUT_S)).resets == await latest(origin)

    async def test_the_latest_reset_of_a_counter_is_kept_in_any_order(self, origin: Origin) -> None:
        since = await latest(origin)
        name = secrets.token_hex(8)
        for generation in (GENERATION + 1, GENERATION + 3, GENERATION + 2, GENERATION + 3):
            await origin.resets([reset(name, generation)], since=since, timeout_s=TIMEOUT_S)
        reply = await origin.resets([], since=since, timeout_s=TIMEOUT_S)
        assert reply.resets == [reset(name, GENERATION + 3)]

    async def test_a_repeated_reset_gets_no_new_number(self, origin: Origin) -> None:
        await origin.resets([reset("same")], since=0, timeout_s=TIMEOUT_S)
        since = await latest(origin)
        assert (await origin.resets([reset("same")], since=since, timeout_s=TIMEOUT_S)).number == since

    async def test_a_call_whose_number_is_higher_than_the_last_one_learns_that_resets_were_lost(
        self, origin: Origin
    ) -> None:
        since = await latest(origin)
        late = reset(secrets.token_hex(8))
        reply = await origin.resets([late], since=2**52, timeout_s=TIMEOUT_S)
        assert (reply.number, reply.resets) == (0, [])
        assert (await origin.resets([], since=since, timeout_s=TIMEOUT_S)).resets == [late]

    async def test_a_reset_that_is_over_is_not_kept(self, origin: Origin) -> None:
        since = await latest(origin)
        over = reset("over", generation=1)
        reply = await origin.resets([over], since=since, timeout_s=TIMEOUT_S)
        assert (reply.number, reply.resets) == (since, [])

    async def test_numbers_begin_with_the_time_so_that_they_rise_over_a_wipe(self, origin: Origin) -> None:
        await origin.resets([reset(secrets.token_hex(8))], since=0, timeout_s=TIMEOUT_S)
        clock_ms = (await origin.pulse("fra", timeout_s=TIMEOUT_S)).time_ms
        assert abs(await latest(origin) - clock_ms) < 60_000

    async def test_names_are_kept_to_the_character(self, origin: Origin) -> None:
        since = await latest(origin)
        names = ["", 'a"b\\c', "ä€😀", "\x00\r\n", "\ud800", "x" * 512]
        wanted = [Reset(f"w{name}", f"n{name}", f"i{name}", DAY_MS, GENERATION) for name in names]
        reply = await origin.resets(wanted, since=since, timeout_s=TIMEOUT_S)
        assert reply.resets == wanted

    async def test_many_resets_come_in_several_answers(self, origin: Origin) -> None:
        since = await latest(origin)
        wanted = [reset(f"{secrets.token_hex(4)}-{index}") for index in range(1_200)]
        for start in range(0, len(wanted), 250):
            await origin.resets(wanted[start : start + 250], since=since, timeout_s=TIMEOUT_S)
        found: list[Reset] = []
        more = True
        while more:
            reply = await origin.resets([], since=since, timeout_s=TIMEOUT_S)
            found += reply.resets
            since, more = reply.number, reply.more
        assert found == wanted

    async def test_a_new_generation_begins_at_zero_and_late_messages_of_the_old_one_change_nothing(
        self, origin: Origin
    ) -> None:
        digest = secrets.token_bytes(16)
        await origin.exchange([message(digest, 10)], timeout_s=TIMEOUT_S)
        (refused,) = await origin.exchange([message(digest, 10, cost=1, number=2)], timeout_s=TIMEOUT_S)
        assert refused.granted == 0
        fresh = message(digest, 0, cost=8, number=3, generation=GENERATION)
        (reply,) = await origin.exchange([fresh], timeout_s=TIMEOUT_S)
        assert (reply.granted, reply.cells[0].total) == (8, 0)
        counted = message(digest, 8, number=4, generation=GENERATION)
        await origin.exchange([counted], timeout_s=TIMEOUT_S)
        # Late: an old message of this node, and one of another that does not know the reset.
        for late in (message(digest, 10, number=2), message(digest, 7, writer="late")):
            await origin.exchange([late], timeout_s=TIMEOUT_S)
        (reply,) = await origin.exchange([counted._replace(number=5)], timeout_s=TIMEOUT_S)
        assert reply.cells[0].total == 8

    async def test_the_previous_cell_of_a_later_one_is_that_of_the_reset(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        await origin.exchange([message(digest, 10, sequence=SEQUENCE + 1)], timeout_s=TIMEOUT_S)
        counted = message(digest, 4, number=2, sequence=SEQUENCE + 1, generation=GENERATION)
        await origin.exchange([counted], timeout_s=TIMEOUT_S)
        later = message(digest, 0, cost=6, number=3, sequence=SEQUENCE + 2, generation=GENERATION)
        (reply,) = await origin.exchange([later], timeout_s=TIMEOUT_S)
        assert (reply.cells[0].total, reply.cells[1].total) == (0, 4)
        assert reply.granted == 6

    async def test_components_shares_and_claims_of_a_generation_are_one_cell(self, origin: Origin) -> None:
        digest = secrets.token_bytes(16)
        name = cell_name(SEQUENCE, GENERATION, DAY_MS)
        expires_at_ms = (SEQUENCE + 3) * DAY_MS
        old = Component(digest, SEQUENCE, "other", 9, expires_at_ms)
        await origin.merge([old, Component(digest, name, "other", 2, expires_at_ms)], timeout_s=TIMEOUT_S)
        share = Share(digest, DAY_MS, SEQUENCE, "nyc", 3, "node", 0, GENERATION)
        (shared,) = await origin.share([share], timeout_s=TIMEOUT_S)
        assert (shared.total, shared.foreign) == (2, 3)
        ask = message(digest, 0, cost=4, generation=GENERATION, writer="node+1")
        await origin.exchange([ask], timeout_s=TIMEOUT_S)
        claim = Claim(digest, "node+1", DAY_MS, SEQUENCE, 4, 60_000, True, GENERATION)
        (claimed,) = await origin.claim([claim], timeout_s=TIMEOUT_S)
        assert (claimed.state, claimed.total) == (ENDED, 6)
        (reply,) = await origin.exchange(
            [message(digest, 0, generation=GENERATION, number=9)], timeout_s=TIMEOUT_S
        )
        assert (reply.cells[0].total, reply.cells[0].foreign) == (6, 3)
