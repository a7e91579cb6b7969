from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from random import Random
from secrets import token_bytes

import hiredis
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.contract.credit_steps import START_MS, Steps, hold_numbers
from tidegate.adapters.redis.credit import CreditLayout, parse_recall, replies_of
from tidegate.adapters.redis.scripts import CREDIT_SCRIPT, SHARE_SCRIPT
from tidegate.adapters.redis.sharing import replies_of_shares, share_commands
from tidegate.adapters.redis.wire import pack
from tidegate.core.grants import (
    CellPart,
    CreditReply,
    CreditRequest,
    GrantRules,
    Run,
    SubjectRecord,
    grant,
    share,
)
from tidegate.core.sharing import Share, ShareReply
from tidegate.core.windows import carried
from tidegate.testing import RedisServer

pytestmark = pytest.mark.server

RULES = GrantRules()
LAYOUT = CreditLayout("t", RULES, spreads=False)
# The script with the time as its last argument: what depends on time can then be compared with the rule in Python.
CLOCK = """local clock = call('TIME')
local now = number(clock[1]) * 1000 + (number(clock[2]) - fmod(number(clock[2]), 1000)) / 1000
"""
assert CLOCK in CREDIT_SCRIPT
TIMED_SCRIPT = CREDIT_SCRIPT.replace(CLOCK, "local now = number(ARGV[#ARGV])\n")
assert CLOCK in SHARE_SCRIPT
TIMED_SHARE_SCRIPT = SHARE_SCRIPT.replace(CLOCK, "local now = number(ARGV[#ARGV])\n")
EXACT = 2**53


class Connection:
    """A blocking connection that takes and gives bytes."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.create_connection((server.host, server.port), timeout=5)
        self._reader = hiredis.Reader()

    def call(self, *words: bytes | str | int) -> object:
        self._socket.sendall(pack(words))
        return self.read()

    def read(self) -> object:
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        assert not isinstance(reply, hiredis.ReplyError), reply
        return reply

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module", params=["redis_server", "valkey_server"])
def server(request: pytest.FixtureRequest) -> RedisServer:
    found: RedisServer = request.getfixturevalue(request.param)
    found.recover()  # another test may have left it dead or frozen
    return found


@pytest.fixture(scope="module")
def redis(server: RedisServer) -> Iterator[Connection]:
    connection = Connection(server)
    yield connection
    connection.close()


def words_of(requests: Sequence[CreditRequest]) -> list[bytes]:
    """The command that the layout makes of the messages, as words."""
    (command,) = LAYOUT.commands(requests)
    return unpacked(command.command[1])


def unpacked(command: bytes) -> list[bytes]:
    reader = hiredis.Reader()
    reader.feed(command)
    words = reader.gets()
    assert isinstance(words, list)
    return words


def share_at(redis: Connection, now_ms: int, entry: Share) -> ShareReply:
    (command,) = commands = share_commands(LAYOUT, RULES, [entry], spreads=False)
    answer = redis.call("EVAL", TIMED_SHARE_SCRIPT, *unpacked(command.command[1])[2:], now_ms)
    return replies_of_shares([entry], commands, [answer])[0]


def ask_at(redis: Connection, now_ms: int, *requests: CreditRequest) -> list[CreditReply]:
    """Answer the messages with the script, at a time of the test's choice."""
    words = words_of(requests)
    answer = redis.call("EVAL", TIMED_SCRIPT, *words[2:], now_ms)
    replies, answered_ms = replies_of(requests, LAYOUT.commands(requests), [answer])
    assert answered_ms == now_ms
    return replies


