"""The API as an ordinary ASGI 3 application, for a server of your own:

    app = create_app(data_dir="./tidegate-data")

The operations, answers, and bounds of a body are those of `tidegate serve`. Sockets, TLS, headers, idle connections and
processes belong to the server that hosts the application. It is started and stopped by the lifespan protocol, or where
a framework does not forward that to a mounted application, by `async with app`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tidegate.adapters.migrations import migrate
from tidegate.errors import ConfigurationError
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.http1.bounds import Intake, Rejection
from tidegate.server.messages import Answer, Head, Operation, Stream
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.config_load import load
from tidegate.server.process.first_start import TIMEOUT_S, make_private_directory
from tidegate.server.process.service import Service

__all__ = ["Application", "create_app"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Everything else is a setting of the server that hosts the application, or of the first start of `tidegate serve`.
SETTINGS: Final = frozenset(
    {
        *("data_dir", "region", "origin", "ledger", "workers", "snapshot_age_max_s"),
        *(
            "memory_bytes_max",
            "origin_bytes_max",
            "metrics_token",
            "test_mode",
            "otel.traces",
            "otel.metrics",
        ),
        *("http.body_bytes_max", "http.request_timeout_s", "http.stop_timeout_s"),
        *("decisions.log_dir", "decisions.sample", "decisions.bytes_max", "decisions.hash_key_file"),
    }
)
# The header fields that the API reads. Only Accept may come more than once.
FIELDS: Final = frozenset(b"authorization accept content-length x-test-time x-unkey-metrics".split())
# The status that is counted when a client goes before its answer. It is never sent.
CLIENT_CLOSED: Final = 499


def create_app(*, limiter: AsyncLimiter | None = None, **settings: Any) -> Application:
    """An application with the settings of docs/reference/config.md: `create_app(data_dir="data", http={"…": …})`.

    `workers` is the number of processes that run it on the same `data_dir`. With `limiter`, a limiter that you start
    and stop does the counting. Raises `ConfigurationError`, with everything that is wrong with the settings.
    """
    arguments: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            arguments |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            arguments[name] = value
    config = load(arguments=arguments).config
    for name in arguments:
        if name not in SETTINGS:
            raise ConfigurationError(f"{name}: an application has no such setting; set it where it is hosted")
        if limiter is not None and name in {"region", "origin"}:
            raise ConfigurationError(
                f"{name}: it is a setting of the limiter that was given; remove one of them"
            )
    return Application(config, limiter)


class Application:
    """`await app(scope, receive, send)`; made by `create_app`."""

    def __init__(self, config: ServerConfig, limiter: AsyncLimiter | None = None) -> None:
        self._config = config
        self._limiter = limiter
        self._intake = Intake(config.http)
        # Made at each start, so that an application can be created before a fork.
        self._service: Service | None = None

    async def start(self) -> None:
        """Create the embedded database if there is none, and start. `tidegate keys create` makes keys."""
        if self._config.ledger is None:
            make_private_directory(Path(self._config.data_dir))
            await migrate(self._config.catalog_url, timeout_s=TIMEOUT_S)
        service = Service(self._config, limiter=self._limiter)
        try:
            await service.start()
        except BaseException:
            await service.stop(0.0)
            raise
        self._service = service

    async def stop(self) -> None:
        """Flush the last counts, within `http.stop_timeout_s`."""
        service, self._service = self._service, None
        if service is not None:
            await service.stop(self._config.http.stop_timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif self._service is None:
            raise RuntimeError(
                "the Tidegate application was not started: enable lifespan in the ASGI server, or use "
                "`async with app` in the lifespan of the application that mounts it"
            )
        else:
            await self._serve(self._service, scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            step = message["type"]
            try:
                await (self.start() if step == "lifespan.startup" else self.stop())
            except Exception as error:
                logger.exception("the application could not %s", step.removeprefix("lifespan."))
                await send({"type": f"{step}.failed", "message": str(error)})
                return
            await send({"type": f"{step}.complete"})
            if step == "lifespan.shutdown":
                return

    async def _serve(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        root: str = scope.get("root_path", "").rstrip("/")
        if root and (path + "/").startswith(root + "/"):
            path = path[len(root) :]
        operation = service.router.at(scope["method"].encode("ascii", "replace"), path.encode())
        fields: dict[bytes, bytes] = {}
        rejection: Rejection | None = None
        for name, value in scope["headers"]:
            if name in FIELDS:
                if name in fields and name != b"accept":
                    rejection = Rejection(400, f"The header field {name.decode('ascii')} is given twice.")
                fields[name] = fields[name] + b"," + value if name in fields else value
        head = Head(
            fields.get(b"authorization"),
            fields.get(b"accept", b""),
            fields.get(b"x-test-time"),
            fields.get(b"x-unkey-metrics") == b"disabled",
        )
        answer: Answer | Rejection | None = rejection
        if answer is None:
            try:
                async with asyncio.timeout(self._config.http.request_timeout_s):
                    answer = await self._answer(
                        service, operation, head, fields.get(b"content-length", b""), receive
                    )
            except TimeoutError:
                answer = Rejection(408, "The request took too long.")
        if answer is None:
            operation.count(CLIENT_CLOSED)
            return
        if isinstance(answer, Rejection):
            answer = service.refuse(*answer, head.accept, lines=b"connection: close\r\n")
        status, lines, body = answer
        operation.count(status)
        headers = [tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n") if line]
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(
        self, service: Service, operation: Operation, head: Head, length: bytes, receive: Receive
    ) -> Answer | Rejection | None:
        """The answer; None if the client has gone: then nothing was counted, or nothing can be sent."""
        if length.isdigit() and int(length) > self._config.http.body_bytes_max:
            return self._intake.body_too_large
        body = await self._body(receive)
        if not isinstance(body, bytes):
            return body
        try:
            answer = operation.handler(head, body)
            assert not isinstance(answer, Stream), "an application has no console, and no other stream"
            if isinstance(answer, tuple):
                return answer
            work = asyncio.ensure_future(answer)
            # After the body, the only message that can come is that the client has gone.
            gone = asyncio.ensure_future(receive())
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                return await work if work.done() else None
            finally:
                work.cancel()
                gone.cancel()
        except Exception:
            request_id = service.new_id()
            logger.exception("%s failed", operation.name, extra={"request_id": "req_" + request_id})
            detail = "The server failed. Its log has the reason."
            return service.refuse(500, detail, head.accept, request_id=request_id)

    async def _body(self, receive: Receive) -> bytes | Rejection | None:
        body = bytearray()  # not a list of parts: each of them would take more memory than a small part
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                part: bytes = message.get("body", b"")
                if part:
                    body += part
                    rejection = self._intake.take(len(part), len(body))
                    if rejection is not None:
                        return rejection
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self._intake.buffered_bytes -= len(body)
