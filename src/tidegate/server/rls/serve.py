"""The rate limit service on a port: what the server's process starts and stops."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidegate.server.http2.grpc import GrpcError, Method, Status
from tidegate.server.http2.listener import Http2Options, Http2Server, Http2Statistics
from tidegate.server.rls.messages import ServingStatus, parse_health_request, serving_response
from tidegate.server.rls.protobuf import DecodeError
from tidegate.server.rls.rules_watch import POLL_S, RulesWatch
from tidegate.server.rls.service import PATH, SERVICE, BatchLimiter, RateLimitService, ServiceStatistics

logger = logging.getLogger(__name__)

# `Watch` is a stream and answers UNIMPLEMENTED, which clients take for healthy.
HEALTH_PATH: Final = "/grpc.health.v1.Health/Check"


def health_method(services: frozenset[str], is_serving: Callable[[], bool]) -> Method:
    """Says whether these services, and the server as a whole (`""`), take calls."""

    def check(message: bytes) -> bytes:
        try:
            service = parse_health_request(message)
        except DecodeError as error:
            raise GrpcError(Status.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}") from error
        if service and service not in services:
            raise GrpcError(Status.NOT_FOUND, f"no service {service[:128]}")
        return serving_response(ServingStatus.SERVING if is_serving() else ServingStatus.NOT_SERVING)

    return Method(HEALTH_PATH, check)


@dataclass(frozen=True)
class RlsStatistics:
    """As of now."""

    http2: Http2Statistics | None
    """None if the service has no port."""
    service: ServiceStatistics
    rules_reloads: int
    rules_reloads_failed: int
    rules_error: str | None
    """What is wrong with the rules files as they are; the rules before them apply."""


class RlsServer:
    """The service, its rules, and its port if it has one. Started and stopped in one event loop."""

    def __init__(
        self, limiter: BatchLimiter, rules: RulesWatch, *, options: Http2Options | None = None
    ) -> None:
        self.limiter = limiter
        self.rules = rules
        self.service = RateLimitService(limiter, rules.rules)
        self.server: Http2Server | None = None
        self.port = 0
        self._options = options
        self._watching: asyncio.Task[None] | None = None

    async def start(
        self,
        bound: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        """Follow the rules files, and serve on `bound`, which is owned from now on. The limiter must have started.

        `tls` must be no other listener's: it is set to HTTP/2.
        """
        self.rules.on_change(self.service.use)
        self._watching = asyncio.get_running_loop().create_task(self.rules.run(poll_s))
        if bound is None:
            return
        methods = [
            Method(PATH, self.service.should_rate_limit),
            health_method(frozenset({SERVICE}), lambda: not server.is_draining),
        ]
        self.server = server = Http2Server(methods, self._options, tls=tls)
        self.port = bound.getsockname()[1]
        server.start(bound)
        logger.info("rate limit service listens on port %d, rules from %s", self.port, self.rules.place)

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Serve the calls in progress, then close. False if time ran out before that."""
        # First: from the moment of this call the health service must say that it is not serving.
        is_drained = self.server is None or await self.server.drain(timeout_s)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        return is_drained

    def statistics(self) -> RlsStatistics:
        """Counters and gauges, as of now."""
        return RlsStatistics(
            http2=None if self.server is None else self.server.statistics(),
            service=self.service.statistics(),
            rules_reloads=self.rules.reloads,
            rules_reloads_failed=self.rules.reloads_failed,
            rules_error=self.rules.error,
        )