def holds_in(redis: Connection, digest: bytes) -> dict[str, tuple[int, ...]]:
    flat = redis.call("HGETALL", LAYOUT.holds_key(digest))
    assert isinstance(flat, list)
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): tuple(map(int, struct.unpack("<7d", value))) for name, value in pairs if name}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_the_script_answers_every_message_as_the_rule_in_python_does(redis: Connection, seed: int) -> None:
    steps = Steps(Random(seed))
    record = SubjectRecord()
    for _ in range(40):
        now_ms, request = steps.next()
        expected, _ = grant(record, request, now_ms, RULES)
        assert ask_at(redis, now_ms, request) == [expected]
        steps.answered(request, expected)
        assert holds_in(redis, request.digest) == {w: hold_numbers(h) for w, h in record.holds.items()}
    for sequence, cell in record.cells.items():
        found = redis.call("HGETALL", LAYOUT.cell_key(steps.digest, sequence))
        assert isinstance(found, list)
        pairs = zip(found[::2], found[1::2], strict=True)
        shared = (b"!foreign", b"!published")
        held = {name.decode(): value.decode() for name, value in pairs if not name.startswith(shared)}
        kept = {"": str(cell.total), "!id": str(cell.id)} if cell.id else {}
        for writer, own in cell.components.items():
            node, mark, life = writer.partition("~")
            kept[node] = f"{own}{mark}{life}"
        if cell.base or cell.returned or "!base" in held:
            kept |= {"!base": str(cell.base), "!returned": str(cell.returned)}
        assert held == kept


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_counts_of_the_ledger_are_shared_as_the_rule_in_python_does(redis: Connection, seed: int) -> None:
    steps = Steps(Random(seed))
    record = SubjectRecord()
    for _ in range(40):
        if steps.random.random() < 0.5:
            now_ms, request = steps.next()
            assert ask_at(redis, now_ms, request) == [grant(record, request, now_ms, RULES)[0]]
        else:
            now_ms, entry = steps.next_share()
            assert share_at(redis, now_ms, entry) == share(record, entry, now_ms, RULES)[0]
        held = {w: hold_numbers(h) for w, h in record.holds.items() if h.expires_at_ms > now_ms}
        found = holds_in(redis, steps.digest)
        assert {w: numbers for w, numbers in found.items() if numbers[5] > now_ms} == held


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_many_subjects_in_one_command_are_answered_as_one_by_one(redis: Connection, seed: int) -> None:
    random = Random(seed)
    worlds = [Steps(random) for _ in range(5)]
    records = [SubjectRecord() for _ in worlds]
    for _ in range(5):
        now_ms = max(world.now_ms for world in worlds)
        requests = [world.next()[1] for world in worlds]
        expected = [
            grant(record, request, now_ms, RULES)[0]
            for record, request in zip(records, requests, strict=True)
        ]
        assert ask_at(redis, now_ms, *requests) == expected


