from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.server.rls.rules import RuleSet
from tidegate.server.rls.rules_file import RulesError
from tidegate.server.rls.rules_watch import RulesWatch


def text(quota: int, domain: str = "edge") -> str:
    return f"domain: {domain}\ndescriptors: [{{key: user, rate_limit: {{unit: year, requests_per_unit: {quota}}}}}]\n"


def quota(rules: RuleSet) -> int:
    rule = rules.match("edge", [("user", "u")]).rule
    assert rule is not None
    return rule.requests_per_unit


def write(file: Path, content: str) -> None:
    file.write_text(content)


def error_of(watch: RulesWatch) -> str | None:
    return watch.error


def remove(file: Path) -> None:
    file.unlink()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    write(path, text(5))
    return path


async def test_a_change_is_loaded_and_announced(file: Path) -> None:
    watch = RulesWatch(file)
    seen: list[int] = []
    watch.on_change(lambda rules: seen.append(quota(rules)))
    assert not await watch.run_once()
    write(file, text(6))
    assert await watch.run_once()
    assert (quota(watch.rules), seen, watch.reloads) == (6, [6], 1)
    assert not await watch.run_once()


async def test_a_change_within_one_time_stamp_is_seen(file: Path) -> None:
    os.utime(file, ns=(10**18, 10**18))
    watch = RulesWatch(file, now_ns=lambda: 10**18 + 5)
    write(file, text(7))
    os.utime(file, ns=(10**18, 10**18))
    assert await watch.run_once()
    assert quota(watch.rules) == 7


async def test_a_file_that_has_settled_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(file, ns=(10**18, 10**18))
    watch = RulesWatch(file, now_ns=lambda: 2 * 10**18)

    def fail(_place: Path) -> RuleSet:
        raise AssertionError("read without need")

    monkeypatch.setattr("tidegate.server.rls.rules_watch.load_rules", fail)
    assert not await watch.run_once()


@pytest.mark.parametrize(
    "bad", ["domain: [", "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: eon}}]", ""]
)
async def test_a_bad_file_keeps_the_old_rules_and_says_so(
    file: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = RulesWatch(file)
    write(file, bad)
    for _ in range(3):
        assert not await watch.run_once()
    assert quota(watch.rules) == 5
    assert watch.error is not None and "rules.yaml" in watch.error
    assert watch.reloads_failed == 1
    assert len([record for record in caplog.records if "old ones still apply" in record.message]) == 1
    write(file, text(8))
    assert await watch.run_once()
    assert quota(watch.rules) == 8
    assert (error_of(watch), watch.reloads) == (None, 1)


async def test_a_file_that_is_gone_keeps_the_old_rules_and_may_come_back(file: Path) -> None:
    watch = RulesWatch(file)
    remove(file)
    assert not await watch.run_once()
    assert quota(watch.rules) == 5
    assert watch.error is not None
    write(file, text(5))
    assert not await watch.run_once()
    assert watch.error is None


async def test_files_of_a_directory_are_added_and_removed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text(5))
    watch = RulesWatch(tmp_path)
    (tmp_path / "b.yaml").write_text(text(9, domain="other"))
    assert await watch.run_once()
    assert set(watch.rules.domains) == {"edge", "other"}
    (tmp_path / "b.yaml").unlink()
    assert await watch.run_once()
    assert set(watch.rules.domains) == {"edge"}


async def test_counts_of_unchanged_rules_are_kept(file: Path) -> None:
    watch = RulesWatch(file)
    rule = watch.rules.match("edge", [("user", "u")]).rule
    assert rule is not None
    rule.count(True, "")
    write(file, text(6))
    await watch.run_once()
    again = watch.rules.match("edge", [("user", "u")]).rule
    assert again is not None and again is not rule
    assert again.allowed == 1


def test_rules_that_are_wrong_at_the_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="cannot be read"):
        RulesWatch(tmp_path / "nothing.yaml")
