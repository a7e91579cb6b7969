from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import uvloop

from tests.contract.origin_places import RedisPlace, key_of
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.adapters.redis.wire import pack
from tidegate.adapters.secrets import mask
from tidegate.core.model import Component, OriginReply
from tidegate.core.resets import ResetsReply
from tidegate.errors import ConfigurationError, DependencyError, DependencyTimeout, DependencyUnavailable
from tidegate.ports import Origin
from tidegate.testing import RedisServer, ValkeyServer
from tidegate.testing.contracts.origin import (
    FAR_MS,
    REGION,
    TIMEOUT_S,
    check_cancelled_calls,
    component,
    new_digest,
)
from tidegate.testing.contracts.origin_remote import RemoteOriginContract
from tidegate.testing.contracts.origin_resets import reset
from tidegate.testing.fixtures import StartProxy

pytestmark = pytest.mark.server

PASSWORD = "p@ss:w/ö?#rd %"


class TestRedisOrigin(RemoteOriginContract):
    @pytest.fixture
    def place(self, fresh_redis: RedisServer) -> RedisPlace:
        return RedisPlace(fresh_redis)

    async def test_value_and_expiry_are_set_by_one_command(self, origin: Origin, place: RedisPlace) -> None:
        await self.merged(origin, component(new_digest(), 1))  # connects and loads the script
        digest = new_digest()
        before = _calls(place.server)
        await self.merged(origin, component(digest, 5))
        sent = {name: count - before.get(name, 0) for name, count in _calls(place.server).items()}
        assert sent["evalsha"] == 1
        assert await _expiry_ms(place.server, digest) == FAR_MS
        await self.merged(origin, component(digest, 6))
        await self.merged(origin, component(digest, 6, writer="node-b"))
        assert await _expiry_ms(place.server, digest) == FAR_MS

    async def test_a_cell_that_outlives_every_server_still_has_an_expiry(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        cell = component(new_digest(), 1, expires_at_ms=3 * 2**62)
        await self.merged(origin, cell)
        assert await _expiry_ms(place.server, cell.digest) == 2**53

    async def test_more_huge_counts_than_64_bits_hold_even_when_each_is_cut(self, origin: Origin) -> None:
        await self.check_huge_counts(origin, writers=1_200)

    async def test_two_hundred_and_fifty_cells_are_one_command(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        before = _calls(place.server).get("evalsha", 0)
        await origin.merge([component(new_digest(), 1) for _ in range(250)], timeout_s=TIMEOUT_S)
        assert _calls(place.server)["evalsha"] - before == 1
        await origin.merge([component(new_digest(), 1) for _ in range(251)], timeout_s=TIMEOUT_S)
        assert _calls(place.server)["evalsha"] - before == 3
        assert origin.statistics()["cells_merged"] == 501

    async def test_a_script_that_the_server_forgot_is_loaded_again(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 1))
        place.server.command("SCRIPT", "FLUSH", "SYNC")
        cells = [component(digest, 2), *(component(new_digest(), 1) for _ in range(600))]
        answers = await origin.merge(cells, timeout_s=TIMEOUT_S)
        assert answers[:2] == [OriginReply(2, 1), OriginReply(1, 0)]
        assert origin.statistics()["connections_opened"] == 1

    async def test_a_server_with_an_older_copy_is_recognised_by_the_component_before_the_merge(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        digest = new_digest()
        await self.merged(origin, component(digest, 5, writer="a"))
        await self.merged(origin, component(digest, 8, writer="b"))
        place.server.save()
        await self.merged(origin, component(digest, 50, writer="a"))
        place.server.kill()
        place.server.start()
        await self.recovered(origin, component(new_digest(), 1))
        assert await self.read(origin, component(digest, writer="a")) == OriginReply(13, 5)
        assert await self.merged(origin, component(digest, 51, writer="a")) == OriginReply(59, 5)
        pulse = await origin.pulse(REGION, timeout_s=TIMEOUT_S)
        assert (pulse.region, pulse.was_empty) == (REGION, True), "the copy has the name, and lost counts"
        assert not (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty

    async def test_a_key_that_is_not_a_cell_is_replaced(self, origin: Origin, place: RedisPlace) -> None:
        good, bad = component(new_digest(), 3), component(new_digest(), 4)
        await self.merged(origin, bad)
        with_text = b"".join([pack(("DEL", key_of(bad))), pack(("SET", key_of(bad), "text"))])
        await _raw(place.server, with_text, 2)
        assert await origin.read([good, bad], timeout_s=TIMEOUT_S) == [OriginReply(0, 0), OriginReply(0, 0)]
        assert await origin.merge([good, bad], timeout_s=TIMEOUT_S) == [OriginReply(3, 0), OriginReply(4, 0)]
        assert await _expiry_ms(place.server, bad.digest) == FAR_MS

    async def test_a_server_that_refuses_writes_is_unavailable(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        cell = component(new_digest(), 1)
        await self.merged(origin, cell)
        place.server.command("REPLICAOF", "127.0.0.1", 1)
        try:
            with pytest.raises(DependencyUnavailable, match=r"READONLY|connection"):
                await self.merged(origin, component(cell.digest, 2))
            with pytest.raises(DependencyUnavailable, match="not the master"):
                await self.merged(origin, component(cell.digest, 2))
        finally:
            place.server.command("REPLICAOF", "NO", "ONE")
        assert await self.merged(origin, component(cell.digest, 2)) == OriginReply(2, 1)

    async def test_a_server_that_is_out_of_memory_is_unavailable(
        self, origin: Origin, place: RedisPlace
    ) -> None:
        place.server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(DependencyUnavailable, match="raise maxmemory") as raised:
                await self.merged(origin, component(new_digest(), 1))
            # Redis names the place in the script with an "@": it must not be taken for the end of a password.
            assert mask(str(raised.value)) == str(raised.value)
            assert str(raised.value).startswith(f"{place.url}: OOM ")
        finally:
            place.server.command("CONFIG", "SET", "maxmemory", 0)
        await self.merged(origin, component(new_digest(), 1))

    async def test_another_prefix_is_another_origin(self, place: RedisPlace, origin: Origin) -> None:
        other = RedisOrigin(f"{place.url}?prefix=other")
        await other.open("lhr", timeout_s=TIMEOUT_S)
        cell = component(new_digest(), 5)
        await self.merged(origin, cell)
        assert await self.read(other, cell) == OriginReply(0, 0)
        await other.close()

    async def test_another_database_is_another_origin(self, place: RedisPlace, origin: Origin) -> None:
        other = RedisOrigin(place.url.removesuffix("/0") + "/1")
        await other.open("lhr", timeout_s=TIMEOUT_S)
        cell = component(new_digest(), 5)
        await self.merged(origin, cell)
        assert await self.read(other, cell) == OriginReply(0, 0)
        await other.close()

    async def test_a_closed_origin_says_so(self, origin: Origin) -> None:
        await origin.close()
        with pytest.raises(DependencyUnavailable, match="closed"):
            await self.merged(origin, component(new_digest(), 1))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda url: url.replace("redis://", "redis+cluster://"), "not part of a Redis Cluster"),
            (lambda url: url.replace("redis://", "redis+sentinel://"), "not a sentinel"),
            (lambda url: url.removesuffix("/0") + "/99", "DB index"),
            (lambda url: url.replace("redis://", "redis://user:secret-word@"), "WRONGPASS"),
        ],
        ids=["no cluster", "no sentinel", "no such database", "no such user"],
    )
    async def test_what_can_never_work_is_a_configuration_error(
        self, place: RedisPlace, change: object, said: str
    ) -> None:
        assert callable(change)
        origin = RedisOrigin(change(place.url.replace("valkey://", "redis://")))
        with pytest.raises(ConfigurationError, match=said) as refusal:
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        assert "secret-word" not in str(refusal.value)
        with pytest.raises(DependencyUnavailable):  # after the start: no error
            await origin.pulse(REGION, timeout_s=TIMEOUT_S)
        await origin.close()


class TestValkeyOrigin(TestRedisOrigin):
    @pytest.fixture
    def place(self, fresh_valkey: ValkeyServer) -> RedisPlace:
        return RedisPlace(fresh_valkey)


@pytest.fixture(scope="module")
def tls_server() -> Iterator[RedisServer]:
    with RedisServer(password=PASSWORD, tls=True) as server:
        yield server


class TestRedisOriginWithTLSAndPassword(RemoteOriginContract):
    @pytest.fixture
    def place(self, tls_server: RedisServer) -> RedisPlace:
        tls_server.recover()
        tls_server.flush()
        return RedisPlace(tls_server, f"{tls_server.url}?ssl_ca_certs={tls_server.ca_path}")

    async def test_a_certificate_that_is_not_trusted_is_a_configuration_error(
        self, place: RedisPlace
    ) -> None:
        origin = RedisOrigin(place.server.url)
        with pytest.raises(ConfigurationError, match="certificate is not trusted"):
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_checking_the_certificate_can_be_switched_off(self, place: RedisPlace) -> None:
        origin = RedisOrigin(f"{place.server.url}?ssl_cert_reqs=none")
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_a_connection_without_tls_to_a_tls_server_fails_within_the_time_limit(
        self, place: RedisPlace
    ) -> None:
        origin = RedisOrigin(place.server.url.replace("rediss://", "redis://"))
        with pytest.raises(DependencyError):
            await origin.open(REGION, timeout_s=1.0)
        await origin.close()

    @pytest.mark.parametrize("password", ["", "wrong-one"], ids=["none", "wrong"])
    async def test_a_wrong_password_is_a_configuration_error_that_does_not_show_it(
        self, place: RedisPlace, password: str
    ) -> None:
        origin = RedisOrigin(place.url.replace(quote(PASSWORD, safe=""), password))
        with pytest.raises(ConfigurationError, match=r"WRONGPASS|NOAUTH") as refusal:
            await origin.open(REGION, timeout_s=TIMEOUT_S)
        assert "wrong-one" not in str(refusal.value)
        await origin.close()


@pytest.mark.parametrize("url", ["plain", "tls"])
def test_it_works_on_uvloop_too(fresh_redis: RedisServer, tls_server: RedisServer, url: str) -> None:
    server = fresh_redis if url == "plain" else tls_server
    server.recover()
    server.flush()
    place = RedisPlace(server, f"{server.url}?ssl_ca_certs={server.ca_path}" if server.tls else server.url)

    async def main() -> None:
        origin = place.node()
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        await check_cancelled_calls(origin, seed=2)
        cell = component(new_digest(), 3)
        for restarted in (False, True):
            place.freeze()
            with pytest.raises(DependencyTimeout):
                await origin.merge([cell], timeout_s=0.1)
            place.thaw()
            if restarted:
                place.kill()
                place.start_empty()
            await RemoteOriginContract.recovered(origin, cell)
            assert await origin.read([cell], timeout_s=TIMEOUT_S) == [OriginReply(3, 3)]
        await origin.close()

    uvloop.run(main())


# The connections of the first two loops are not closed.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_one_origin_serves_event_loops_one_after_the_other(fresh_redis: RedisServer) -> None:
    origin = RedisOrigin(fresh_redis.url)
    digest = new_digest()

    async def count(own: int) -> list[OriginReply]:
        replies = await origin.merge([component(digest, own)], timeout_s=TIMEOUT_S)
        if own == 3:
            await origin.close()
        return replies

    answers = [asyncio.run(count(own)) for own in (1, 2, 3)]
    gc.collect()
    assert answers == [[OriginReply(1, 0)], [OriginReply(2, 1)], [OriginReply(3, 2)]]


# The warning is about threads that the child lacks: the spawner of the test servers has one.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_and_its_parent_do_not_share_a_connection(fresh_redis: RedisServer) -> None:
    origin = RedisOrigin(fresh_redis.url)
    cells = [component(new_digest(), own) for own in range(1, 21)]
    await origin.merge(cells, timeout_s=TIMEOUT_S)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            asyncio.set_event_loop(None)
            asyncio._set_running_loop(None)
            status = asyncio.run(_ask_all(origin, cells))
        finally:
            os._exit(status)
    assert await _ask_all(origin, cells) == 0
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert await _ask_all(origin, cells) == 0
    assert origin.statistics()["connections_opened"] == 1
    await origin.close()


async def _ask_all(origin: RedisOrigin, cells: list[Component]) -> int:
    """Ask for each cell alone, many times; 0 when every answer was right."""
    for _ in range(20):
        for cell in cells:
            if await origin.read([cell], timeout_s=TIMEOUT_S) != [OriginReply(cell.own, cell.own)]:
                return 2
    return 0


def _calls(server: RedisServer) -> dict[str, int]:
    """How often the server has run each command."""
    return {
        name.removeprefix("cmdstat_"): int(value.partition("calls=")[2].partition(",")[0])
        for name, value in server.info("commandstats").items()
    }


async def _raw(server: RedisServer, packed: bytes, replies: int) -> list[bytes]:
    """Commands with binary arguments, on a connection of their own."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(packed)
    lines = [await reader.readline() for _ in range(replies)]
    writer.close()
    await writer.wait_closed()
    return lines


async def _expiry_ms(server: RedisServer, digest: bytes) -> int:
    (line,) = await _raw(server, pack(("PEXPIRETIME", key_of(component(digest)))), 1)
    return int(line[1:])


async def test_nodes_learn_that_resets_were_evicted_even_if_there_are_new_ones(
    fresh_redis: RedisServer,
) -> None:
    origin = RedisOrigin(fresh_redis.url)
    await origin.open(REGION, timeout_s=TIMEOUT_S)
    before = await origin.resets([reset("x")], since=0, timeout_s=TIMEOUT_S)
    fresh_redis.flush()
    after = await origin.resets([reset("y")], since=0, timeout_s=TIMEOUT_S)
    assert after.number > before.number
    assert await origin.resets([], since=before.number, timeout_s=TIMEOUT_S) == ResetsReply(0, [])
    await origin.close()


async def test_another_server_process_counts_as_wiped_and_another_connection_does_not(
    fresh_redis: RedisServer, fault_proxy: StartProxy
) -> None:
    proxy = fault_proxy(fresh_redis.port)
    origin = RedisOrigin(proxy.through(fresh_redis.url))
    await origin.open(REGION, timeout_s=TIMEOUT_S)
    proxy.reset_connections()
    with pytest.raises(DependencyError):
        await origin.pulse(REGION, timeout_s=TIMEOUT_S)
    assert not (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
    assert origin.statistics()["connections_opened"] == 2
    await origin.close()


async def test_without_the_right_to_info_every_new_connection_counts_as_a_new_server(
    fresh_redis: RedisServer, fault_proxy: StartProxy
) -> None:
    fresh_redis.command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "+@all", "-info")
    try:
        proxy = fault_proxy(fresh_redis.port)
        url = proxy.through(fresh_redis.url).replace("redis://", "redis://narrow:secret@")
        origin = RedisOrigin(url)
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        assert not (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        proxy.reset_connections()
        with pytest.raises(DependencyError):
            await origin.pulse(REGION, timeout_s=TIMEOUT_S)
        assert (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        assert not (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        await origin.close()
    finally:
        fresh_redis.command("ACL", "DELUSER", "narrow")
