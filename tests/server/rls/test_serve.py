"""The whole service on a port, asked by grpcio with the published stubs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.server.http2.peer import until
from tests.server.http2.programs import find_program
from tests.server.rls.asking import OK, OVER_LIMIT, RULES, one, request, response
from tidegate import AsyncLimiter
from tidegate.server.http1.listener import bind
from tidegate.server.rls.rules_watch import RulesWatch
from tidegate.server.rls.serve import RlsServer
from tidegate.testing import RedisServer
from tidegate.testing.servers.redis import create_certificate

pytestmark = pytest.mark.server

USER = [("user", "u1")]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, tls: ssl.SSLContext | None = None, poll_s: float = 3600.0, **limiter_options: Any
) -> AsyncIterator[RlsServer]:
    rules = folder / "rules.yaml"
    rules.write_bytes(RULES)
    async with AsyncLimiter(**limiter_options) as limiter:
        server = RlsServer(limiter, RulesWatch(rules))
        await server.start(bind("127.0.0.1", 0, shared=False), tls, poll_s=poll_s)
        try:
            yield server
        finally:
            await server.stop(5.0)


def ask(channel: Any, *descriptors: Any, **options: Any) -> Any:
    stub = rls_pb2_grpc.RateLimitServiceStub(channel)
    return response(stub.ShouldRateLimit(request(*descriptors, **options), timeout=20))


async def flushed(server: RlsServer) -> None:
    """Until the limiter has sent its counts to Redis."""
    limiter = server.limiter
    assert isinstance(limiter, AsyncLimiter)
    await until(lambda: limiter.statistics().origin_dirty_subjects == 0)


def descriptor_set(file: Any) -> bytes:
    """A published file and all that it imports, as protoc --descriptor_set_out would write them."""
    found = descriptor_pb2.FileDescriptorSet()
    seen: set[str] = set()

    def add(one: Any) -> None:
        if one.name not in seen:
            seen.add(one.name)
            for dependency in one.dependencies:
                add(dependency)
            found.file.add().ParseFromString(one.serialized_pb)

    add(file)
    return bytes(found.SerializeToString())


async def asked(server: RlsServer, play: Callable[[Any], None]) -> None:
    """Run the client in a thread, because grpcio's calls block."""

    def run() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            play(channel)

    await asyncio.to_thread(run)


async def test_grpcio_asks_until_the_limit(tmp_path: Path) -> None:
    def play(channel: Any) -> None:
        codes = [ask(channel, one(USER)).code for _ in range(7)]
        assert codes == [OK] * 5 + [OVER_LIMIT] * 2
        with pytest.raises(grpc.RpcError) as error:
            ask(channel, one(USER), domain="")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "domain" in error.value.details()

    async with serving(tmp_path) as server:
        await asked(server, play)
        statistics = server.statistics()
        assert (statistics.service.allowed, statistics.service.denied) == (5, 2)
        assert statistics.http2 is not None
        assert statistics.http2.calls["/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"] == {
            0: 7,
            3: 1,
        }


async def test_many_clients_together_never_pass_a_limit(tmp_path: Path) -> None:
    codes: list[int] = []

    def play(channel: Any) -> None:
        stub = rls_pb2_grpc.RateLimitServiceStub(channel)
        futures = [
            stub.ShouldRateLimit.future(request(one([("tier", "gold")])), timeout=20) for _ in range(100)
        ]
        codes.extend(future.result().overall_code for future in futures)

    async with serving(tmp_path) as server:
        with ThreadPoolExecutor(4):
            await asyncio.gather(*[asked(server, play) for _ in range(4)])
    assert codes.count(OK) == 50
    assert codes.count(OVER_LIMIT) == 350


async def test_two_services_share_their_limits_through_redis(tmp_path: Path) -> None:
    codes: list[int] = []

    def play(channel: Any) -> None:
        codes.append(ask(channel, one([("tier", "gold")], hits=50)).code)

    with RedisServer() as redis:
        async with (
            serving(tmp_path, region="test", origin=redis.url) as first,
            serving(tmp_path, region="test", origin=redis.url) as second,
        ):
            await asked(first, play)
            await flushed(first)
            # A counter that is not known yet is read before it is used.
            await asked(second, play)
    assert codes == [OK, OVER_LIMIT]


