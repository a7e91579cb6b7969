"""Assembles a server from its configuration: limiter, catalog, API, listener; and takes it apart again in order.

`Service` is one node in one process. `run` is `tidegate serve`: it prepares the embedded files, makes the first key,
and serves with this process, or with several (`workers`). Everything that is started here is stopped here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import platform
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import tidegate
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.urls import open_ledger, open_origin
from tidegate.core.model import Tuning
from tidegate.ports import Ledger, Origin
from tidegate.runtime.limiter import AsyncLimiter
from tidegate.runtime.statistics import Health
from tidegate.server.admission import Admissions
from tidegate.server.api import Api
from tidegate.server.catalog import CatalogView
from tidegate.server.catalog_sync import CatalogSync
from tidegate.server.config import ServerConfig
from tidegate.server.first_start import announce, make_directory, prepare
from tidegate.server.health import HealthPages
from tidegate.server.ids import IdSource
from tidegate.server.listener import HttpServer, bind
from tidegate.server.messages import Head, Router
from tidegate.server.override_api import OverrideApi
from tidegate.server.problems import Answer, Refusal, error_answer
from tidegate.server.snapshot import SnapshotFile
from tidegate.telemetry.collecting import snapshot_of
from tidegate.telemetry.logging import set_level
from tidegate.telemetry.metrics import Key, Snapshot

__all__ = ["Service", "run", "run_service"]

logger = logging.getLogger(__name__)

SNAPSHOT_FILE: Final = "catalog.snapshot"
# A region that nobody else joins needs a name all the same: the origin holds it.
REGION_DEFAULT: Final = "default"
# What a stop keeps back for the last flush, whatever the connections do.
FLUSH_RESERVE_S: Final = 2.5
TOP_MAX: Final = 20
# Within this time a count is in the embedded file, or a little later when writing has just become slow: a crash costs
# less than a second of them.
EMBEDDED_INTERVAL_MS: Final = 900
# Cells in one transaction. Keys are digests, so that every 250 cells touch nearly every page of the table: in one large
# transaction each page is written once.
EMBEDDED_CELLS_MAX: Final = 10_000
# Now and then SQLite waits for the disk. That is no reason to give up a transaction and begin it again.
EMBEDDED_TIMEOUT_MS: Final = 5_000
# What a node that is alone has read once stays true: nobody else counts. Were a second process started on the same
# files, the two would still learn from each other with every turn of writing.
EMBEDDED_FRESH_MS: Final = 600_000
# A collection walks what is young; with a million subjects in memory a full one would be a pause that clients feel.
# Decisions make no cycles, so that it may be rare; but the young ones must not be many when it comes.
GC_THRESHOLDS: Final = (10_000, 50, 100)

# The thread that writes the embedded file asks for the interpreter between statements, and waits this long at most.
SWITCH_INTERVAL_S: Final = 0.001

Snapshots = Callable[[Snapshot], Awaitable[Sequence[Snapshot]]]
"""From this process's numbers to those of all workers."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _alone(own: Snapshot) -> Sequence[Snapshot]:
    return [own, Snapshot("workers", {("workers", ()): 1})]


