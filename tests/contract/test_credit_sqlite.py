from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.credit_nodes import TIMEOUT_S, RealWorld, check_the_quota_passes_exactly
from tests.contract.credit_steps import Steps, hold_numbers
from tests.contract.origin_places import SetClock
from tidegate.adapters.memory import MemoryOrigin
from tidegate.adapters.sqlite.credit import CREDIT_RULES, CREDIT_SCHEMA, answer, answer_shares
from tidegate.adapters.sqlite.origin import SCHEMA, SQLiteOrigin
from tidegate.core.grants import CellPart, CreditRequest, Run, SubjectRecord, grant, share
from tidegate.errors import ConfigurationError

ROOT = Path(__file__).parents[2]

# A process with one node: it asks until the window is full, and prints how much it was allowed.
PROCESS = """
import asyncio, sys
from tests.contract.credit_nodes import RealWorld
from tidegate.adapters.sqlite.origin import SQLiteOrigin

async def main(path, digest, writer, quota):
    origin = SQLiteOrigin(path)
    await origin.open("fra", timeout_s=10)
    world = RealWorld([origin], quota=quota, digest=bytes.fromhex(digest), writer=writer)
    await asyncio.to_thread(sys.stdin.readline)
    await world.exhaust()
    print(world.judge.units, world.judge.over)
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    await world.close()
    await origin.close()

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
"""


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_the_file_answers_every_message_as_the_rule_does(seed: int) -> None:
    steps = Steps(Random(seed))
    record = SubjectRecord()
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        for _ in range(40):
            if steps.random.random() < 0.4:
                now_ms, entry = steps.next_share()
                steps.drop_aged(record)
                shared, recalled = share(record, entry, now_ms, CREDIT_RULES)
                answers, recalls = answer_shares(connection, [entry], now_ms)
                steps.drop_aged(record)
                assert answers == [shared]
                assert sorted(recalls) == sorted((entry.digest, writer) for writer in recalled)
                continue
            now_ms, request = steps.next()
            steps.drop_aged(record)
            expected, recalled = grant(record, request, now_ms, CREDIT_RULES)
            replies, recalls = answer(connection, [request], now_ms)
            assert replies == [expected]
            steps.answered(request, expected)
            assert sorted(recalls) == sorted((request.digest, writer) for writer in recalled)
            rows = connection.execute("SELECT * FROM origin_holds WHERE expires_at_ms > ?", (now_ms,))
            held = {row[1]: row[2:9] for row in rows}
            assert held == {writer: hold_numbers(hold) for writer, hold in record.holds.items()}


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_the_memory_origin_answers_every_message_as_the_rule_does(seed: int) -> None:
    steps = Steps(Random(seed))
    record = SubjectRecord()
    clock = SetClock()
    origin = MemoryOrigin(clock=clock)
    for _ in range(40):
        if steps.random.random() < 0.4:
            clock.at_ms, entry = steps.next_share()
            steps.drop_aged(record)
            shared, recalled = share(record, entry, clock.at_ms, origin.rules)
            answers, recalls = origin.share_nowait([entry])
            steps.drop_aged(record)
            assert answers == [shared]
            assert recalls == [(entry.digest, writer) for writer in recalled]
            continue
        clock.at_ms, request = steps.next()
        steps.drop_aged(record)
        expected, recalled = grant(record, request, clock.at_ms, origin.rules)
        replies, recalls = origin.exchange_nowait([request])
        assert replies == [expected]
        steps.answered(request, expected)
        assert recalls == [(request.digest, writer) for writer in recalled]


def test_the_memory_origin_deletes_expired_holds() -> None:
    steps = Steps(Random(1))
    clock = SetClock()
    origin = MemoryOrigin(clock=clock)
    for _ in range(40):
        clock.at_ms, request = steps.next()
        origin.exchange_nowait([request])
    clock.at_ms += 10 * steps.duration_ms + 10_000
    origin.read_nowait([])
    assert not origin._store.records


