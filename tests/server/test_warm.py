"""`WarmLimit` answers as the whole operations do, or leaves the request to them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import astuple

from tests.server.harness import MONTH_MS
from tidegate.ports import KeyRow, OverrideRow
from tidegate.server.api.admission import Call
from tidegate.server.api.schema import LimitBody, decode_limit_plain, decode_multi_limit_plain
from tidegate.server.api.warm import KEPT_OF, Bodies
from tidegate.server.catalog.keys import digest_of, hint_of
from tidegate.server.messages import Head
from tidegate.server.process.config_load import load
from tidegate.server.process.first_start import prepare
from tidegate.server.process.service import Service

USUAL = {"namespace": "known", "identifier": "user", "limit": 10, "duration": MONTH_MS, "cost": 0}


# So many requests with the same body that it is remembered.
OFTEN = 2 * KEPT_OF


class Scene:
    """A service without sockets, with a namespace that has overrides and one that has none."""

    def __init__(self, service: Service, key: str) -> None:
        self.service = service
        self.limits = service._limits
        self.view = service._sync.view
        self.head = Head(b"Bearer " + key.encode(), b"application/json")

    async def whole(self, head: Head, body: bytes) -> tuple[int, bytes, bytes]:
        call = Call("limit", head, "whole")
        answer = self.limits._admission.run(call, self.limits.limit(call, body))
        return answer if isinstance(answer, tuple) else await answer

    def warm(self, head: Head, body: bytes) -> Any:
        return self.limits._warm.answer(head, body)

    async def whole_batch(self, head: Head, body: bytes) -> tuple[int, bytes, bytes]:
        call = Call("multiLimit", head, "whole")
        answer = self.limits._admission.run(call, self.limits.multi_limit(call, body))
        return answer if isinstance(answer, tuple) else await answer

    def warm_batch(self, head: Head, body: bytes) -> Any:
        return self.limits._warm.answer_batch(head, body)

    def add_key(self, name: str, *permissions: str, expires_at_ms: int | None = None) -> Head:
        workspace = next(iter(self.view.workspaces))
        self.view.put_key(
            KeyRow(
                f"key_{name}",
                workspace,
                digest_of(name),
                name,
                hint_of(name),
                permissions,
                0,
                expires_at_ms,
                True,
                None,
            )
        )
        return Head(b"Bearer " + name.encode(), b"application/json")

    def counted(self) -> tuple[dict[str, int], int]:
        return self.limits.activity.decisions(), self.limits.activity.skips.left


@contextlib.asynccontextmanager
async def playing(folder: Path) -> AsyncIterator[Scene]:
    config = load(arguments={"data_dir": str(folder)}).config
    first = await prepare(config)
    assert first is not None
    service = Service(config)
    await service.start()
    try:
        scene = Scene(service, first.key)
        for namespace in ("known", "overridden"):
            assert (await scene.whole(scene.head, body_of(namespace=namespace)))[0] == 200
        workspace = next(iter(scene.view.workspaces.values()))
        held = workspace.namespaces["overridden"].id
        for number, identifier in enumerate(("user", "vip_*")):
            scene.view.put_override(OverrideRow(f"rlor_{number}", held, identifier, 3, MONTH_MS, None, 9))
        yield scene
    finally:
        await service.stop(5.0)


def body_of(**fields: Any) -> bytes:
    return json.dumps({**USUAL, **fields}, separators=(",", ":")).encode()


def batch_of(*bodies: bytes) -> bytes:
    return b"[" + b",".join(bodies) + b"]"


def told(answer: tuple[int, bytes, bytes]) -> tuple[int, bytes, bytes]:
    """An answer without what differs from call to call: its id, and the seconds to the end of the window."""
    status, lines, body = answer
    return status, re.sub(rb";t=\d+", b"", lines), re.sub(rb"req_[A-Za-z0-9]+", b"req_", body)


ANSWERED = [
    body_of(),
    body_of(namespace="overridden"),
    body_of(namespace="overridden", identifier="other"),
    body_of(identifier="\u00e9\u4e2d"),
    body_of(limit=2**63 - 1),
    json.dumps({**USUAL}, indent=2).encode(),
]
LEFT = [
    b"",
    b"{",
    b"[]",
    body_of(limit=0),
    body_of(limit="10"),
    body_of(limit=10.0),
    body_of(cost=-1),
    body_of(more=1),
    body_of(namespace="new"),
    body_of(namespace=""),
    body_of(identifier="x" * 513),
    body_of(identifier='a "quoted" name'),
    body_of()[:-1] + b',"cost":0}',
    body_of()[:-1] + b',"identifier":"other"}',
    body_of().ljust(6_000),
    b"\xff" + body_of(),
]


@pytest.mark.parametrize("body", ANSWERED)
async def test_a_usual_request_is_answered_as_by_the_whole_operation(tmp_path: Path, body: bytes) -> None:
    async with playing(tmp_path) as scene:
        first = await scene.whole(scene.head, body)  # loads the counts into memory
        for _ in range(OFTEN):
            assert told(scene.warm(scene.head, body)) == told(first)


@pytest.mark.parametrize("body", LEFT)
async def test_an_unusual_body_is_left_to_the_whole_operation_and_nothing_is_counted(
    tmp_path: Path, body: bytes
) -> None:
    async with playing(tmp_path) as scene:
        await scene.whole(scene.head, body_of())
        before = scene.counted()
        for _ in range(OFTEN):
            assert scene.warm(scene.head, body) is None
        assert scene.counted() == before


async def test_a_caller_who_is_unknown_or_must_be_checked_each_time_is_left_to_the_whole_operation(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as scene:
        known = next(iter(scene.view.workspaces.values())).namespaces["known"].id
        heads = {
            "nobody": Head(None),
            "unknown": Head(b"Bearer tg_unknown"),
            "expired": scene.add_key("expired", "ratelimit.*.limit", expires_at_ms=1),
            "expires": scene.add_key("expires", "ratelimit.*.limit", expires_at_ms=2**52),
            "reader": scene.add_key("reader", "ratelimit.*.read_override"),
            "other": scene.add_key("other", "ratelimit.rlns_other.limit"),
            "all": scene.add_key("all", "ratelimit.*.limit"),
            "this": scene.add_key("this", f"ratelimit.{known}.limit"),
        }
        statuses = {name: (await scene.whole(head, body_of()))[0] for name, head in heads.items()}
        assert statuses == {
            "nobody": 400,
            "unknown": 401,
            "expired": 403,
            "expires": 200,
            "reader": 403,
            "other": 403,
            "all": 200,
            "this": 200,
        }
        answered = {name for name, head in heads.items() if scene.warm(head, body_of()) is not None}
        assert answered == {"all", "this"}


async def test_a_deleted_namespace_and_a_revoked_key_are_noticed_at_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        for _ in range(OFTEN):
            assert scene.warm(scene.head, body_of())[0] == 200
        namespace = next(iter(scene.view.workspaces.values())).namespaces["known"]
        row = namespace.row
        scene.view.put_namespace(row._replace(deleted_at_ms=1, version=row.version + 1))
        assert scene.warm(scene.head, body_of()) is None
        scene.view.put_namespace(row._replace(version=row.version + 2))
        assert scene.warm(scene.head, body_of())[0] == 200
        for key in scene.view.keys_of(next(iter(scene.view.workspaces))):
            scene.view.put_key(key._replace(revoked_at_ms=1, version=key.version + 1))
        assert scene.warm(scene.head, body_of()) is None


async def test_a_new_override_applies_to_a_body_that_came_before(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        await scene.whole(scene.head, body_of())
        for _ in range(OFTEN):
            assert json.loads(scene.warm(scene.head, body_of())[2])["data"]["limit"] == 10
        namespace = next(iter(scene.view.workspaces.values())).namespaces["known"]
        scene.view.put_override(OverrideRow("rlor_9", namespace.id, "user", 7, MONTH_MS, None, 9))
        assert json.loads(scene.warm(scene.head, body_of())[2])["data"]["limit"] == 7


class Decoder:
    """Counts what is decoded."""

    def __init__(self) -> None:
        self.decoded: list[bytes] = []

    def __call__(self, body: bytes) -> LimitBody:
        self.decoded.append(body)
        return decode_limit_plain(body)


def remembering(decoder: Decoder, **bounds: int) -> Bodies:
    return Bodies(decoder, decode_multi_limit_plain, astuple, UNSET, **bounds)


def test_a_body_that_comes_again_is_not_decoded_again() -> None:
    decoder = Decoder()
    bodies = remembering(decoder)
    for _ in range(1_000):
        asked = bodies.find(body_of(cost=3))
        assert asked is not None
        assert (asked.namespace, asked.identifier, asked.cost) == ("known", "user", 3)
        assert (asked.quota, asked.duration_ms) == (10, MONTH_MS)
    assert decoder.decoded == [body_of(cost=3)] * KEPT_OF


def test_of_bodies_that_come_once_a_bounded_number_is_remembered() -> None:
    decoder = Decoder()
    bodies = remembering(decoder, kept_max=8)
    many = [body_of(identifier=f"user_{number}") for number in range(1_000)]
    for body in many:
        bodies.find(body)
    decoder.decoded.clear()
    for body in reversed(many):
        bodies.find(body)
    assert len(many) - 2 * 8 <= len(decoder.decoded) < len(many)


def test_a_body_in_use_stays_remembered_while_others_come_and_go() -> None:
    decoder = Decoder()
    bodies = remembering(decoder, kept_max=8)
    for _ in range(OFTEN):
        bodies.find(body_of())
    decoder.decoded.clear()
    for number in range(1_000):
        bodies.find(body_of(identifier=f"user_{number}"))
        bodies.find(body_of())
    assert body_of() not in decoder.decoded


def test_a_long_body_is_not_remembered() -> None:
    decoder = Decoder()
    bodies = remembering(decoder)
    for _ in range(OFTEN):
        assert bodies.find(body_of(identifier="x" * 400)) is not None
    assert len(decoder.decoded) == OFTEN


async def test_decisions_are_counted_unless_the_request_asks_not_to(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        (workspace,) = scene.view.workspaces
        counts = scene.limits.activity.counts(workspace, "known")
        before = counts.allowed, counts.denied
        quiet = Head(scene.head.authorization, b"application/json", None, True)
        assert [json.loads(scene.warm(quiet, body_of(cost=4))[2])["data"]["success"]] == [True]
        assert (counts.allowed, counts.denied) == before
        outcomes = [
            json.loads(scene.warm(scene.head, body_of(cost=4))[2])["data"]["success"] for _ in range(3)
        ]
        assert outcomes == [True, False, False]
        assert (counts.allowed - before[0], counts.denied - before[1]) == (1, 2)
        (denied,) = scene.limits.top_denials.top(5)
        assert (denied.key, denied.weight) == ((workspace, "known", "user"), 2)


async def test_a_subject_that_is_not_in_memory_is_waited_for_and_counted_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        waiting = scene.warm(scene.head, body_of(identifier="cold", cost=4))
        assert not isinstance(waiting, tuple)
        _, _, first = await waiting
        assert json.loads(first)["data"]["remaining"] == 6
        assert (
            json.loads(scene.warm(scene.head, body_of(identifier="cold", cost=1))[2])["data"]["remaining"]
            == 5
        )


BATCHES = [
    batch_of(body_of()),
    batch_of(body_of(), body_of(identifier="other", cost=0)),
    batch_of(body_of(), body_of(namespace="overridden"), body_of(namespace="overridden", identifier="other")),
    batch_of(body_of(), body_of(), body_of(limit=3)),
    batch_of(body_of(identifier="full", cost=11), body_of()),
    batch_of(body_of(identifier="\u00e9\u4e2d").decode("unicode_escape").encode(), body_of(duration=5_000)),
    batch_of(body_of(identifier="}, {]")),
    json.dumps([USUAL, USUAL | {"identifier": "other"}], indent=2).encode(),
]
BATCHES_LEFT = [
    *(batch_of(body_of(), body) for body in LEFT if len(body) < 6_000),
    b"[]",
    body_of(),
    batch_of(*[body_of()] * 101),
    batch_of(body_of(identifier="a \\ in a name")),
    batch_of(body_of(identifier="\u00e9")),
    batch_of(*[body_of(identifier="x" * 500)] * 100).ljust(70_000),
]


@pytest.mark.parametrize("body", BATCHES)
async def test_a_usual_batch_is_answered_as_by_the_whole_operation(tmp_path: Path, body: bytes) -> None:
    async with playing(tmp_path) as scene:
        whole = await scene.whole_batch(scene.head, body)
        assert whole[0] == 200
        assert told(scene.warm_batch(scene.head, body)) == told(whole)


@pytest.mark.parametrize("body", BATCHES_LEFT)
async def test_an_unusual_batch_is_left_to_the_whole_operation_and_nothing_is_counted(
    tmp_path: Path, body: bytes
) -> None:
    async with playing(tmp_path) as scene:
        before = scene.counted()
        assert scene.warm_batch(scene.head, body) is None
        assert scene.counted() == before


async def test_a_batch_of_a_caller_without_a_permission_is_left_to_the_whole_operation(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as scene:
        known = next(iter(scene.view.workspaces.values())).namespaces["known"].id
        this = scene.add_key("this", f"ratelimit.{known}.limit")
        expires = scene.add_key("expires", "ratelimit.*.limit", expires_at_ms=2**52)
        both = batch_of(body_of(), body_of(namespace="overridden"))
        assert (await scene.whole_batch(this, both))[0] == 403
        assert scene.warm_batch(this, both) is None
        assert scene.warm_batch(this, batch_of(body_of()))[0] == 200
        assert (await scene.whole_batch(expires, both))[0] == 200
        assert scene.warm_batch(expires, both) is None


async def test_the_items_of_a_batch_are_counted_unless_the_request_asks_not_to(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        (workspace,) = scene.view.workspaces
        counts = scene.limits.activity.counts(workspace, "known")
        batch = batch_of(body_of(cost=4), body_of(identifier="other", cost=1))
        await scene.whole_batch(scene.head, batch)
        before = counts.allowed, counts.denied
        quiet = Head(scene.head.authorization, b"application/json", None, True)
        answers = [json.loads(scene.warm_batch(head, batch)[2])["data"] for head in (quiet, scene.head)]
        assert [answer["passed"] for answer in answers] == [True, False]
        assert [each["remaining"] for each in answers[1]["limits"]] == [0, 8]
        assert (counts.allowed - before[0], counts.denied - before[1]) == (1, 1)
        (denied,) = scene.limits.top_denials.top(5)
        assert (denied.key, denied.weight) == ((workspace, "known", "user"), 1)


async def test_a_batch_that_memory_cannot_decide_is_waited_for_and_counted_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        batch = batch_of(body_of(identifier="cold", cost=4), body_of(identifier="cold2", cost=1))
        waiting = scene.warm_batch(scene.head, batch)
        assert not isinstance(waiting, tuple)
        status, _, first = await waiting
        assert status == 200
        assert [each["remaining"] for each in json.loads(first)["data"]["limits"]] == [6, 9]
        again = json.loads(scene.warm_batch(scene.head, batch)[2])["data"]
        assert [each["remaining"] for each in again["limits"]] == [2, 8]