async def test_go_clients_get_an_answer_to_every_call(tmp_path: Path) -> None:
    ghz = find_program("ghz", "a client of grpc-go")
    protoset = tmp_path / "rls.protoset"
    protoset.write_bytes(descriptor_set(rls_pb2.DESCRIPTOR))
    data = {"domain": "edge", "descriptors": [{"entries": [{"key": "tier", "value": "gold"}]}]}
    call = (
        "--protoset",
        str(protoset),
        "--call",
        "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    )
    async with serving(tmp_path) as server:
        process = await asyncio.create_subprocess_exec(
            *(
                ghz,
                "--insecure",
                *call,
                "-d",
                json.dumps(data),
                "-n",
                "2000",
                "-c",
                "20",
                "--connections",
                "4",
            ),
            *("--format", "json", f"127.0.0.1:{server.port}"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        report = json.loads(output)
        statistics = server.statistics().service
    assert report["statusCodeDistribution"] == {"OK": 2000}
    assert (statistics.allowed, statistics.denied) == (50, 1950)


async def test_the_service_says_whether_it_is_healthy(tmp_path: Path) -> None:
    def play(channel: Any) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "envoy.service.ratelimit.v3.RateLimitService"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=20)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as error:
            next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

    async with serving(tmp_path) as server:
        await asked(server, play)


async def test_a_drain_says_not_serving_and_loses_no_call(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        ready, stopping = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        seen: list[int] = []

        def play(channel: Any) -> None:
            stub = rls_pb2_grpc.RateLimitServiceStub(channel)
            stub.ShouldRateLimit(request(one([("free", "x")])), timeout=20)
            loop.call_soon_threadsafe(ready.set)
            asyncio.run_coroutine_threadsafe(stopping.wait(), loop).result()
            health = health_pb2_grpc.HealthStub(channel)
            # While it drains, calls on the open connection continue until the client has seen the GOAWAY.
            with contextlib.suppress(grpc.RpcError):
                seen.append(health.Check(health_pb2.HealthCheckRequest(), timeout=20).status)

        player = asyncio.create_task(asked(server, play))
        await ready.wait()
        stopping.set()
        assert await server.stop(5.0)
        await player
        assert health_pb2.HealthCheckResponse.SERVING not in seen


async def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    create_certificate(certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async with serving(tmp_path, context) as server:

        def play() -> None:
            credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
            with grpc.secure_channel(f"localhost:{server.port}", credentials) as channel:
                assert ask(channel, one(USER)).code == OK

        await asyncio.to_thread(play)
        # A client that speaks TLS but not HTTP/2 is disconnected.
        plain = ssl.create_default_context(cafile=certificate)
        reader, writer = await asyncio.open_connection("localhost", server.port, ssl=plain)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_rules_are_reloaded_under_traffic_without_a_failed_call(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        stop = asyncio.Event()
        codes: list[int] = []

        def play(channel: Any) -> None:
            while not stop.is_set():
                codes.append(ask(channel, one([("tier", "gold")])).code)

        player = asyncio.create_task(asked(server, play))
        for quota in range(51, 61):
            (tmp_path / "rules.yaml").write_bytes(RULES.replace(b": 50,", f": {quota},".encode()))
            assert await server.rules.run_once()
            (tmp_path / "rules.yaml").write_bytes(b"domain: [")
            assert not await server.rules.run_once()
            assert server.statistics().rules_error is not None
        stop.set()
        await player
        assert set(codes) <= {OK, OVER_LIMIT}

        def look(channel: Any) -> None:
            assert ask(channel, one([("tier", "gold")], 0)).statuses[0].quota == 60

        await asked(server, look)
        assert server.statistics().rules_reloads == 10
