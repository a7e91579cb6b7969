"""The rate limit service on a port: what the server's process starts and stops."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass

from tidegate.errors import ConfigurationError
from tidegate.server.http1.listener import bind
from tidegate.server.http2.grpc import Method
from tidegate.server.http2.listener import Http2Options, Http2Server, Http2Statistics
from tidegate.server.rls.health import health_method
from tidegate.server.rls.rules_watch import POLL_S, RulesWatch
from tidegate.server.rls.service import PATH, SERVICE, BatchLimiter, RateLimitService, ServiceStatistics

__all__ = ["RlsServer", "RlsStatistics", "serve_rls"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RlsStatistics:
    """As of now."""

    http2: Http2Statistics
    service: ServiceStatistics
    rules_reloads: int
    rules_reloads_failed: int
    rules_error: str | None
    """What is wrong with the rules files as they are; the rules before them apply."""


class RlsServer:
    """A running rate limit service. `serve_rls` makes it."""

    def __init__(
        self,
        limiter: BatchLimiter,
        server: Http2Server,
        service: RateLimitService,
        rules: RulesWatch,
        port: int,
    ) -> None:
        self.limiter = limiter
        self.server = server
        self.service = service
        self.rules = rules
        self.port = port
        self._watching: asyncio.Task[None] | None = None

    def watch_rules(self, poll_s: float) -> None:
        """Follow the rules files until `stop`."""
        self.rules.on_change(self.service.use)
        self._watching = asyncio.get_running_loop().create_task(self.rules.run(poll_s))

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Serve what is on its way, then close. False if time ran out before that."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        return await self.server.drain(timeout_s)

    def statistics(self) -> RlsStatistics:
        """Counters and gauges, as of now."""
        return RlsStatistics(
            http2=self.server.statistics(),
            service=self.service.statistics(),
            rules_reloads=self.rules.reloads,
            rules_reloads_failed=self.rules.reloads_failed,
            rules_error=self.rules.error,
        )


async def serve_rls(
    limiter: BatchLimiter,
    rules: RulesWatch,
    address: str | socket.socket,
    tls: ssl.SSLContext | None = None,
    *,
    options: Http2Options | None = None,
    poll_s: float = POLL_S,
) -> RlsServer:
    """Serve Envoy's rate limit service on `address` (`HOST:PORT`, `[::1]:PORT`, or a bound socket).

    The limiter must have been started. The caller must `stop` the returned server.
    """
    bound = _bind(address) if isinstance(address, str) else address
    service = RateLimitService(limiter, rules.rules)
    methods: list[Method] = [Method(PATH, service.should_rate_limit)]
    server = Http2Server(
        [*methods, health_method(frozenset({SERVICE}), lambda: not server.is_draining)], options, tls=tls
    )
    port: int = bound.getsockname()[1]
    await server.start(bound)
    running = RlsServer(limiter, server, service, rules, port)
    running.watch_rules(poll_s)
    logger.info("rate limit service listens on port %d, rules from %s", port, rules.place)
    return running


def _bind(address: str) -> socket.socket:
    """A bound socket for `HOST:PORT`. Port 0: any free one."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigurationError(f"rls address: got {address!r}, expected HOST:PORT, such as 127.0.0.1:8081")
    return bind(host.removeprefix("[").removesuffix("]"), int(port), shared=False)
