from __future__ import annotations

import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.server.wire import Client, body, is_listening, post, used, used_before
from tests.server.harness import TIMEOUT_S, TidegateServer, eventually
from tidegate.testing import RedisServer
from tidegate.testing.servers.redis import create_certificate


def is_replayed(server: TidegateServer) -> bool:
    """The origin has acknowledged everything."""
    return server.metrics()["tidegate_origin_dirty_subjects"] == 0


class Steady(NamedTuple):
    """What a client saw that sent requests without a pause."""

    answered_at: list[float]
    longest_gap_s: float

    def before(self, moment: float) -> int:
        return sum(1 for each in self.answered_at if each <= moment)


def ask_for(server: TidegateServer, key: str, identifier: str, seconds: float) -> Steady:
    answered = []
    with Client(server) as client:
        request = post(key, body(identifier))
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            assert client.ask(request).data["success"]
            answered.append(time.monotonic())
    gaps = [after - before for before, after in pairwise(answered)]
    return Steady(answered, max(gaps))


# A crash.


@pytest.mark.slow
def test_a_killed_embedded_server_loses_at_most_its_last_second() -> None:
    with TidegateServer() as server:
        key = server.workspace().key.secret
        for _ in range(50):
            assert server.call("limit", body("early"), key).data["success"]
        eventually(lambda: is_replayed(server), "the early ones are in the file")
        seen = ask_for(server, key, "steady", 2.5)
        killed_at = time.monotonic()
        server.kill()
        server.start()
        assert used_before(server, key, "early") == 50
        # If the machine stalls the client, it stalls the writing too: the longest pause that the client saw is added.
        kept = used_before(server, key, "steady")
        assert seen.before(killed_at - 1.0 - seen.longest_gap_s) <= kept <= len(seen.answered_at)


@pytest.mark.slow
def test_a_killed_server_with_redis_loses_nothing_that_is_older_than_a_round_trip(
    fresh_redis: RedisServer,
) -> None:
    with TidegateServer("--origin", fresh_redis.url) as server:
        key = server.workspace().key.secret
        seen = ask_for(server, key, "steady", 1.0)
        killed_at = time.monotonic()
        server.kill()
        server.start()
        round_trip_s = 0.1  # long for a loopback connection, and still a small part of what was sent
        kept = used_before(server, key, "steady")
        assert seen.before(killed_at - round_trip_s - seen.longest_gap_s) <= kept <= len(seen.answered_at)
        # Everything that the origin has acknowledged survives.
        for _ in range(20):
            assert server.call("limit", body("settled"), key).data["success"]
        eventually(lambda: is_replayed(server), "the origin has it all")
        server.kill()
        server.start()
        assert used_before(server, key, "settled") == 20


def has_at_least(server: TidegateServer, key: str, identifier: str, count: int) -> bool:
    return used(server, key, identifier) >= count


def test_a_server_that_was_killed_while_it_wrote_starts_again_and_again() -> None:
    with TidegateServer() as server:
        key = server.workspace().key.secret
        kept = 0
        for _ in range(3):
            with Client(server) as client:
                client.send(post(key, body("often")) * 200)
                for _ in range(200):
                    assert client.reply().data["success"]
            server.kill()
            server.start()
            eventually(partial(has_at_least, server, key, "often", kept), "what was found once is not lost")
            kept = used(server, key, "often")
            eventually(lambda: is_replayed(server), "settled")


# A graceful stop.


def test_sigterm_finishes_requests_in_flight_flushes_and_exits_with_0() -> None:
    with TidegateServer() as server:
        key = server.workspace().key.secret
        whole = post(key, body("in flight"))
        with Client(server) as slow, Client(server) as idle:
            assert idle.ask(post(key, body("idle"))).data["success"]
            slow.send(whole[:-20])
            for _ in range(100):
                assert server.call("limit", body("flushed"), key).data["success"]
            server.signal(signal.SIGTERM)
            eventually(lambda: not is_listening(server), "no new connection is accepted")
            slow.send(whole[-20:])
            reply = slow.reply()
            assert (reply.data["success"], reply.headers["connection"]) == (True, "close")
            assert slow.is_at_end()
            assert idle.is_at_end()
        assert server.process is not None
        assert server.process.wait(TIMEOUT_S) == 0
        assert "Traceback" not in server.log
        server.start()
        assert used_before(server, key, "flushed") == 100
        assert used_before(server, key, "in flight") == 1


def test_sigterm_with_redis_leaves_every_count_at_the_origin(fresh_redis: RedisServer) -> None:
    with TidegateServer("--origin", fresh_redis.url) as server:
        key = server.workspace().key.secret
        with Client(server) as client:
            client.send(post(key, body("last")) * 300)
            assert all(client.reply().data["success"] for _ in range(300))
        assert server.stop() == 0
        server.start()
        assert used_before(server, key, "last") == 300


def test_a_client_that_never_finishes_does_not_keep_a_stopping_server() -> None:
    with TidegateServer("--http-stop-timeout-s", "3") as server:
        key = server.workspace().key.secret
        with Client(server) as stuck:
            stuck.send(post(key, body("stuck"))[:-5])
            assert server.call("limit", body("other"), key).data["success"]
            assert server.stop(TIMEOUT_S) == 0
            assert stuck.is_at_end()
        assert "did not finish in time" in server.log


def test_a_stop_while_the_origin_is_dead_ends_within_its_deadline() -> None:
    with (
        RedisServer() as redis,
        TidegateServer("--origin", redis.url, "--http-stop-timeout-s", "4") as server,
    ):
        key = server.workspace().key.secret
        assert server.call("limit", body("warm"), key).data["success"]
        redis.freeze()
        assert server.call("limit", body("warm"), key).data["success"], "decisions go on"
        assert server.stop(TIMEOUT_S) == 0


