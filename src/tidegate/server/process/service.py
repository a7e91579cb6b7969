"""Assembles a server from its configuration: limiter, catalog, API, listener; and stops them in order.

`Service` is one node in one process. `run` is `tidegate serve`: it prepares the embedded files, creates the first key,
and serves with this process, or with several (`workers`). Everything that is started here is stopped here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import platform
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tidegate
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.clock import now_ms
from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.sqlite.origin import SQLiteOrigin
from tidegate.adapters.urls import open_ledger, open_origin
from tidegate.core.model import Tuning
from tidegate.errors import DependencyError, MissingExtra
from tidegate.ports import Ledger, Origin
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.statistics import Health
from tidegate.server.api.admission import Admission
from tidegate.server.api.counters import CounterOperations
from tidegate.server.api.operations import LimitOperations
from tidegate.server.api.overrides import OverrideOperations
from tidegate.server.api.pages import Pages
from tidegate.server.api.problems import refuser
from tidegate.server.api.reservations import ReservationOperations
from tidegate.server.catalog.keys import IdSource
from tidegate.server.catalog.sync import CatalogSync, SnapshotFile, describe_unreadable
from tidegate.server.catalog.view import CatalogView
from tidegate.server.console.local import Ask, LocalNode
from tidegate.server.console.routes import Console
from tidegate.server.console.sessions import Sessions, load_secret
from tidegate.server.http1.listener import HttpServer
from tidegate.server.messages import Refuse, Router
from tidegate.server.process.config import ORIGIN_FILE, ServerConfig
from tidegate.server.process.decision_log import DecisionLog, RecordingLimiter, read_hash_key
from tidegate.server.process.first_start import announce, make_directory, prepare
from tidegate.server.process.otel_export import start_export, stop_export
from tidegate.server.process.request_log import RequestLog
from tidegate.server.process.sockets import Sockets, bind_sockets
from tidegate.telemetry.collecting import snapshot_of
from tidegate.telemetry.decisions import Sampling
from tidegate.telemetry.logging import set_level
from tidegate.telemetry.metrics import Key, Snapshot

if TYPE_CHECKING:
    from tidegate.server.process.gateways import Gateways
    from tidegate.telemetry.otel_metrics import OtelMetrics

logger = logging.getLogger(__name__)

SNAPSHOT_FILE: Final = "catalog.snapshot"
# A stop reserves this much of its time for the last flush, whatever the connections do.
FLUSH_RESERVE_S: Final = 2.5
TOP_MAX: Final = 20
# How old metrics may be when OpenTelemetry exports them; it does so once a minute by default.
EXPORT_INTERVAL_S: Final = 1.0
# A count is in the embedded file within this time, or a little later when the disk has just become slow: a crash loses
# less than a second of counts.
EMBEDDED_INTERVAL_MS: Final = 900
# Cells in one transaction. Keys are digests, so that every 250 cells touch nearly every page of the table: in one large
# transaction each page is written once.
EMBEDDED_CELLS_MAX: Final = 10_000
# SQLite sometimes waits for the disk. A transaction should not be given up and repeated for that.
EMBEDDED_TIMEOUT_MS: Final = 5_000
# What a single node has read stays valid, because no other node counts. If a second process is started on the
# same files, the two still read each other's counts with every write.
EMBEDDED_FRESH_MS: Final = 600_000
# A full collection visits every object; with a million subjects in memory it would be a pause that clients notice.
# Decisions make no cycles, so collections of older objects may be rare. Those of young ones must find few: the cells of
# a turn of replay are 10,000 objects, which took 2.5 ms three times in a turn.
GC_THRESHOLDS: Final = (1_000, 500, 100)
# The thread that writes the embedded file asks for the interpreter between statements, and waits at most this long.
SWITCH_INTERVAL_S: Final = 0.001

Snapshots = Callable[[Snapshot], Awaitable[Sequence[Snapshot]]]
"""From the metrics of this process to those of all workers."""


async def _alone(own: Snapshot) -> Sequence[Snapshot]:
    return [own, Snapshot("workers", {("workers", ()): 1})]


class Service:
    """One node. `start(sockets)` serves on them; without any, another server (`asgi`) serves `router`."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        limiter: AsyncLimiter | None = None,
        snapshots: Snapshots = _alone,
        console_secret: bytes | None = None,
        ask: Ask | None = None,
    ) -> None:
        """`limiter`: one that the caller starts and stops, instead of one made from the configuration; its decisions
        are not logged. `console_secret`: serve the console, with sessions that are signed with it. `ask`: asks all
        workers."""
        self._config = config
        self._all_snapshots = snapshots
        self._owns_limiter = limiter is None
        self._decisions = None if limiter is not None else _decision_log(config, self._namespace_name)
        self._limiter = limiter or _limiter(config, self._decisions)
        ids = IdSource()
        is_shared = config.ledger is not None
        self._sync = CatalogSync(
            open_catalog(config.catalog_url),
            CatalogView(),
            ids,
            now_ms=now_ms,
            # The embedded catalog is a local file itself and needs no copy.
            snapshot=SnapshotFile(Path(config.data_dir) / SNAPSHOT_FILE, config.catalog_url)
            if is_shared
            else None,
            snapshot_age_max_ms=config.snapshot_age_max_s * 1000,
            # `tidegate cleanup` purges a shared catalog for all nodes.
            purges=not is_shared,
        )
        admission = Admission(self._limiter, self._sync, ids.take, now_ms)
        self._limits = LimitOperations(self._limiter, self._sync, admission, test_mode=config.test_mode)
        counters = CounterOperations(self._limiter, self._limits, admission)
        overrides = OverrideOperations(self._sync, admission)
        self._local = LocalNode(
            self._limiter,
            self._limits.activity,
            self._sync.view,
            now_ms,
            self._dependencies,
            self._connections,
        )
        self._console: Console | None = None
        if console_secret is not None:
            sessions = Sessions(
                console_secret, self._sync.view, now_ms, is_secure=config.tls.cert is not None
            )
            self._console = Console(admission, self._sync, overrides, sessions, ask or self._local.ask_alone)
        self.new_id = ids.take
        self.refuse = refuser(ids.take)
        pages = Pages(
            self._is_ready,
            self._dependencies,
            self._snapshots,
            self.refuse,
            config.metrics_token,
            has_console=console_secret is not None,
            has_check=config.rls.config is not None,
        )
        self._gateways = _gateways(config, self._limiter, admission, self.refuse)
        checks = [] if self._gateways is None else self._gateways.routes
        self.router = Router(
            [
                *self._limits.routes(),
                *counters.routes(),
                *ReservationOperations(self._limiter, self._limits, admission).routes(),
                *overrides.routes(),
                *checks,
                *pages.routes(),
                *([] if self._console is None else self._console.routes()),
            ],
            self.refuse,
        )
        self._routers = [self.router] if self._gateways is None else [self.router, self._gateways.router]
        self._logs = [RequestLog(router, time.monotonic) for router in self._routers]
        self._tls = tls_context(config)
        # A context of its own: the protocol that is agreed on is a part of it.
        self._http2_tls = tls_context(config)
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._is_stopping = False

    async def start(self, bound: Sockets | None = None) -> None:
        """Raises `ConfigurationError` for faults that waiting does not fix, not for a dependency that is down."""
        loop = asyncio.get_running_loop()
        if self._decisions is not None:
            self._decisions.open()
            self._tasks.append(loop.create_task(self._decisions.run()))
        if self._owns_limiter:
            await self._limiter.start()
        await self._sync.start()
        self._tasks.append(loop.create_task(self._sync.run()))
        if self._config.otel.metrics:
            from tidegate.telemetry.otel_metrics import OtelMetrics

            self._tasks.append(loop.create_task(self._export_metrics(OtelMetrics())))
        for log in self._logs:
            log.follow_level()
        if bound is not None:
            self._http = HttpServer(
                self.router, self._config.http, self.refuse, self.new_id, tls=self._tls, wall_time=time.time
            )
            self._http.start(bound["listen"])
            if self._gateways is not None:
                await self._gateways.start(bound, self._tls, self._http2_tls)

    async def stop(self, timeout_s: float) -> None:
        """Accept nothing more, finish, flush the last counts. Ends within `timeout_s`."""
        deadline = Deadline.after(timeout_s, loop_time())
        self._is_stopping = True
        if self._console is not None:
            await self._console.hub.stop()
        drain_s = max(0.0, timeout_s - FLUSH_RESERVE_S)
        drains: list[Awaitable[bool]] = []
        if self._http is not None:
            drains.append(self._http.drain(drain_s))
        if self._gateways is not None:
            drains.append(self._gateways.stop(drain_s))
        if not all(await asyncio.gather(*drains)):
            logger.warning("some clients did not finish in time; their connections were closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owns_limiter:
            await self._limiter.stop(max(0.1, deadline.remaining(loop_time())))
        if self._decisions is not None:
            await asyncio.to_thread(self._decisions.close)
        await self._sync.close()

    async def reload(self) -> None:
        """Read keys, namespaces, overrides, policies and certificate again; log requests if the level asks for it."""
        for log in self._logs:
            log.follow_level()
        try:
            await self._sync.reload()
        except DependencyError:
            if self._is_stopping:
                return  # the database was closed meanwhile
            raise
        if self._gateways is not None:
            self._gateways.reload()
        for context in (self._tls, self._http2_tls):
            if context is not None:
                load_certificate(context, self._config)

    def snapshot(self) -> Snapshot:
        """The metrics of this process."""
        own = snapshot_of(self._limiter.statistics())
        values: dict[Key, float] = dict(own.values)
        for operation in [operation for router in self._routers for operation in router.operations]:
            for status, count in operation.statuses.items():
                key = ("http_requests_total", (operation.name, str(status)))
                values[key] = values.get(key, 0) + count
        if self._gateways is not None:
            values |= self._gateways.values()
        values["http_connections", ()] = self._connections()
        values["http_connections_evicted_total", ()] = sum(
            server.connections_evicted for server in self._http_servers()
        )
        if self._config.origin is None:
            values["origin_file_bytes", ()] = _file_bytes(Path(self._config.data_dir) / ORIGIN_FILE)
        for workspace_id, decisions in nlargest(
            TOP_MAX, self._limits.activity.decisions().items(), key=itemgetter(1)
        ):
            values["top_workspace_decisions", (workspace_id,)] = decisions
        for heavy in self._limits.top_denials.top(TOP_MAX):
            values["top_identifier_denials", heavy.key] = heavy.weight
        if self._decisions is not None:
            values["decision_log_records_total", ("written",)] = self._decisions.written
            values["decision_log_records_total", ("dropped",)] = self._decisions.dropped
        compiled = "true" if tidegate.compiled else "false"
        values["build_info", (tidegate.__version__, platform.python_version(), compiled)] = 1
        return Snapshot(own.node, values, own.histograms)

    def _http_servers(self) -> list[HttpServer]:
        own = [] if self._http is None else [self._http]
        return own if self._gateways is None else own + self._gateways.http_servers

    def _connections(self) -> int:
        return sum(len(server.connections) for server in self._http_servers())

    async def answer(self, question: str) -> str:
        """The answer of this worker to a question of the console."""
        return await self._local.answer_text(question)

    async def _export_metrics(self, metrics: OtelMetrics) -> None:
        while True:
            metrics.update(self.snapshot())
            await asyncio.sleep(EXPORT_INTERVAL_S)

    async def _snapshots(self) -> Sequence[Snapshot]:
        return await self._all_snapshots(self.snapshot())

    def _namespace_name(self, _workspace_id: str, namespace_id: str) -> str:
        found = self._sync.view.namespace(namespace_id)
        # A namespace of the rules for gateways has no id.
        return namespace_id if found is None else found.name

    def _is_ready(self) -> bool:
        return self._sync.is_loaded and not self._is_stopping

    def _dependencies(self) -> list[Health]:
        failure = self._sync.failure
        if failure is None and self._sync.unreadable:
            failure = describe_unreadable(self._sync.unreadable)
        detail = failure if failure is not None else f"version {self._sync.view.version}"
        return [Health("catalog", failure is None, detail), *self._limiter.health()]


def _decision_log(config: ServerConfig, name_of: Callable[[str, str], str]) -> DecisionLog | None:
    decisions = config.decisions
    if decisions.log_dir is None:
        return None
    sampling = Sampling(decisions.sample, read_hash_key(decisions.hash_key_file))
    return DecisionLog(Path(decisions.log_dir), sampling, decisions.bytes_max, name_of)


def _limiter(config: ServerConfig, log: DecisionLog | None) -> AsyncLimiter:
    embedded: dict[str, Any] = {}
    origin: str | Origin = config.origin_url
    if config.origin is None:
        origin = SQLiteOrigin(Path(config.data_dir) / ORIGIN_FILE, bytes_max=config.origin_bytes_max)
    ledger: str | Ledger | None = config.ledger
    if config.origin is None and config.workers == 1:
        # No other process counts in the file: it is only there for the next start.
        embedded = {
            "credit": False,
            "replay_cells_max": EMBEDDED_CELLS_MAX,
            "replay_interval_ms": EMBEDDED_INTERVAL_MS,
            "replay_timeout_ms": EMBEDDED_TIMEOUT_MS,
            "fresh_ms": EMBEDDED_FRESH_MS,
            "rollover_grace_ms": EMBEDDED_FRESH_MS,
        }
    if config.otel.traces:
        from tidegate.telemetry.otel import traced_ledger, traced_origin

        origin = traced_origin(open_origin(origin) if isinstance(origin, str) else origin)
        ledger = None if config.ledger is None else traced_ledger(open_ledger(config.ledger))
    settings: dict[str, Any] = {
        "region": config.region_name,
        "origin": origin,
        "ledger": ledger,
        "tuning": Tuning(subjects_bytes_max=config.memory_bytes_max, **embedded),
    }
    return AsyncLimiter(**settings) if log is None else RecordingLimiter(log, **settings)


def _gateways(
    config: ServerConfig, limiter: AsyncLimiter, admission: Admission, refuse: Refuse
) -> Gateways | None:
    if config.rls.config is None:
        return None
    try:
        from tidegate.server.process.gateways import Gateways
    except ModuleNotFoundError as error:
        raise MissingExtra("rls", "rls.config") from error
    return Gateways(config, limiter, admission, refuse)


def _file_bytes(path: Path) -> int:
    """The size of a SQLite file and of the log beside it; 0 before there is one."""
    found = 0
    for each in (path, path.with_name(path.name + "-wal")):
        with suppress(OSError):
            found += each.stat().st_size
    return found


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
    """A connection is a file descriptor. The soft limit is often 1,024 where the hard one is a million."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run_service(
    service: Service,
    bound: Sockets,
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
        task = loop.create_task(reload_service(service, reload))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    exports = start_export(config, service.snapshot().node)
    try:
        await service.start(bound)
        gc.collect()
        gc.freeze()
        await started()
        await stopped.wait()
        logger.info("stopping")
    finally:
        await service.stop(config.http.stop_timeout_s)
        await stop_export(exports)
    logger.info("stopped")
    return 0


async def reload_service(service: Service, reload: Callable[[], ServerConfig] | None = None) -> None:
    """Read again what can change while a server runs: the log level by `reload`, the rest by the service."""
    try:
        if reload is not None:
            set_level(reload().log.level)
        await service.reload()
    except Exception:
        logger.exception("the configuration could not be read again; the old one stays in force")
    else:
        logger.info("keys and log level were read again")


def run(config: ServerConfig, *, reload: Callable[[], ServerConfig] | None = None) -> int:
    """`tidegate serve`: blocks until the server has stopped; the exit code."""
    raise_file_limit()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with make_directory(config) or nullcontext():
        return _run(config, reload)


def _run(config: ServerConfig, reload: Callable[[], ServerConfig] | None) -> int:
    import uvloop

    first = asyncio.run(prepare(config))
    secret = load_secret(Path(config.data_dir)) if config.serves_console else None
    if config.workers > 1:
        from tidegate.server.process.supervisor import Supervisor

        return asyncio.run(Supervisor(config, reload=reload, first=first, console_secret=secret).run())

    async def main() -> int:
        bound = bind_sockets(config, shared=False)

        async def started() -> None:
            announce(sys.stdout, config, bound["listen"], first)

        service = Service(config, console_secret=secret)
        return await run_service(service, bound, config, started=started, reload=reload)

    exit_code: int = uvloop.run(main())
    return exit_code
