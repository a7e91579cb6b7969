from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.harness import TidegateServer, eventually
from tidegate.core.model import Request, make_limit
from tidegate.errors import ConfigurationError
from tidegate.server.process.config import ConfigFaults
from tidegate.server.process.config_load import check_files, load
from tidegate.server.process.decision_log import PENDING_MAX, DecisionLog, RecordingLimiter
from tidegate.telemetry.decisions import Sampling, read_records

LIMIT = make_limit(3, 60_000, "rlns_1", "acme")
NOW_MS = 1_700_000_000_000


def name_of(_workspace: str, namespace_id: str) -> str:
    return {"rlns_1": "api"}.get(namespace_id, namespace_id)


def new_log(directory: Path, *, bytes_max: int = 1_000_000, sampling: Sampling | None = None) -> DecisionLog:
    log = DecisionLog(directory, sampling or Sampling(1.0), bytes_max, name_of)
    log.open()
    return log


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.jsonl"))


async def test_every_kind_of_decision_is_recorded_once_and_cost_zero_is_not(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    limiter = RecordingLimiter(log)
    attempt, attempt_many = limiter.attempt, limiter.attempt_many
    assert attempt(LIMIT, "a", 1, NOW_MS)
    assert await limiter.limit(LIMIT, "b", 2, now_ms=NOW_MS)
    assert attempt_many([(LIMIT, "c", 1), (LIMIT, "d", 1)], NOW_MS)
    assert await limiter.limit_many([Request(LIMIT, "c", 1), Request(LIMIT, "d", 3)], now_ms=NOW_MS)
    await limiter.peek(LIMIT, "a", now_ms=NOW_MS)
    log.close()
    found = list(read_records([tmp_path]))
    assert [(record.identifier, record.cost, record.allowed) for record in found] == [
        ("a", 1, True),
        ("b", 2, True),
        ("c", 1, True),
        ("d", 1, True),
        ("c", 1, True),
        ("d", 3, False),
    ]
    assert {(record.workspace, record.namespace, record.quota) for record in found} == {("acme", "api", 3)}
    batches = [record.batch for record in found]
    assert batches[:2] == [None, None] and batches[2] == batches[3] != batches[4] == batches[5]
    assert (log.written, log.dropped) == (6, 0)


async def test_a_batch_with_a_limit_in_shadow_mode_is_recorded_once(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    watched = make_limit(1, 60_000, "rlns_1", "acme", shadow=True)
    requests = [Request(LIMIT, "a", 1), Request(watched, "b", 2), Request(LIMIT, "c", 1)]
    assert all(await RecordingLimiter(log).limit_many(requests, now_ms=NOW_MS))
    log.close()
    found = list(read_records([tmp_path]))
    assert [(record.identifier, record.cost, record.allowed) for record in found] == [
        ("a", 1, True),
        ("b", 2, True),
        ("c", 1, True),
    ]
    assert len({record.batch for record in found}) == 1


async def test_the_files_never_exceed_their_bound_and_keep_the_newest(tmp_path: Path) -> None:
    log = new_log(tmp_path, bytes_max=4_000)
    limiter = RecordingLimiter(log)
    for number in range(200):
        limiter.attempt(LIMIT, f"user_{number}", 1, NOW_MS + number)
        if number % 7 == 0:
            log.write(log.take())
        assert size_of(tmp_path) <= 4_000
    log.close()
    found = sorted(record.at_ms for record in read_records([tmp_path]))
    assert found[-1] == NOW_MS + 199 and found == list(range(found[0], NOW_MS + 200)) and len(found) > 10


async def test_records_that_the_disk_cannot_take_in_time_are_dropped_and_counted(tmp_path: Path) -> None:
    log = new_log(tmp_path, bytes_max=100_000_000)
    limiter = RecordingLimiter(log)
    attempt = limiter.attempt
    for _ in range(PENDING_MAX + 5):
        attempt(LIMIT, "a", 1, NOW_MS)
    assert log.dropped == 5
    log.close()
    assert log.written == PENDING_MAX


async def test_a_missing_directory_loses_records_and_no_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = new_log(tmp_path / "log")
    limiter = RecordingLimiter(log)
    (tmp_path / "log" / "decisions-0.lock").unlink()
    (tmp_path / "log").rmdir()
    for _ in range(2):
        assert limiter.attempt(LIMIT, "a", 1, NOW_MS) is not None
        log.write(log.take())
    assert (log.written, log.dropped) == (0, 2)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text, "logged once, not for every write"
    (tmp_path / "log").mkdir()
    limiter.attempt(LIMIT, "a", 1, NOW_MS)
    log.close()
    assert log.written == 1


def test_each_process_has_files_of_its_own_and_a_restart_continues_them(tmp_path: Path) -> None:
    one, other = new_log(tmp_path), new_log(tmp_path)
    for log in (one, other):
        log.write([(NOW_MS, LIMIT, "a", 1, True, None)])
    assert {file.name for file in tmp_path.glob("*.jsonl")} == {"decisions-0.jsonl", "decisions-1.jsonl"}
    one.close()
    again = new_log(tmp_path)
    again.write([(NOW_MS, LIMIT, "b", 1, True, None)])
    assert [record.identifier for record in read_records([tmp_path / "decisions-0.jsonl"])] == ["a", "b"]
    again.close()
    other.close()
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.glob("decisions-*"))


async def test_a_sample_has_all_requests_of_the_chosen_identifiers(tmp_path: Path) -> None:
    sampling = Sampling(0.3, b"secret of the test")
    log = new_log(tmp_path, sampling=sampling)
    attempt = RecordingLimiter(log).attempt
    for _ in range(3):
        for number in range(50):
            attempt(LIMIT, f"user_{number}", 1, NOW_MS)
    log.close()
    chosen = [f"user_{number}" for number in range(50) if sampling.includes(f"user_{number}")]
    found: dict[str, int] = {}
    for record in read_records([tmp_path]):
        found[record.identifier] = found.get(record.identifier, 0) + 1
    assert found == {sampling.written(each): 3 for each in chosen} and 0 < len(chosen) < 50


def test_a_directory_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"decisions\.log_dir"):
        new_log(tmp_path / "file" / "log")


def test_a_hash_key_must_be_long_enough_and_readable(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short")
    for file, named in (("short", "it has 5 bytes"), ("missing", "No such file")):
        loaded = load(flags={"decisions.hash_key_file": str(tmp_path / file)})
        with pytest.raises(ConfigFaults, match=named) as caught:
            check_files(loaded)
        assert caught.value.faults[0].field == "decisions.hash_key_file"
    with pytest.raises(ConfigFaults, match="a number above 0, at most 1"):
        load(flags={"decisions.sample": "0"})


@pytest.mark.slow
def test_a_server_logs_what_it_decides_and_counts_the_records(tmp_path: Path) -> None:
    with TidegateServer("--decisions-log-dir", str(tmp_path / "log"), "--workers", "2") as server:
        workspace = server.workspace()
        answers = [workspace.limit(limit=1).data["success"] for _ in range(4)]
        workspace.limit(limit=1, cost=0)
        written = 'tidegate_decision_log_records_total{outcome="written"}'
        eventually(lambda: server.metrics()[written] == 4, "all four are counted")
        assert server.stop() == 0
        records = sorted(read_records([tmp_path / "log"]), key=lambda record: record.at_ms)
    assert sorted(record.allowed for record in records) == sorted(answers)
    assert {True, False} == set(answers)
    assert {(record.workspace, record.namespace, record.identifier) for record in records} == {
        (workspace.id, "api", "user_1")
    }
