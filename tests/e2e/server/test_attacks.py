from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import pytest

from tests.e2e.server.wire import Client, body, post, used
from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually
from tidegate.core.model import Tuning
from tidegate.ports import KeyRow, OverrideRow, WorkspaceRow
from tidegate.server.catalog import view as view_module
from tidegate.server.catalog.keys import digest_of, new_key
from tidegate.server.catalog.view import MISSING_MAX, Callers, CatalogView
from tidegate.testing.servers import RedisServer

HOSTILE = {
    "deep arrays": b"[" * 5_000_000,
    "deep objects": b'{"a":' * 1_000_000,
    "wide object": b"{" + b",".join(b'"k%d":1' % number for number in range(300_000)) + b"}",
    "wide array": b"[" + b"1," * 3_000_000 + b"1]",
    "unknown fields": body()[:-1] + b"," + b",".join(b'"k%d":1' % n for n in range(100_000)) + b"}",
    "invalid UTF-8": body("x").replace(b'"x"', b'"\xff\xfe\xc0\x80"'),
    "overlong UTF-8": body("x").replace(b'"x"', b'"\xf0\x80\x80\xaf"'),
    "beyond 2^63": body(limit=2**63),
    "far beyond 2^63": body().replace(b"1000000", b"9" * 1_000_000),
    "negative beyond -2^63": body(limit=-(2**63) - 1),
    "a huge exponent": body().replace(b"1000000", b"1e1000000000"),
    "a string without end": b'{"namespace":"' + b"a" * 5_000_000,
    "an identifier too long": body("a" * 5_000_000),
    "not JSON": os.urandom(1_000_000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_is_a_400_and_the_connection_stays_open(
    server: TidegateServer, workspace: Workspace, kind: str
) -> None:
    key = workspace.key.secret
    with Client(server) as client:
        for operation in ("limit", "multiLimit", "setOverride", "listOverrides"):
            reply = client.ask(post(key, HOSTILE[kind], operation=operation))
            assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input"), operation
            assert len(reply.body) < 20_000, "the answer is smaller than the request"
        assert client.ask(post(key, body("after"))).data["success"]


def test_the_largest_numbers_are_judged_and_not_wrapped(workspace: Workspace) -> None:
    most = 2**63 - 1
    server, key = workspace.server, workspace.key.secret
    reply = server.call("limit", body("most", limit=most, cost=most), key)
    assert (reply.data["success"], reply.data["remaining"]) == (True, 0)
    reply = server.call("limit", body("most", limit=most), key)
    assert (reply.data["success"], reply.data["remaining"]) == (False, 0)


def test_a_duplicate_key_is_refused_and_nothing_is_counted(workspace: Workspace) -> None:
    server, key = workspace.server, workspace.key.secret
    for more in (b',"cost":5,"cost":2}', b',"identifier":"other"}', b',"limit":1}'):
        assert server.call("limit", body("twice")[:-1] + more, key).status == 400
    assert used(server, key, "twice") == used(server, key, "other") == 0


def test_the_longest_duration_that_a_database_can_hold_disturbs_nothing_with_redis(
    fresh_redis: RedisServer, tmp_path: Path
) -> None:
    """`setOverride` refuses it; an older version may have stored it."""
    arguments = ("--origin", fresh_redis.url, "--region", "fra")
    with TidegateServer(*arguments, data_dir=tmp_path / "data") as server:
        hostile, other = server.workspace(), server.workspace()
        assert hostile.limit(limit=3).data["success"]
        row = OverrideRow("rlor_most", hostile.namespace_id(), "*", 5, 2**63 - 1, None)
        server.with_catalog(lambda catalog: catalog.set_override(row, timeout_s=TIMEOUT_S))
        eventually(lambda: hostile.limit(limit=3).data["limit"] == 5, "the override applies")
        for number in range(100):
            for passes in (True, True, False):
                assert hostile.limit(identifier=f"user_{number}", cost=2).data["success"] is passes
        for passes in (True, True, True, False):
            assert other.limit(identifier="ann", limit=3).data["success"] is passes
        eventually(lambda: server.metrics()["tidegate_origin_dirty_subjects"] == 0, "Redis takes all counts")
        assert server.get("/readyz").body.startswith(b"ready")
        assert "warning" not in server.log.lower()
        names = fresh_redis.command("KEYS", "*:{*}:*")
        assert isinstance(names, list)
        assert len(names) > 100
        forever = [str(name) for name in names if fresh_redis.command("PTTL", str(name)) == -1]
        assert all(name.rpartition(":")[2] in ("region", "format", "lease") for name in forever), forever


@pytest.mark.slow
def test_a_hundred_thousand_identifiers_are_counted_one_by_one(workspace: Workspace) -> None:
    server, key = workspace.server, workspace.key.secret

    def batch(first: int) -> bytes:
        items = b",".join(body(f"spray_{number}", limit=1_000) for number in range(first, first + 100))
        return post(key, b"[" + items + b"]", operation="multiLimit")

    with Client(server) as client:
        for first in range(0, 100_000, 100):
            assert client.ask(batch(first)).data["passed"]
        for first in (0, 50_000, 99_900):
            data = client.ask(batch(first)).data
            assert {item["remaining"] for item in data["limits"]} == {998}
    metrics = server.metrics()
    assert 100_000 <= metrics["tidegate_subjects"] <= Tuning().subjects_max


# Keys.


def test_thousands_of_wrong_keys_at_once_are_refused_and_others_are_served(
    server: TidegateServer, workspace: Workspace
) -> None:
    wrong = [new_key() for _ in range(4_000)]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server)) for _ in range(200)]
        honest = stack.enter_context(Client(server))
        for first in range(0, len(wrong), len(clients)):
            for client, key in zip(clients, wrong[first:], strict=False):
                client.send(post(key, body("nobody")))
            assert honest.ask(post(workspace.key.secret, body("honest"))).data["success"]
            assert {client.reply().status for client in clients} == {401}
        # Cached as unknown by now: refused at once, without a query to the database.
        for key in wrong[-100:]:
            assert clients[0].ask(post(key, body("nobody"))).status == 401


