from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tidegate.demo import fleet
from tidegate.demo.session import Options, Report, Session
from tidegate.demo.traffic import HOT
from tidegate.demo.view import Picture
from tidegate.server.console.sessions import MARKER


class Watcher:
    """Presses the next key as soon as the screen shows that the fleet has reacted to the previous one."""

    def __init__(self, session: Session, steps: list[tuple[Callable[[Picture], bool], str]]) -> None:
        self._session = session
        self._steps = steps
        self._decisions = 0

    def show(self, picture: Picture) -> None:
        decisions = sum(allowed + denied for _, allowed, denied in picture.totals)
        has_moved, self._decisions = decisions > self._decisions, decisions
        if self._steps and has_moved and self._steps[0][0](picture):
            _, key = self._steps.pop(0)
            self._session.press(key)


def files_of(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def states(picture: Picture, region: str) -> set[tuple[str, str]]:
    return {(node.origin, node.database) for node in picture.nodes if node.region == region}


async def demonstrate(options: Options) -> Report:
    """Kill an origin, disconnect the other region, heal; each step waits until decisions continue after the previous
    one."""
    async with Session.open(options, lambda _text: None) as session:
        watcher = Watcher(
            session,
            [
                (lambda picture: picture.hot_accepted > HOT.quota * 2 // 3, "k"),
                (lambda picture: states(picture, "fra") == {("killed", "ok")}, "p"),
                (lambda picture: states(picture, "iad") == {("ok", "cut off")}, "h"),
                (
                    lambda picture: all(states(picture, each) == {("ok", "ok")} for each in ("fra", "iad")),
                    "q",
                ),
            ],
        )
        return await session.run(watcher.show)


def check(report: Report) -> None:
    assert [event.partition(" s  ")[2] for event in report.events] == [
        "origin of fra killed, its counts are gone",
        "region iad cut off from the database",
        "everything healed",
    ]
    assert len(report.phases) == 4
    for phase in report.phases:
        assert phase.allowed + phase.denied > 0 and phase.failed == 0, "decisions go on, whatever is broken"
    assert report.agreed_after_s is not None, "all nodes agree in the end"
    assert set(report.hot_seen.values()) == {report.hot_accepted} and report.hot_accepted > 0
    assert len(report.hot_seen) == len(report.nodes)


async def test_decisions_continue_through_every_fault_and_all_nodes_agree_after_healing() -> None:
    check(await demonstrate(Options(regions=2, nodes=2, speed=3.0)))


@pytest.mark.server
@pytest.mark.slow
async def test_the_same_with_a_redis_for_each_region_and_a_database_server(
    redis_server: object, mariadb_server: object
) -> None:
    """The fixtures skip if the programs are missing; the demo starts servers of its own."""
    report = await demonstrate(Options(regions=2, nodes=1, redis=True, mysql=True, speed=3.0))
    check(report)
    assert "Redis" in report.fleet and "MariaDB" in report.fleet


async def test_the_key_of_the_demo_signs_in_to_its_console() -> None:
    async with (
        Session.open(Options(regions=1, nodes=1), lambda _text: None) as session,
        httpx.AsyncClient() as client,
    ):
        page = await client.get(session.console)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        key = session.fleet.key
        answer = await client.post(f"{session.console}/session", json={"key": key}, headers={MARKER: "1"})
        assert answer.status_code == 200, answer.text
        assert (await client.get(f"{session.console}/session")).status_code == 200


async def test_a_session_that_cannot_start_removes_what_it_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def broken(*_: object) -> str:
        assert files_of(tmp_path), "there is something to remove"
        raise RuntimeError("no key today")

    monkeypatch.setattr(fleet, "create_key", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="no key today"):
        async with Session.open(Options(regions=1, nodes=1), lambda _text: None):
            pass
    assert files_of(tmp_path) == []