# Signals and files.


def test_sighup_reads_the_log_level_and_the_keys_again(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('[log]\nlevel = "warning"\n')
    with TidegateServer("--config", str(file), data_dir=tmp_path / "data") as server:
        key = server.workspace().key.secret
        file.write_text('[log]\nlevel = "info"\n')
        server.signal(signal.SIGHUP)
        eventually(lambda: "were read again" in server.log, "the new level shows")
        file.write_text('[log]\nlevel = "shout"\n')
        server.signal(signal.SIGHUP)
        eventually(
            lambda: "the old one stays in force" in server.log,
            "a wrong file is reported, and nothing more happens",
        )
        assert server.call("limit", body(), key).data["success"]
        assert server.call("limit", body(), server.key("default").secret).data["success"]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    create_certificate(cert, key)
    return cert, key


@pytest.fixture
def tls_server(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[TidegateServer]:
    cert, key = certificate
    arguments = ("--tls-cert", str(cert), "--tls-key", str(key))
    with TidegateServer(*arguments, data_dir=tmp_path / "data") as server:
        yield server


def handshake(server: TidegateServer, trusted: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(trusted))
    return context.wrap_socket(server.socket(), server_hostname="localhost")


def test_tls_serves_clients_that_use_it_and_survives_those_that_do_not(
    tls_server: TidegateServer, certificate: tuple[Path, Path]
) -> None:
    key = tls_server.workspace().key.secret
    assert tls_server.url.startswith("https://")
    with handshake(tls_server, certificate[0]) as secured:
        for number in range(1, 4):
            secured.sendall(post(key, body("secret", limit=100)))
            answer = secured.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200") and b'"remaining":%d' % (100 - number) in answer
    with tls_server.socket() as plain:
        plain.sendall(post(key, body()))
        assert not plain.recv(65_536).startswith(b"HTTP/1.1 200")
    silent = [tls_server.socket() for _ in range(50)]
    with handshake(tls_server, certificate[0]) as secured:
        secured.sendall(post(key, body("secret", limit=100)))
        assert secured.recv(65_536).startswith(b"HTTP/1.1 200")
    for each in silent:
        each.close()
    assert tls_server.stop() == 0


def test_sighup_takes_a_renewed_certificate(
    tls_server: TidegateServer, certificate: tuple[Path, Path]
) -> None:
    with handshake(tls_server, certificate[0]) as secured:
        before = secured.getpeercert(binary_form=True)
    create_certificate(*certificate)
    tls_server.signal(signal.SIGHUP)

    def is_renewed() -> bool:
        try:
            with handshake(tls_server, certificate[0]) as secured:
                return secured.getpeercert(binary_form=True) != before
        except ssl.SSLError:
            return False

    eventually(is_renewed, "new connections see the new certificate")


def test_with_a_certificate_of_its_own_the_curl_line_works_and_commands_say_how_to_trust_it(
    tls_server: TidegateServer, certificate: tuple[Path, Path]
) -> None:
    assert tls_server.process is not None
    assert tls_server.process.stdout is not None
    said = ""
    while "-d " not in said:
        line = tls_server.process.stdout.readline()
        assert line, tls_server.log
        said += line
    shown = subprocess.run(
        ["bash", "-c", said[said.index("curl ") :]], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert '"success":true' in shown
    command = [sys.executable, "-m", "tidegate.cli", "limit", "demo", "user_1", "10/minute"]
    env = {
        **os.environ,
        "TIDEGATE_URL": tls_server.url,
        "TIDEGATE_KEY": tls_server.workspace().key.secret,
    }

    def ask(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, env={**env, **more}, check=False
        )

    refused = ask()
    assert refused.returncode == 2
    assert "SSL_CERT_FILE" in refused.stderr
    assert ask(SSL_CERT_FILE=str(certificate[0])).returncode == 0


# The first start.


def test_the_first_start_prints_a_key_and_a_curl_line_that_works_and_the_second_prints_none(
    tmp_path: Path,
) -> None:
    with TidegateServer(data_dir=tmp_path / "data") as server:
        assert server.process is not None
        assert server.process.stdout is not None
        said = [server.announcement]
        while "-d " not in said[-1]:
            said.append(server.process.stdout.readline())
            assert said[-1], server.log
        text = "".join(said)
        assert str(tmp_path / "data") in text
        line = text[text.index("curl ") :]
        assert shlex.split(line.replace("\\\n", " "))[0] == "curl"
        answer = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        assert '"success":true' in answer and '"remaining":9' in answer
        assert server.stop() == 0
        server.start()
        assert server.stop() == 0
        again = server.announcement + server.rest_of_announcement()
        assert "tg_" not in again and "curl" not in again
        assert str(tmp_path / "data") in again
        mode = (tmp_path / "data").stat().st_mode & 0o777
        assert mode == 0o700


def test_make_serve_runs_the_same_command() -> None:
    makefile = Path(__file__).parents[3] / "Makefile"
    shown = subprocess.run(
        ["make", "-n", "serve", "DATA_DIR=/d", "LISTEN=127.0.0.1:1"],
        cwd=makefile.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "tidegate serve --data-dir /d --listen 127.0.0.1:1" in shown


def test_a_second_server_on_the_same_address_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "tidegate.cli",
            "serve",
            "--data-dir",
            str(tmp_path / "d"),
            "--listen",
            listen,
        ]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
        )
    assert ended.returncode == 2
    assert listen in ended.stderr and "--listen" in ended.stderr
