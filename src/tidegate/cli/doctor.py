"""`tidegate doctor`: check everything that a server with this configuration needs, and say what to fix.

Each check is a function that yields findings and handles the errors of its dependency; a failed check does not stop the
others. The doctor changes nothing: it creates no file and no schema.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import click

from tidegate import compiled
from tidegate.adapters import clock
from tidegate.adapters.secrets import mask, mask_url
from tidegate.adapters.urls import REDIS_SCHEMES
from tidegate.cli.databases import opened_ledger, run
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.serve import renamed
from tidegate.cli.settings import setting_options
from tidegate.core.model import Component, Tuning
from tidegate.errors import MissingExtra, RegionMismatch, TidegateError
from tidegate.ports import LedgerOverview
from tidegate.server.process.config import (
    CATALOG_FILE,
    ORIGIN_FILE,
    ConfigFaults,
    Loaded,
    ServerConfig,
    split_listen,
)

if TYPE_CHECKING:
    from tidegate.adapters.redis.origin import RedisMemory

__all__ = ["Finding", "doctor", "examine"]

CLOCK_OFFSET_WARN_MS: Final = Tuning().clock_offset_warn_ms
# A server treats a slower dependency as down.
TIMEOUT_S: Final = 5.0
# Files and sockets of a worker besides client connections.
DESCRIPTORS_OWN: Final = 64
DISK_BYTES_LOW: Final = 256 * 1024 * 1024
# SQLite needs some pages of its log to save anything.
DISK_BYTES_FULL: Final = 64 * 1024
# Of maxmemory: above this there is little time left to act.
MEMORY_PERCENT_WARN: Final = 90


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    next_step: str = ""


def check_core(_config: ServerConfig) -> Iterator[Finding]:
    """Whether the core is compiled, and the fast HTTP parser and event loop are installed."""
    if compiled:
        yield Finding("core", "ok", "compiled")
    else:
        step = "install a C compiler and install tidegate again"
        yield Finding("core", "warn", "interpreted: about eight times slower than compiled", step)
    for module in ("httptools", "uvloop"):
        if find_spec(module) is None:
            yield Finding("packages", "warn", f"{module} is not installed", "pip install 'tidegate[server]'")


def check_data_dir(config: ServerConfig) -> Iterator[Finding]:
    """Whether the server can write there, and other users cannot read it."""
    path = Path(config.data_dir).absolute()
    if not path.exists():
        parent = next(candidate for candidate in path.parents if candidate.exists())
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield Finding("data dir", "ok", f"{path} does not exist yet; the first start creates it")
        else:
            yield Finding(
                "data dir", "fail", f"{path} cannot be created in {parent}", "choose another --data-dir"
            )
        return
    if not path.is_dir():
        yield Finding("data dir", "fail", f"{path} is not a directory", "choose another --data-dir")
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding(
            "data dir", "fail", f"{path} is not writable", f"chown it to the user of the server: {path}"
        )
        return
    free = shutil.disk_usage(path).free
    if free < DISK_BYTES_FULL:
        step = "free some space on that disk; until then nothing is saved, and a restart forgets what was counted"
        yield Finding("data dir", "fail", f"the disk of {path} is full", step)
    elif free < DISK_BYTES_LOW:
        yield Finding(
            "data dir", "warn", f"{path} has {free // 2**20} MiB left", "free some space on that disk"
        )
    else:
        yield Finding("data dir", "ok", f"{path} is writable, {free // 2**20} MiB free")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        step = f"chmod 700 {path}"
        yield Finding("permissions", "warn", f"{path} is accessible to other users (mode {mode:o})", step)
    else:
        yield Finding("permissions", "ok", f"{path} is not accessible to other users")
    for file in sorted(path.glob("*.db*")):
        if not os.access(file, os.R_OK | os.W_OK):
            step = f"chown it to the user of the server: {file}"
            yield Finding("permissions", "fail", f"{file} is not writable", step)


def check_listener(config: ServerConfig) -> Iterator[Finding]:
    """Whether the server can listen on its addresses."""
    for path, address in config.addresses.items():
        host, port = split_listen(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            flag = "--" + path.replace(".", "-")
            step = (
                f"stop the process that uses it, or choose another {flag}; ignore this if it is this server"
            )
            yield Finding(path, "warn", f"{address}: {error.strerror or error}", step)
        else:
            yield Finding(path, "ok", f"{address} is free")


def check_descriptors(config: ServerConfig) -> Iterator[Finding]:
    """Whether a worker may open as many connections as configured."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    # A server raises its soft limit to the hard limit by itself.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.http.connections_max + DESCRIPTORS_OWN
    if hard != resource.RLIM_INFINITY and hard < wanted:
        step = f"ulimit -n {wanted} (LimitNOFILE= in a unit), or lower --http-connections-max"
        yield Finding("descriptors", "warn", f"{hard} open files allowed, {wanted} may be needed", step)
    else:
        allowed = "any number of" if hard == resource.RLIM_INFINITY else hard
        yield Finding("descriptors", "ok", f"{allowed} open files allowed")