def test_expired_holds_are_deleted_from_the_file(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "origin.db", isolation_level=None)) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        steps = Steps(Random(1))
        for _ in range(10):
            now_ms, request = steps.next()
            answer(connection, [request], now_ms)
        for number in range(20):
            other = Steps(Random(number)).next()[1]
            answer(connection, [other], steps.now_ms + 60_000)
        (count,) = connection.execute(
            "SELECT count(*) FROM origin_holds WHERE digest = ?", (steps.digest,)
        ).fetchone()
        assert count == 0


@pytest.mark.parametrize("count", [1, 4])
async def test_exactly_the_quota_passes_over_one_file(tmp_path: Path, count: int) -> None:
    origins = [SQLiteOrigin(tmp_path / "origin.db") for _ in range(count)]
    await check_the_quota_passes_exactly(origins)
    for origin in origins:
        await origin.close()


async def test_exactly_the_quota_passes_in_memory() -> None:
    first = MemoryOrigin()
    await check_the_quota_passes_exactly([first, first.another(), first.another()])


@pytest.mark.parametrize("quota", [6, 100])
async def test_exactly_the_quota_passes_over_several_processes(tmp_path: Path, quota: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    digest = os.urandom(16).hex()
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROCESS, str(tmp_path / "origin.db"), digest, f"process{i}", str(quota)),
            env=environment,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for i in range(4)
    ]
    async with asyncio.timeout(60):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        accepted = 0
        for process in processes:
            assert process.stdout is not None
            accepted += int((await process.stdout.readline()).split()[0])
        assert accepted == quota
        for process in processes:
            await process.communicate(b"end\n")
            assert process.returncode == 0


async def test_a_datagram_without_the_secret_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "origin.db"
    origin = SQLiteOrigin(path)
    world = RealWorld([origin], quota=10)
    await world.ask(0)
    async with asyncio.timeout(TIMEOUT_S):
        while not origin.can_be_recalled:  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.001)
    with closing(sqlite3.connect(path)) as connection:
        ((port, secret),) = connection.execute("SELECT port, secret FROM origin_listeners")
    recalls: list[bytes] = []
    world.nodes[0].on_recall = lambda at_us: recalls.append(b"")  # type: ignore[method-assign]  # observed
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
        for payload in (b"", b"x" * 60, secret, secret + world.digest, secret + world.digest + b"\xff"):
            sender.sendto(payload, ("127.0.0.1", port))
        sender.sendto(secret + world.digest + b"node0", ("127.0.0.1", port))
    async with asyncio.timeout(TIMEOUT_S):
        while not recalls:  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.001)
    await world.close()
    await origin.close()
    assert len(recalls) == 1


async def test_a_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "origin.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    origin = SQLiteOrigin(path)
    with pytest.raises(ConfigurationError, match=r"record format 2; this one knows 1.*update this node"):
        await origin.open("fra", timeout_s=TIMEOUT_S)
    await origin.close()


async def test_huge_counts_are_answered_without_loss(tmp_path: Path) -> None:
    origin = SQLiteOrigin(tmp_path / "origin.db", clock=SetClock())
    sequence = SetClock().now_ms() // 60_000
    cells = (CellPart(sequence, 2**70, 2**70), CellPart(sequence - 1, 5))
    run = Run(sequence * 60_000, 1, 1)
    request = CreditRequest(
        bytes(16), "a", 1, 60_000, cells, 2**71, sequence * 60_000, (run,), 2**69, 0, 1_000
    )
    (reply,) = await origin.exchange([request], timeout_s=TIMEOUT_S)
    assert reply.granted == 0
    (reply,) = await origin.exchange([request._replace(number=2)], timeout_s=TIMEOUT_S)
    assert reply.cells[0].total == reply.cells[0].component == 2**70
    await origin.close()


def test_the_schema_of_credit_is_part_of_the_files() -> None:
    assert set(CREDIT_SCHEMA) < set(SCHEMA)
