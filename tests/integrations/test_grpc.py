from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.integrations.kit import consumed, manual_async_limiter, manual_clock, manual_limiter, no_blocking
from tidegate import AsyncLimiter, Limit, Limiter
from tidegate.integrations import Rule, header
from tidegate.integrations.grpc import AsyncRateLimitInterceptor, Call, RateLimitInterceptor

SERVICE = "mail.Mailer"


def echo(request: bytes, context: Any) -> bytes:
    return request


def repeat(request: bytes, context: Any) -> Iterator[bytes]:
    yield request
    yield request


def join(requests: Iterator[bytes], context: Any) -> bytes:
    return b"".join(requests)


async def async_echo(request: bytes, context: Any) -> bytes:
    return request


async def async_repeat(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    yield request


async def async_write(request: bytes, context: Any) -> None:
    await context.write(request)
    await context.write(request)


async def async_join(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([message async for message in requests])


def handlers(**functions: Any) -> Any:
    kinds = {
        "Echo": grpc.unary_unary_rpc_method_handler,
        "Repeat": grpc.unary_stream_rpc_method_handler,
        "Write": grpc.unary_stream_rpc_method_handler,
        "Join": grpc.stream_unary_rpc_method_handler,
    }
    return grpc.method_handlers_generic_handler(SERVICE, {n: kinds[n](f) for n, f in functions.items()})


@contextmanager
def serving(interceptor: RateLimitInterceptor, **functions: Any) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[interceptor])
    server.add_generic_rpc_handlers((handlers(**functions),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def async_serving(interceptor: AsyncRateLimitInterceptor, **functions: Any) -> AsyncIterator[Any]:
    server = grpc.aio.server(interceptors=[interceptor])
    server.add_generic_rpc_handlers((handlers(**functions),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


@pytest.fixture
def limiter() -> Limiter:
    return manual_limiter(manual_clock())


@pytest.fixture
def async_limiter() -> Iterator[AsyncLimiter]:
    with no_blocking():
        yield manual_async_limiter(manual_clock())


def pairs(metadata: Any) -> dict[str, str]:
    return {name: value for name, value in metadata}  # noqa: C416  # older metadata looks like a mapping but is not one


def assert_denied(error: grpc.RpcError) -> None:
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "is used up. Retry in" in error.details()
    trailers = pairs(error.trailing_metadata())
    assert trailers["grpc-retry-pushback-ms"] == "60001"
    assert trailers["retry-after"] == "61"
    assert trailers["ratelimit"].endswith(";r=0;t=61")


def test_a_call_is_denied_when_its_limit_is_used_up(limiter: Limiter) -> None:
    with serving(RateLimitInterceptor("2/minute", limiter=limiter), Echo=echo) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        answer, first = call.with_call(b"hello")
        assert answer == b"hello"
        assert pairs(first.trailing_metadata())["ratelimit"] == '"application";r=1;t=60'
        assert call(b"again") == b"again"
        with pytest.raises(grpc.RpcError) as caught:
            call(b"more")
    assert_denied(caught.value)


async def test_a_call_of_an_asynchronous_server_is_denied_when_its_limit_is_used_up(
    async_limiter: AsyncLimiter,
) -> None:
    async with async_serving(
        AsyncRateLimitInterceptor("2/minute", limiter=async_limiter), Echo=async_echo
    ) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        first = call(b"hello")
        assert await first == b"hello"
        assert pairs(await first.trailing_metadata())["ratelimit"] == '"application";r=1;t=60'
        assert await call(b"again") == b"again"
        with pytest.raises(grpc.RpcError) as caught:
            await call(b"more")
    assert_denied(caught.value)


def test_streams_are_limited_by_call(limiter: Limiter) -> None:
    rules = [Rule("1/minute", path="*/Repeat"), Rule("1/minute", path="*/Join")]
    with serving(RateLimitInterceptor(*rules, limiter=limiter), Repeat=repeat, Join=join) as channel:
        assert list(channel.unary_stream(f"/{SERVICE}/Repeat")(b"a")) == [b"a", b"a"]
        assert channel.stream_unary(f"/{SERVICE}/Join")(iter([b"a", b"b"])) == b"ab"
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/{SERVICE}/Repeat")(b"a"))
        assert_denied(caught.value)
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{SERVICE}/Join")(iter([b"a"]))
        assert_denied(caught.value)


async def test_streams_of_an_asynchronous_server_are_limited_by_call(async_limiter: AsyncLimiter) -> None:
    rules = [Rule("1/minute", path=f"*/{name}") for name in ("Repeat", "Join", "Write")]
    functions = {"Repeat": async_repeat, "Join": async_join, "Write": async_write}
    async with async_serving(
        AsyncRateLimitInterceptor(*rules, limiter=async_limiter), **functions
    ) as channel:
        for name in ("Repeat", "Write"):
            call = channel.unary_stream(f"/{SERVICE}/{name}")
            assert [message async for message in call(b"a")] == [b"a", b"a"]
            with pytest.raises(grpc.RpcError) as caught:
                _ = [message async for message in call(b"a")]
            assert_denied(caught.value)
        join_call = channel.stream_unary(f"/{SERVICE}/Join")
        assert await join_call(iter([b"a", b"b"])) == b"ab"
        with pytest.raises(grpc.RpcError) as caught:
            await join_call(iter([b"a"]))
        assert_denied(caught.value)


def test_rules_see_metadata_message_and_caller(limiter: Limiter) -> None:
    def size(call: Call) -> int:
        return len(call.request)

    rules = (
        Rule("9/minute", by=header("x-user"), cost=size, namespace="bytes"),
        Rule("9/minute", namespace="calls"),
    )
    with serving(RateLimitInterceptor(*rules, limiter=limiter), Echo=echo) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        call(b"12345", metadata=(("x-user", "ann"),))
        with pytest.raises(grpc.RpcError):
            call(b"12345", metadata=(("x-user", "ann"),))
    assert consumed(limiter, "9/minute", "bytes", "ann") == 5
    assert consumed(limiter, "9/minute", "calls", "127.0.0.1") == 1


def test_a_denial_below_a_method_is_resource_exhausted(limiter: Limiter) -> None:
    @limiter.limited(Limit("1/minute", namespace="sending"), key=lambda request, context: "ann")
    def send(request: bytes, context: Any) -> bytes:
        return request

    with serving(RateLimitInterceptor(limiter=limiter), Echo=send) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        assert call(b"a") == b"a"
        with pytest.raises(grpc.RpcError) as caught:
            call(b"b")
        assert_denied(caught.value)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/nothing/Here")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_denial_below_an_asynchronous_method_is_resource_exhausted(
    async_limiter: AsyncLimiter,
) -> None:
    @async_limiter.limited(Limit("1/minute", namespace="sending"), key=lambda request, context: "ann")
    async def send(request: bytes, context: Any) -> bytes:
        return request

    async with async_serving(AsyncRateLimitInterceptor(limiter=async_limiter), Echo=send) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        assert await call(b"a") == b"a"
        with pytest.raises(grpc.RpcError) as caught:
            await call(b"b")
    assert_denied(caught.value)