def check_tls(config: ServerConfig) -> Iterator[Finding]:
    """Whether certificate and key match, and other users cannot read the key."""
    if config.tls.cert is None or config.tls.key is None:
        return
    try:
        # Without a password callback OpenSSL would prompt for the password of an encrypted key.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.tls.cert, config.tls.key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        step = "set --tls-cert and --tls-key to PEM files that match, the key without a password"
        yield Finding("tls", "fail", f"{config.tls.cert}, {config.tls.key}: {error}", step)
        return
    yield Finding("tls", "ok", f"{config.tls.cert} and its key")
    mode = stat.S_IMODE(Path(config.tls.key).stat().st_mode)
    if mode & 0o007:
        step = f"chmod o= {config.tls.key}"
        yield Finding("tls", "warn", f"{config.tls.key} is readable by all users (mode {mode:o})", step)


def check_origin(config: ServerConfig) -> Iterator[Finding]:
    """Whether it responds, which region it belongs to, and how far its clock is off."""
    url = config.origin_url
    shown = mask_url(url)
    if url.startswith("memory:"):
        yield Finding("origin", "ok", "the memory of one process")
        return
    if config.origin is None and not (Path(config.data_dir) / ORIGIN_FILE).exists():
        yield Finding("origin", "ok", "a SQLite file in the data dir; the first start creates it")
        return
    # The file of an embedded server belongs to its only region. Any other origin may belong to another region: without
    # a configured name, the doctor must not claim it.
    region = config.region_name if config.origin is None else config.region
    try:
        offset_ms, memories = run(_query_origin(url, region))
    except MissingExtra as error:
        yield Finding("origin", "fail", str(error), f"pip install 'tidegate[{error.extra}]'")
    except RegionMismatch as error:
        step = "two regions must never share an origin: fix --region or --origin"
        if config.origin is None:
            step = f"fix --region, or {renamed(config)}"
        yield Finding("region", "fail", str(error), step)
    except TidegateError as error:
        step = "start it, or fix --origin; until then nodes decide from their own memory"
        if config.origin is None:
            step = f"repair or remove {Path(config.data_dir).absolute() / ORIGIN_FILE}: it holds only counts"
        yield Finding("origin", "fail", _about(shown, error), step)
    else:
        yield Finding("origin", "ok", f"{shown} responds")
        if config.origin is None:
            return
        memory = None if memories is None else _memory(memories)
        if memory is not None:
            yield memory
        if memory is not None and memory.status == "fail":
            return
        if offset_ms is not None:
            yield Finding("region", "ok", f"the origin belongs to {region}")
            yield _clock("origin", offset_ms)
        else:
            detail = (
                f"no region is set: a server claims this origin for region {config.region_name!r}, or fails to start "
                "if it belongs to another; the clock was not compared"
            )
            yield Finding("region", "warn", detail, "set --region")


def _memory(memories: list[RedisMemory]) -> Finding:
    """Counts that Redis evicts are restored by the next message of a node that still holds them; those of ended nodes
    are not."""
    evicting = sorted({memory.policy for memory in memories} - {"noeviction"})
    if evicting:
        step = "set maxmemory-policy to noeviction, and maxmemory high enough: nodes then keep what Redis cannot take"
        return Finding(
            "memory", "warn", f"Redis deletes counts when its memory is full ({', '.join(evicting)})", step
        )
    if not memories:
        return Finding("memory", "ok", "this Redis user may not read the memory settings")
    fullest = max(memories, key=_used_percent)
    if _used_percent(fullest) >= MEMORY_PERCENT_WARN:
        detail = f"{fullest.used_bytes} of {fullest.bytes_max} bytes (maxmemory) are used"
        step = "raise maxmemory, or remove what else is stored there"
        if not _is_full(memories):
            return Finding("memory", "warn", f"Redis is almost full: {detail}", step)
        step += "; until then nodes keep their counts, and do not see those of other nodes"
        return Finding("memory", "fail", f"Redis is full and takes no counts: {detail}", step)
    return Finding("memory", "ok", "Redis deletes no counts when its memory is full (noeviction)")


