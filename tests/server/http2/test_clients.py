"""Independent HTTP/2 clients: grpcio, h2spec and h2load against our server, in cleartext and over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.server.http2.peer import ECHO, bound_socket
from tests.server.http2.programs import find_program
from tidegate.server.http2.grpc import GrpcError, Method, Status
from tidegate.server.http2.listener import Http2Server
from tidegate.testing.servers.redis import create_certificate

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    create_certificate(certificate, key)
    return certificate, key


def refuse(_data: bytes) -> bytes:
    raise GrpcError(Status.INVALID_ARGUMENT, "domain: größer als 100 %")


async def slow(data: bytes) -> bytes:
    await asyncio.sleep(0)
    return data


@contextlib.asynccontextmanager
async def served(certificate: tuple[Path, Path] | None) -> AsyncIterator[int]:
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
    methods = [Method(ECHO, lambda data: data), Method("/t/Refuse", refuse), Method("/t/Slow", slow)]
    server = Http2Server(methods, tls=context)
    bound = bound_socket()
    server.start(bound)
    try:
        yield bound.getsockname()[1]
    finally:
        assert await server.drain(5.0)


async def run(*command: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, output.decode()


def with_grpcio(target: str, certificate: tuple[Path, Path] | None) -> None:
    if certificate is None:
        channel = grpc.insecure_channel(target)
    else:
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(certificate[0].read_bytes()))
    with channel:
        method: Callable[[str], Any] = channel.unary_unary
        echo, slowly, refused = method(ECHO), method("/t/Slow"), method("/t/Refuse")
        for size in (0, 1, 1_000, 20_000, 60_000):
            for number in range(20):
                data = bytes([number]) * size
                assert echo(data, timeout=20) == data
                assert slowly(data, timeout=20, metadata=[("x-number", str(number))]) == data
        futures = [echo.future(str(number).encode(), timeout=20) for number in range(1_000)]
        assert [future.result() for future in futures] == [str(number).encode() for number in range(1_000)]
        for call, code, details in (
            (refused, grpc.StatusCode.INVALID_ARGUMENT, "domain: größer als 100 %"),
            (method("/t/Nothing"), grpc.StatusCode.UNIMPLEMENTED, "no method /t/Nothing"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(b"", timeout=20)
            assert (error.value.code(), error.value.details()) == (code, details)
        with pytest.raises(grpc.RpcError) as error:
            echo(b"x" * 65_537, timeout=20)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("is_tls", [False, True])
async def test_grpcio_calls_succeed_and_fail_as_they_should(
    is_tls: bool, certificate: tuple[Path, Path]
) -> None:
    tls = certificate if is_tls else None
    async with served(tls) as port:
        await asyncio.to_thread(with_grpcio, f"localhost:{port}", tls)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_h2spec_finds_no_fault(is_tls: bool, certificate: tuple[Path, Path]) -> None:
    h2spec = find_program("h2spec", "conformance to RFC 9113 and RFC 7541")
    async with served(certificate if is_tls else None) as port:
        tls = ("-t", "-k") if is_tls else ()
        code, output = await run(h2spec, "-h", "127.0.0.1", "-p", str(port), "-o", "10", *tls)
    passed = re.search(r"(\d+) tests, (\d+) passed, 0 skipped, 0 failed", output)
    assert code == 0 and passed is not None and passed[1] == passed[2], output[-3000:]


@pytest.mark.parametrize("is_tls", [False, True])
async def test_h2load_gets_an_answer_to_every_request(
    is_tls: bool, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    h2load = find_program("h2load", "many clients with many streams each")
    body = tmp_path / "body"
    body.write_bytes(b"\0\0\0\0\x05hello")
    async with served(certificate if is_tls else None) as port:
        url = f"{'https' if is_tls else 'http'}://localhost:{port}{ECHO}"
        options = ("-n", "5000", "-c", "8", "-m", "100", "-H", "content-type: application/grpc")
        code, output = await run(h2load, *options, "-d", str(body), url)
    assert code == 0 and "5000 succeeded, 0 failed, 0 errored" in output, output
