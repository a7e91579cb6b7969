"""The services for gateways: Envoy's rate limit service and the yes/no check, from one set of rules, with the node's
limiter.

Assembled only if `rls.config` is set: this module needs the `rls` extra, and nothing else of the server does.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api.admission import Admission
from tidegate.server.http1.listener import HttpServer
from tidegate.server.messages import Refuse, Router
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.sockets import Sockets
from tidegate.server.rls.check_operation import CheckOperation, read_check_config
from tidegate.server.rls.metrics import rls_values
from tidegate.server.rls.rules_watch import RulesWatch
from tidegate.server.rls.serve import RlsServer
from tidegate.telemetry.metrics import Key

logger = logging.getLogger(__name__)


class Gateways:
    """Everything that gateways ask of one node."""

    def __init__(
        self, config: ServerConfig, limiter: AsyncLimiter, admission: Admission, refuse: Refuse
    ) -> None:
        """Raises `ConfigurationError` if the rules or the policies are not right."""
        assert config.rls.config is not None
        self._config = config
        self._new_id = admission.new_id
        self._refuse = refuse
        self._rls = RlsServer(limiter, RulesWatch(Path(config.rls.config)))
        self._check = CheckOperation(self._rls.service, admission, read_check_config(config.check.config))
        # For the HTTP API, and for the private listener.
        self.routes = self._check.routes(needs_key=True)
        self.router = Router(self._check.routes(needs_key=False), refuse)
        self._http: HttpServer | None = None

    async def start(
        self, bound: Sockets, tls: ssl.SSLContext | None, http2_tls: ssl.SSLContext | None
    ) -> None:
        """After the limiter. The second context must be no other listener's: it is set to HTTP/2."""
        await self._rls.start(bound.get("rls.address"), http2_tls)
        private = bound.get("check.address")
        if private is not None:
            self._http = HttpServer(
                self.router, self._config.http, self._refuse, self._new_id, tls=tls, wall_time=time.time
            )
            logger.info("check listens on port %d, without keys", private.getsockname()[1])
            self._http.start(private)

    async def stop(self, timeout_s: float) -> bool:
        """Accept nothing more, answer the calls in progress, close. False if time ran out."""
        drains = [self._rls.stop(timeout_s)]
        if self._http is not None:
            drains.append(self._http.drain(timeout_s))
        return all(await asyncio.gather(*drains))

    def reload(self) -> None:
        """Read the policies again. The rules follow their files by themselves."""
        self._check.config = read_check_config(self._config.check.config)

    def values(self) -> dict[Key, float]:
        """Metrics."""
        return rls_values(self._rls.statistics())

    @property
    def http_servers(self) -> list[HttpServer]:
        """The private listener, if there is one."""
        return [] if self._http is None else [self._http]