class Service:
    """One node: `await start(socket)`, then `await stop()`."""

    def __init__(self, config: ServerConfig, *, snapshots: Snapshots = _alone) -> None:
        self._config = config
        self._all_snapshots = snapshots
        self._ids = IdSource()
        self._limiter = _limiter(config)
        is_shared = config.ledger is not None
        self._sync = CatalogSync(
            open_catalog(config.catalog_url),
            CatalogView(),
            self._ids,
            now_ms=now_ms,
            # The embedded catalog is a file beside it: a copy would be there exactly when it is not needed.
            snapshot=SnapshotFile(Path(config.data_dir) / SNAPSHOT_FILE, config.catalog_url)
            if is_shared
            else None,
            snapshot_age_max_ms=config.snapshot_age_max_s * 1000,
            # `tidegate cleanup` does it for all nodes of a shared one.
            purges=not is_shared,
        )
        self._admissions = Admissions(self._limiter, self._sync, self._ids, now_ms)
        self._api = Api(self._limiter, self._sync, self._admissions, test_mode=config.test_mode)
        overrides = OverrideApi(self._sync, self._admissions)
        pages = HealthPages(self._is_ready, self._dependencies, self._snapshots)
        routes = [*self._api.routes(), *overrides.routes(), *pages.routes()]
        self._tls = tls_context(config)
        self._http = HttpServer(
            Router(routes, self._refuse), config.http, self._ids, tls=self._tls, wall_time=time.time
        )
        self._polling: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket) -> None:
        """Serve on `bound`. Raises `ConfigurationError` for what waiting cannot cure; what is down is no error."""
        await self._limiter.start()
        await self._sync.start()
        self._polling = asyncio.get_running_loop().create_task(self._sync.run())
        self._http.start(bound)
        gc.collect()
        gc.freeze()

    async def stop(self, timeout_s: float) -> None:
        """Accept nothing more, finish, flush the last counts. Ends within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        finished = await self._http.drain(max(0.0, timeout_s - FLUSH_RESERVE_S))
        if not finished:
            logger.warning("some clients did not finish in time; their connections were cut")
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._limiter.stop(max(0.1, deadline - loop.time()))
        await self._sync.close()

    async def reload(self) -> None:
        """Read all keys, namespaces and overrides again, and the certificate."""
        await self._sync.reload()
        if self._tls is not None:
            load_certificate(self._tls, self._config)

    def snapshot(self) -> Snapshot:
        """The numbers of this process."""
        own = snapshot_of(self._limiter.statistics())
        values: dict[Key, float] = dict(own.values)
        for operation in self._http.router.operations:
            for status, count in operation.statuses.items():
                key = ("http_requests_total", (operation.name, str(status)))
                values[key] = values.get(key, 0) + count
        values["http_connections", ()] = len(self._http.connections)
        busiest = sorted(self._sync.view.workspaces.values(), key=lambda each: -each.decisions)[:TOP_MAX]
        for workspace in busiest:
            if workspace.decisions:
                values["top_workspace_decisions", (workspace.id,)] = workspace.decisions
        for heavy in self._api.top_denials.top(TOP_MAX):
            values["top_identifier_denials", heavy.key] = heavy.weight
        compiled = "true" if tidegate.compiled else "false"
        values["build_info", (tidegate.__version__, platform.python_version(), compiled)] = 1
        return Snapshot(own.node, values, own.histograms)

    async def _snapshots(self) -> Sequence[Snapshot]:
        return await self._all_snapshots(self.snapshot())

    def _is_ready(self) -> bool:
        return self._sync.is_loaded and not self._http.is_draining

    def _dependencies(self) -> list[Health]:
        failure = self._sync.failure
        detail = failure if failure is not None else f"version {self._sync.view.version}"
        return [Health("catalog", failure is None, detail), *self._limiter.health()]

    def _refuse(self, head: Head, refusal: Refusal) -> Answer:
        return error_answer(refusal, self._ids.take(), head.accept)


def _limiter(config: ServerConfig) -> AsyncLimiter:
    region = config.region or REGION_DEFAULT
    tuning: Tuning | None = None
    origin: str | Origin = config.origin_url
    ledger: str | Ledger | None = config.ledger
    if config.origin is None and config.workers == 1:
        # Nobody else counts in the file: it is there for the next start.
        tuning = Tuning(
            replay_cells_max=EMBEDDED_CELLS_MAX,
            replay_interval_ms=EMBEDDED_INTERVAL_MS,
            replay_timeout_ms=EMBEDDED_TIMEOUT_MS,
            fresh_ms=EMBEDDED_FRESH_MS,
            rollover_grace_ms=EMBEDDED_FRESH_MS,
        )
    if config.tracing:
        from tidegate.telemetry.otel import traced_ledger, traced_origin

        origin = traced_origin(open_origin(origin) if isinstance(origin, str) else origin)
        ledger = None if config.ledger is None else traced_ledger(open_ledger(config.ledger))
    return AsyncLimiter(region=region, origin=origin, ledger=ledger, tuning=tuning)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if config.tls.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.tls.cert is not None
    context.load_cert_chain(config.tls.cert, config.tls.key)


def raise_file_limit() -> None:
    """Connections are files. The soft limit is often 1,024 where the hard one is a million."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run_service(
    service: Service,
    bound: socket.socket,
    config: ServerConfig,
    *,
    started: Callable[[], Awaitable[None]],
    reload: Callable[[], ServerConfig] | None = None,
    stopped: asyncio.Event | None = None,
) -> int:
    """Serve until a signal or `stopped`, then stop gracefully; the exit code."""
    loop = asyncio.get_running_loop()
    stopped = stopped or asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    reloads: set[asyncio.Task[None]] = set()

    def on_hangup() -> None:
        task = loop.create_task(_reload(service, reload))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await service.start(bound)
        await started()
        await stopped.wait()
        logger.info("stopping")
    finally:
        await service.stop(config.http.stop_timeout_s)
    logger.info("stopped")
    return 0


async def _reload(service: Service, reload: Callable[[], ServerConfig] | None) -> None:
    try:
        if reload is not None:
            set_level(reload().log.level)
        await service.reload()
    except Exception:
        logger.exception("reading the configuration again failed; going on with the old one")
    else:
        logger.info("keys and log level were read again")


def run(config: ServerConfig, *, reload: Callable[[], ServerConfig] | None = None) -> int:
    """`tidegate serve`: blocks until the server has stopped; the exit code."""
    import uvloop

    raise_file_limit()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    make_directory(config)
    first = asyncio.run(prepare(config))
    if config.workers > 1:
        from tidegate.server.workers import Supervisor

        return asyncio.run(Supervisor(config, reload=reload, first=first).run())

    async def main() -> int:
        bound = bind(config.host, config.port, shared=False)

        async def started() -> None:
            announce(sys.stdout, config, bound, first)

        return await run_service(Service(config), bound, config, started=started, reload=reload)

    exit_code: int = uvloop.run(main())
    return exit_code