def _used_percent(memory: RedisMemory) -> float:
    return memory.used_bytes * 100 / memory.bytes_max if memory.bytes_max else 0.0


def _is_full(memories: list[RedisMemory]) -> bool:
    return any(memory.policy == "noeviction" and _used_percent(memory) >= 100 for memory in memories)


async def _query_origin(url: str, region: str | None) -> tuple[float | None, list[RedisMemory] | None]:
    """The offset of our clock from that of the origin, and the memory of Redis, None for another origin.

    The offset needs a region, because a pulse claims the origin for it, and a Redis that takes writes.
    """
    from tidegate.adapters.urls import open_origin

    origin = open_origin(url)
    try:
        memories = None
        if url.partition(":")[0] in REDIS_SCHEMES:
            from tidegate.adapters.redis.origin import RedisOrigin

            assert isinstance(origin, RedisOrigin)
            memories = await origin.memory(timeout_s=TIMEOUT_S)
            if _is_full(memories):
                return None, memories
        if region is None:
            await origin.read([Component(bytes(16), 0, "doctor", 0, 0)], timeout_s=TIMEOUT_S)
            return None, memories
        # Like a starting server, this claims an origin that has no region yet.
        await origin.open(region, timeout_s=TIMEOUT_S)
        before_ms = clock.now_ms()
        pulse = await origin.pulse(region, timeout_s=TIMEOUT_S)
        after_ms = clock.now_ms()
        return (before_ms + after_ms) / 2 - pulse.time_ms, memories
    finally:
        await origin.close()


def check_embedded(config: ServerConfig) -> Iterator[Finding]:
    """Region and clock of a server without Redis and database."""
    if config.origin is None and config.ledger is None:
        yield Finding("region", "ok", f"{config.region_name}, the only region: no ledger is set")
        yield Finding("clock", "ok", "no other machine is involved: there is no clock to compare with")


def check_ledger(config: ServerConfig) -> Iterator[Finding]:
    """Whether the database responds, has the schema of this version, and which regions use it."""
    url = config.catalog_url
    shown = mask_url(url)
    if config.ledger is None and not (Path(config.data_dir) / CATALOG_FILE).exists():
        yield Finding("ledger", "ok", "a SQLite file in the data dir; the first start creates it")
        return
    try:
        held, newest = run(_query_schema(url))
    except MissingExtra as error:
        yield Finding("ledger", "fail", str(error), f"pip install 'tidegate[{error.extra}]'")
        return
    except TidegateError as error:
        step = "start it, or fix --ledger; until then each region counts separately"
        if config.ledger is None:
            file = Path(config.data_dir).absolute() / CATALOG_FILE
            step = f"repair {file}, or restore it from a backup: it holds keys, namespaces and overrides"
        yield Finding("ledger", "fail", _about(shown, error), step)
        return
    yield Finding("ledger", "ok", f"{shown} responds")
    if held < newest:
        have = "has no schema" if held == 0 else f"has schema {held}, this version needs {newest}"
        step = f"tidegate migrate --ledger '{shown}'"
        # An embedded server migrates its own file when it starts.
        yield Finding("schema", "fail" if config.ledger else "ok", have, step if config.ledger else "")
        return
    if held > newest:
        step = "upgrade this node; downgrade only if the changelog says that the schemas are compatible"
        yield Finding("schema", "warn", f"has schema {held}, this version has schema {newest}", step)
    else:
        yield Finding("schema", "ok", f"version {held}")
    if config.ledger is not None:
        yield from _regions(config, config.ledger)