def alone(
    digest: bytes, previous: int, current: int, elapsed_ms: int, duration_ms: int, quota: int
) -> CreditRequest:
    """A message of the only writer that wants all there is: it is granted `quota` less what is used."""
    sequence = START_MS // duration_ms
    cells = (CellPart(sequence, current), CellPart(sequence - 1, previous))
    as_of_ms = sequence * duration_ms + elapsed_ms
    return CreditRequest(digest, "a", 1, duration_ms, cells, quota, as_of_ms, (), EXACT, 0, 5_000)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_usage_in_the_script_is_the_formula_of_windows(redis: Connection, data: st.DataObject) -> None:
    duration_ms = data.draw(st.integers(1_000, 2**41))
    elapsed_ms = data.draw(st.integers(0, duration_ms - 1))
    previous = data.draw(st.integers(0, (EXACT - 1) // duration_ms))
    current = data.draw(st.integers(0, 2**50))
    quota = data.draw(st.integers(current + previous + 1, EXACT))
    (reply,) = ask_at(
        redis,
        START_MS,
        alone(token_bytes(16), previous, current, elapsed_ms, duration_ms, quota),
    )
    assert quota - reply.granted == current + carried(previous, elapsed_ms, duration_ms)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_usage_beyond_exact_numbers_is_rounded_up_by_very_little(
    redis: Connection, data: st.DataObject
) -> None:
    duration_ms = data.draw(st.integers(1_000, 2**45))
    elapsed_ms = data.draw(st.integers(0, duration_ms - 1))
    previous = data.draw(st.integers(EXACT // duration_ms, EXACT - 1))
    quota = EXACT
    (reply,) = ask_at(redis, START_MS, alone(token_bytes(16), previous, 0, elapsed_ms, duration_ms, quota))
    exact = carried(previous, elapsed_ms, duration_ms)
    assert exact <= quota - reply.granted <= exact + exact // 2**48 + 3


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Of each writer: in the running window, and in the one before, of which a quota below 2^53 sees 2^53 at most.
    counts=st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, EXACT)), min_size=2, max_size=2),
    quota=st.integers(1, 2**62),
)
@example(counts=[(0, EXACT), (0, 0)], quota=2**52 + 4)
def test_huge_numbers_never_grant_more_than_the_rule(
    redis: Connection, counts: list[tuple[int, int]], quota: int
) -> None:
    digest = token_bytes(16)
    record = SubjectRecord()
    sequence = START_MS // 60_000
    for number, (writer, (running, before)) in enumerate(zip("ab", counts, strict=True), start=1):
        cells = (CellPart(sequence, running), CellPart(sequence - 1, before))
        run = Run(START_MS, max(1, quota // 3), 2)
        request = CreditRequest(
            digest, writer, number, 60_000, cells, quota, START_MS, (run,), quota, 0, 5_000
        )
        expected, _ = grant(record, request, START_MS, RULES)
        (reply,) = ask_at(redis, START_MS, request)
        assert 0 <= reply.granted <= expected.granted
        for totals, part in zip(reply.cells, cells, strict=True):
            assert totals.component <= part.own or totals.component == 0


def test_recalls_are_pushed_to_the_channel_of_the_node_that_holds(
    redis: Connection, server: RedisServer
) -> None:
    listener = Connection(server)
    listener.call("SUBSCRIBE", LAYOUT.channel("b"))
    digest = token_bytes(16)
    sequence = START_MS // 60_000
    cells = (CellPart(sequence, 0), CellPart(sequence - 1, 0))
    holder = CreditRequest(digest, "b~7", 1, 60_000, cells, 10, START_MS, (), 10, 0, 5_000)
    assert ask_at(redis, START_MS, holder)[0].granted == 10
    blocked = CreditRequest(digest, "a", 2, 60_000, cells, 10, START_MS, (Run(START_MS, 1, 1),), 1, 0, 5_000)
    assert ask_at(redis, START_MS + 1, blocked)[0].granted == 0
    message = listener.read()
    assert isinstance(message, list)
    assert parse_recall(message[2]) == (digest, "b~7")
    # Once in two milliseconds, however often it is asked.
    assert ask_at(redis, START_MS + 2, blocked._replace(number=3))[0].granted == 0
    assert holds_in(redis, digest)["b~7"][6] == START_MS + 1
    assert ask_at(redis, START_MS + 3, blocked._replace(number=4))[0].granted == 0
    assert isinstance(listener.read(), list)
    listener.close()


def test_damaged_keys_are_repaired(redis: Connection) -> None:
    digest = token_bytes(16)
    sequence = START_MS // 60_000
    cells = (CellPart(sequence, 3), CellPart(sequence - 1, 4))
    request = CreditRequest(digest, "a", 1, 60_000, cells, 10, START_MS, (), 0, 0, 5_000)
    keys = (
        LAYOUT.holds_key(digest),
        LAYOUT.cell_key(digest, sequence),
        LAYOUT.cell_key(digest, sequence + 1),
    )
    for key in keys:
        redis.call("SET", key, "damage")
    (reply,) = ask_at(redis, START_MS, request)
    assert [cell.total for cell in reply.cells] == [3, 4]
    redis.call("HSET", keys[0], "b", "short")
    assert ask_at(redis, START_MS, request._replace(number=2))[0].spare == 0


def test_holds_and_cells_expire_by_themselves(redis: Connection) -> None:
    digest = token_bytes(16)
    sequence = START_MS // 60_000
    cells = (CellPart(sequence, 3), CellPart(sequence - 1, 0))
    request = CreditRequest(digest, "a", 1, 60_000, cells, 10, START_MS, (), 5, 0, 5_000)
    ask_at(redis, START_MS, request)
    assert redis.call("PEXPIRETIME", LAYOUT.holds_key(digest)) == START_MS + 6_000
    assert redis.call("PEXPIRETIME", LAYOUT.cell_key(digest, sequence)) == (sequence + 3) * 60_000
    assert redis.call("EXISTS", LAYOUT.cell_key(digest, sequence - 1)) == 0


def test_what_other_regions_published_counts_when_the_origin_holds_it(redis: Connection) -> None:
    digest = token_bytes(16)
    sequence = START_MS // 60_000
    redis.call("HSET", LAYOUT.cell_key(digest, sequence), "!foreign", 7)
    cells = (CellPart(sequence, 0, 0, 2), CellPart(sequence - 1, 0))
    request = CreditRequest(digest, "a", 1, 60_000, cells, 10, START_MS, (), 10, 0, 5_000)
    (reply,) = ask_at(redis, START_MS, request)
    assert reply.granted == 3
    assert reply.cells[0].foreign == 7


def test_the_script_as_it_is_reads_the_servers_clock(redis: Connection) -> None:
    digest = token_bytes(16)
    cells = (CellPart(28_000_000, 0), CellPart(27_999_999, 0))
    request = CreditRequest(digest, "a", 1, 60_000, cells, 10, 28_000_000 * 60_000, (), 0, 0, 5_000)
    answer = redis.call("EVAL", CREDIT_SCRIPT, *words_of([request])[2:])
    _, now_ms = replies_of([request], LAYOUT.commands([request]), [answer])
    seconds = redis.call("TIME")
    assert isinstance(seconds, list)
    assert abs(now_ms - int(seconds[0]) * 1_000) < 60_000
