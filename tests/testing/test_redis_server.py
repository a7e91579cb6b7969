from __future__ import annotations

import socket
import ssl

import pytest

from tidegate.testing import RedisReplyError, RedisServer, ServerError, wait_until

pytestmark = pytest.mark.server


def test_a_killed_redis_comes_back_empty_at_the_same_port(fresh_redis: RedisServer) -> None:
    port = fresh_redis.port
    fresh_redis.command("SET", "key", "1")
    fresh_redis.kill()
    with pytest.raises(ConnectionRefusedError):
        fresh_redis.command("PING")
    fresh_redis.start()
    assert fresh_redis.port == port
    assert fresh_redis.command("GET", "key") is None


def test_a_restarted_redis_keeps_its_data_and_an_empty_restart_does_not(fresh_redis: RedisServer) -> None:
    port = fresh_redis.port
    fresh_redis.command("SET", "key", "1")
    fresh_redis.restart()
    assert fresh_redis.command("GET", "key") == "1"
    fresh_redis.restart(empty=True)
    assert fresh_redis.command("GET", "key") is None
    assert fresh_redis.port == port


def test_a_kill_after_a_restart_does_not_bring_back_what_the_restart_kept(fresh_redis: RedisServer) -> None:
    fresh_redis.command("SET", "key", "1")
    fresh_redis.restart()
    fresh_redis.kill()
    fresh_redis.start()
    assert fresh_redis.command("GET", "key") is None


def test_a_saved_redis_comes_back_from_a_kill_as_the_older_copy(fresh_redis: RedisServer) -> None:
    fresh_redis.command("SET", "key", "old")
    fresh_redis.save()
    fresh_redis.command("SET", "key", "new")
    fresh_redis.kill()
    fresh_redis.start()
    assert fresh_redis.command("GET", "key") == "old"


def test_a_persistent_redis_keeps_acknowledged_writes_over_a_kill() -> None:
    with RedisServer(persistent=True) as redis:
        redis.command("SET", "key", "1")
        redis.kill()
        redis.start()
        assert redis.command("GET", "key") == "1"
        redis.restart(empty=True)
        assert redis.command("GET", "key") is None


def test_a_redis_that_still_loads_its_data_is_not_ready() -> None:
    # Loading 5,000 commands takes half a second with this delay, in microseconds per key.
    with RedisServer(persistent=True, settings={"key-load-delay": "100"}) as redis:
        redis.command("EVAL", "for i = 1, 5000 do redis.call('SET', i, i) end", 0)
        redis.kill()
        redis.start()
        assert redis.command("GET", "5000") == "5000"


def test_a_frozen_redis_accepts_bytes_and_answers_only_after_the_thaw(fresh_redis: RedisServer) -> None:
    fresh_redis.freeze()
    assert fresh_redis.is_frozen
    with socket.create_connection((fresh_redis.host, fresh_redis.port), timeout=0.1) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(100)
        fresh_redis.thaw()
        connection.settimeout(10)
        assert connection.recv(100) == b"+PONG\r\n"


def test_flush_removes_keys_scripts_and_functions(fresh_redis: RedisServer) -> None:
    fresh_redis.command("SET", "key", "1")
    digest = fresh_redis.command("SCRIPT", "LOAD", "return 1")
    fresh_redis.command(
        "FUNCTION", "LOAD", "#!lua name=one\nredis.register_function('one', function() return 1 end)"
    )
    fresh_redis.flush()
    assert fresh_redis.command("DBSIZE") == 0
    assert fresh_redis.command("SCRIPT", "EXISTS", str(digest)) == [0]
    assert fresh_redis.command("FUNCTION", "LIST") == []


@pytest.mark.parametrize("hurt", ["stop", "kill", "freeze"])
def test_recover_makes_it_answer_whatever_was_done_to_it(fresh_redis: RedisServer, hurt: str) -> None:
    getattr(fresh_redis, hurt)()
    fresh_redis.recover()
    assert fresh_redis.command("PING") == "PONG"


def test_stop_ends_a_frozen_redis_too(fresh_redis: RedisServer) -> None:
    fresh_redis.freeze()
    fresh_redis.stop()
    assert not fresh_redis.is_running
    assert not fresh_redis.is_frozen


def test_a_password_is_asked_for_and_is_part_of_the_url() -> None:
    with RedisServer(password='se"cret /@') as redis:
        assert redis.url == f"redis://:se%22cret%20%2F%40@127.0.0.1:{redis.port}/0"
        assert redis.command("PING") == "PONG"
        redis.password = "wrong"
        with pytest.raises(RedisReplyError, match="WRONGPASS"):
            redis.command("PING")


def test_tls_is_verified_strictly_against_the_servers_own_certificate() -> None:
    with RedisServer(tls=True) as redis:
        assert redis.url.startswith("rediss://")
        assert redis.ca_path is not None
        assert redis.command("PING") == "PONG"
        context = ssl.create_default_context(cafile=redis.ca_path)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        with (
            socket.create_connection((redis.host, redis.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=redis.host) as connection,
        ):
            connection.sendall(b"PING\r\n")
            assert connection.recv(100) == b"+PONG\r\n"
        with (
            socket.create_connection((redis.host, redis.port), timeout=10) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            ssl.create_default_context().wrap_socket(plain, server_hostname=redis.host)


def test_a_replica_follows_a_master_that_has_a_password() -> None:
    with (
        RedisServer(password="secret") as master,
        RedisServer(password="secret", replica_of=master) as replica,
    ):
        master.command("SET", "key", "1")
        wait_until(
            lambda: replica.command("GET", "key") == "1", timeout_s=20, what="the key to reach the replica"
        )
        with pytest.raises(RedisReplyError, match="READONLY"):
            replica.command("SET", "key", "2")


def test_settings_reach_the_server() -> None:
    with RedisServer(settings={"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as redis:
        assert redis.command("CONFIG", "GET", "maxmemory-policy") == ["maxmemory-policy", "allkeys-lru"]


def test_what_the_server_objected_to_is_in_the_error_and_nothing_is_left_behind() -> None:
    redis = RedisServer(settings={"maxmemory": "plenty"})
    with pytest.raises(ServerError, match="argument must be a memory value"):
        redis.start()
    with pytest.raises(ServerError, match=r"call start\(\) first"):
        _ = redis.directory


def test_starting_twice_is_refused(fresh_redis: RedisServer) -> None:
    with pytest.raises(ServerError, match="is already running"):
        fresh_redis.start()