def _regions(config: ServerConfig, url: str) -> Iterator[Finding]:
    try:
        overview, offset_ms = run(_query_ledger(url))
    except TidegateError as error:
        yield Finding("regions", "fail", mask(str(error)), "see above")
        return
    yield _clock("ledger", offset_ms)
    live_ms = Tuning().region_live_ms
    live = sorted(beat.region for beat in overview.regions if overview.clock_ms - beat.beat_at_ms < live_ms)
    alike = [name for name in live if name != config.region and name.lower() == config.region_name.lower()]
    if alike:
        step = "region names are case-sensitive: fix one of them"
        yield Finding(
            "region", "warn", f"{config.region} differs from the active region {alike[0]} only in case", step
        )
    yield Finding("regions", "ok", f"active in the ledger: {', '.join(live) or 'none yet'}")


async def _query_schema(url: str) -> tuple[int, int]:
    from tidegate.adapters.migrations import load_migrations, schema_version
    from tidegate.adapters.urls import MYSQL_SCHEMES, POSTGRES_SCHEMES, scheme_of

    scheme = scheme_of(url, "a URL")
    dialect = "mysql" if scheme in MYSQL_SCHEMES else "postgres" if scheme in POSTGRES_SCHEMES else "sqlite"
    held = await schema_version(url, timeout_s=TIMEOUT_S)
    return held, load_migrations(dialect)[-1].version


async def _query_ledger(url: str) -> tuple[LedgerOverview, float]:
    async with opened_ledger(url, TIMEOUT_S) as ledger:
        now_ms = clock.now_ms()
        overview = await ledger.overview(now_ms=now_ms, hottest_max=0, timeout_s=TIMEOUT_S)
        after_ms = clock.now_ms()
        return overview, (now_ms + after_ms) / 2 - overview.clock_ms


def _about(shown: str, error: TidegateError) -> str:
    """The error with the URL in front, unless it already starts with the URL."""
    text = mask(str(error))
    return text if text.startswith(shown) else f"{shown}: {text}"


def _clock(of: str, offset_ms: float) -> Finding:
    detail = f"{offset_ms:+.0f} ms from the clock of the {of}"
    if abs(offset_ms) > CLOCK_OFFSET_WARN_MS:
        return Finding("clock", "warn", detail, "run NTP on both machines")
    return Finding("clock", "ok", detail)


CHECKS: Final[tuple[Callable[[ServerConfig], Iterator[Finding]], ...]] = (
    check_core,
    check_data_dir,
    check_listener,
    check_descriptors,
    check_tls,
    check_origin,
    check_ledger,
    check_embedded,
)


def examine(config: ServerConfig) -> Iterator[Finding]:
    """Run all checks."""
    for check in CHECKS:
        try:
            yield from check(config)
        except Exception as error:  # noqa: BLE001 - an unexpected error is a finding; the other checks continue
            detail = f"the check failed: {type(error).__name__}: {mask(str(error))}"
            yield Finding(check.__name__.removeprefix("check_"), "fail", detail, "this is a bug: report it")


@click.command()
@setting_options
@json_option
def doctor(load_settings: Callable[[], Loaded], as_json: bool) -> ExitCode:
    """Check everything that a server with this configuration needs, and say what to fix.

    Takes the options of `serve`. Exits 0 if no check failed (warnings do not count), 2 otherwise. It changes nothing,
    with one exception: like a starting server, it claims an origin without a region for --region.
    """
    findings: list[Finding] = []
    # Each is printed when it is found: a dependency that does not answer takes seconds.
    for finding in _findings(load_settings):
        findings.append(finding)
        if not as_json:
            click.echo(_line(finding))
    is_healthy = all(finding.status != "fail" for finding in findings)
    if as_json:
        document = {"ok": is_healthy, "checks": [finding._asdict() for finding in findings]}
        print_result(as_json, document, "")
    return ExitCode.OK if is_healthy else ExitCode.ERROR


def _findings(load_settings: Callable[[], Loaded]) -> Iterator[Finding]:
    try:
        loaded = load_settings()
    except ConfigFaults as error:
        yield from (Finding("config", "warn", warning) for warning in error.warnings)
        for fault in error.faults:
            detail = f"{fault.field}: got {fault.value} from {fault.source}, expected {fault.expected}"
            yield Finding("config", "fail", detail, fault.next_step)
    else:
        yield from (Finding("config", "warn", warning) for warning in loaded.warnings)
        yield Finding("config", "ok", "file, environment and flags are valid")
        yield from examine(loaded.config)


def _line(finding: Finding) -> str:
    step = f"\n      {'':<12} -> {finding.next_step}" if finding.next_step else ""
    return f"{finding.status:<4}  {finding.check:<12} {finding.detail}{step}"