def test_the_memory_of_wrong_keys_is_bounded() -> None:
    callers = Callers(CatalogView())
    for number in range(5 * MISSING_MAX):
        callers.remember_missing(b"wrong_%d" % number)
    remembered = len(callers._missing) + len(callers._missing_before)
    assert MISSING_MAX <= remembered <= 2 * MISSING_MAX
    assert callers.is_negative_cached(b"wrong_%d" % (5 * MISSING_MAX - 1))


def test_a_key_is_looked_up_by_its_digest_alone_so_that_no_prefix_shows_in_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = CatalogView()
    callers = Callers(view)
    right = new_key()
    view.put_workspace(WorkspaceRow("w", "w", True, None, None, 1))
    view.put_key(KeyRow("key", "w", digest_of(right), "", "", (), 0, None, True, None, 2))
    near = [right[:length] + "~" * (len(right) - length) for length in range(1, len(right))]
    for key in near:
        assert callers.find(b"Bearer " + key.encode(), key.encode()) is None
    with monkeypatch.context() as patched:
        # Any key with this digest is accepted: nothing else of it is compared.
        patched.setattr(view_module, "digest_of", lambda _key: digest_of(right))
        for key in near:
            assert callers.find(b"Bearer " + key.encode(), key.encode()) is not None
    # The digest has 32 bytes: that of a key with only its last character wrong has no more bytes in common than by
    # chance.
    whole = digest_of(right)
    assert whole == blake2b(right.encode(), digest_size=32, person=b"tidegate-key").digest()
    assert not [key for key in near if digest_of(key)[:6] == whole[:6]]


def test_an_almost_correct_key_gets_the_same_error_as_any_other(
    server: TidegateServer, workspace: Workspace
) -> None:
    right = workspace.key.secret
    near = right[:-1] + ("A" if right[-1] != "A" else "B")
    answers = []
    for key in (near, new_key(), "x"):
        reply = server.call("limit", body(), key)
        assert reply.status == 401
        answers.append({**reply.json, "meta": None})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_a_key_that_is_revoked_stops_working_on_connections_that_use_it(
    server: TidegateServer, workspace: Workspace
) -> None:
    key = server.key(workspace.id)
    with Client(server) as client:
        assert client.ask(post(key.secret, body("soon gone"))).data["success"]
        revoked = run_cli("keys", "revoke", key.row.id, "--data-dir", str(server.data_dir), "--json")
        assert revoked.returncode == 0, revoked.stderr
        eventually(
            lambda: client.ask(post(key.secret, body("soon gone"))).status == 401, "the key is refused", 10.0
        )
        before = used(server, workspace.key.secret, "soon gone")
        client.send(post(key.secret, body("soon gone")) * 500)
        assert {client.reply().status for _ in range(500)} == {401}
        assert used(server, workspace.key.secret, "soon gone") == before


def test_pipelined_requests_with_an_expired_key_are_all_refused(
    server: TidegateServer, workspace: Workspace
) -> None:
    key = server.key(workspace.id, expires_at_ms=1)
    with Client(server) as client:
        client.send(post(key.secret, body("too late")) * 500)
        assert {client.reply().status for _ in range(500)} == {403}
    assert used(server, workspace.key.secret, "too late") == 0


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_key_is_ever_written_to_the_log_or_to_disk(server: TidegateServer, workspace: Workspace) -> None:
    key = workspace.key.secret
    assert server.call("limit", body("quiet"), key).data["success"]
    for wrong in (b"{", body(limit=0)):
        assert server.call("limit", wrong, key).status == 400
    files = [path for path in Path(server.data_dir).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if key.encode() in path.read_bytes()]
    assert key not in server.log
