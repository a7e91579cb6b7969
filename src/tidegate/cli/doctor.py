"""`tidegate doctor`: is everything there that a server with this configuration needs, and if not, what to do?

Each check is a function that yields findings and catches what its dependency may do to it; one that fails does not
stop the others. The doctor looks and does not heal: it creates no file and no schema.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple

import click

from tidegate import compiled
from tidegate.cli.databases import opened_ledger, run
from tidegate.cli.outcomes import ExitCode, answer, json_option
from tidegate.cli.serve import renamed
from tidegate.cli.settings import setting_options
from tidegate.core.model import Component, Tuning
from tidegate.errors import MissingExtra, RegionMismatch, TidegateError
from tidegate.ports import LedgerOverview
from tidegate.server.process.config import CATALOG_FILE, ORIGIN_FILE, ConfigFaults, Loaded, ServerConfig
from tidegate.telemetry.secrets import mask

__all__ = ["Finding", "doctor", "examine"]

CLOCK_OFFSET_WARN_MS: Final = Tuning().clock_offset_warn_ms
# A dependency that takes longer is as good as down for a server.
TIMEOUT_S: Final = 5.0
# Files and sockets of a worker beside its clients' connections.
DESCRIPTORS_OWN: Final = 64
DISK_BYTES_LOW: Final = 256 * 1024 * 1024


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    next_step: str = ""


def check_core(_config: ServerConfig) -> Iterator[Finding]:
    """Is the engine compiled, are the fast parts installed?"""
    if compiled:
        yield Finding("core", "ok", "compiled")
    else:
        step = "install a C compiler and build again, or take a platform wheel"
        yield Finding("core", "warn", "interpreted: about three times slower than compiled", step)
    for module in ("httptools", "uvloop"):
        if find_spec(module) is None:
            yield Finding("packages", "warn", f"{module} is not installed", "pip install 'tidegate[server]'")


def check_data_dir(config: ServerConfig) -> Iterator[Finding]:
    """Can the server write there, and can others read it?"""
    path = Path(config.data_dir).absolute()
    if not path.exists():
        parent = next(candidate for candidate in path.parents if candidate.exists())
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield Finding("data dir", "ok", f"{path} is not there yet; the first start makes it")
        else:
            yield Finding(
                "data dir", "fail", f"{path} cannot be made in {parent}", "choose another --data-dir"
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
    if free < DISK_BYTES_LOW:
        yield Finding("data dir", "warn", f"{path} has {free // 2**20} MiB left", "make room on that disk")
    else:
        yield Finding("data dir", "ok", f"{path} is writable, {free // 2**20} MiB free")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        step = f"chmod 700 {path}"
        yield Finding("permissions", "warn", f"{path} is open to others (mode {mode:o})", step)
    else:
        yield Finding("permissions", "ok", f"{path} is closed to others")
    for file in sorted(path.glob("*.db*")):
        if not os.access(file, os.R_OK | os.W_OK):
            step = f"chown it to the user of the server: {file}"
            yield Finding("permissions", "fail", f"{file} is not writable", step)


def check_listener(config: ServerConfig) -> Iterator[Finding]:
    """Can the server listen there?"""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        step = "stop what listens there, or choose another --listen; all is well if it is this server"
        yield Finding("listen", "warn", f"{config.listen}: {error.strerror or error}", step)
    else:
        yield Finding("listen", "ok", f"{config.listen} is free")


def check_descriptors(config: ServerConfig) -> Iterator[Finding]:
    """May a worker open as many connections as it was told to?"""
    try:
        import resource
    except ModuleNotFoundError:
        return
    # A server raises its soft limit to the hard one by itself.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.http.connections_max + DESCRIPTORS_OWN
    if hard != resource.RLIM_INFINITY and hard < wanted:
        step = f"ulimit -n {wanted} (LimitNOFILE= in a unit), or a lower --http-connections-max"
        yield Finding("descriptors", "warn", f"{hard} open files allowed, {wanted} may be needed", step)
    else:
        allowed = "any number of" if hard == resource.RLIM_INFINITY else hard
        yield Finding("descriptors", "ok", f"{allowed} open files allowed")


def check_tls(config: ServerConfig) -> Iterator[Finding]:
    """Do certificate and key belong together, and is the key secret?"""
    if config.tls.cert is None or config.tls.key is None:
        return
    try:
        # An encrypted key would make OpenSSL ask the terminal for its password.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.tls.cert, config.tls.key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        step = "give PEM files that belong together as --tls-cert and --tls-key, the key without a password"
        yield Finding("tls", "fail", f"{config.tls.cert}, {config.tls.key}: {error}", step)
        return
    yield Finding("tls", "ok", f"{config.tls.cert} and its key")
    mode = stat.S_IMODE(Path(config.tls.key).stat().st_mode)
    if mode & 0o007:
        step = f"chmod o= {config.tls.key}"
        yield Finding("tls", "warn", f"{config.tls.key} can be read by everybody (mode {mode:o})", step)


def check_origin(config: ServerConfig) -> Iterator[Finding]:
    """Does it answer, to whom does it belong, and what time is it there?"""
    url = config.origin_url
    shown = mask(url)
    if url.startswith("memory:"):
        yield Finding("origin", "ok", "the memory of one process")
        return
    if config.origin is None and not (Path(config.data_dir) / ORIGIN_FILE).exists():
        yield Finding("origin", "ok", "a SQLite file in the data dir; the first start makes it")
        return
    # The file of an embedded server belongs to its only region. Any other origin may be somebody's: without a name
    # nothing is claimed.
    region = config.region_name if config.origin is None else config.region
    try:
        offset_ms = run(_ask_origin(url, region))
    except MissingExtra as error:
        yield Finding("origin", "fail", str(error), f"pip install 'tidegate[{error.extra}]'")
    except RegionMismatch as error:
        step = "two regions must never share an origin: correct --region or --origin"
        if config.origin is None:
            step = f"correct --region, or {renamed(config)}"
        yield Finding("region", "fail", str(error), step)
    except TidegateError as error:
        step = "start it, or correct --origin; meanwhile decisions are made from memory"
        if config.origin is None:
            step = f"repair or remove {Path(config.data_dir).absolute() / ORIGIN_FILE}: it holds counts, nothing else"
        yield Finding("origin", "fail", _about(shown, error), step)
    else:
        yield Finding("origin", "ok", f"{shown} answers")
        if config.origin is None:
            return
        if offset_ms is not None:
            yield Finding("region", "ok", f"the origin belongs to {region}")
            yield _clock("origin", offset_ms)
        else:
            detail = (
                f"no name: a server takes this origin for region {config.region_name!r}, and is refused where it "
                "belongs to another; the clock was not compared"
            )
            yield Finding("region", "warn", detail, "name the region with --region")


async def _ask_origin(url: str, region: str | None) -> float | None:
    """The offset of our clock from the origin's; None without a region, where nothing may be claimed to ask."""
    from tidegate.adapters.urls import open_origin

    origin = open_origin(url)
    try:
        if region is None:
            await origin.read([Component(bytes(16), 0, "doctor", 0, 0)], timeout_s=TIMEOUT_S)
            return None
        # As a starting server does: it claims an origin that belongs to nobody yet.
        await origin.open(region, timeout_s=TIMEOUT_S)
        before_ms = time.time_ns() / 1_000_000
        pulse = await origin.pulse(region, timeout_s=TIMEOUT_S)
        after_ms = time.time_ns() / 1_000_000
        return (before_ms + after_ms) / 2 - pulse.time_ms
    finally:
        await origin.close()


def check_embedded(config: ServerConfig) -> Iterator[Finding]:
    """What there is to say about regions and clocks where nothing is shared."""
    if config.origin is None and config.ledger is None:
        yield Finding("region", "ok", f"{config.region_name}, the only one: no ledger is set")
        yield Finding("clock", "ok", "nothing is shared with another machine: no clock to compare with")


def check_ledger(config: ServerConfig) -> Iterator[Finding]:
    """Does the database answer, is its schema the one that this version needs, and who else is there?"""
    url = config.catalog_url
    shown = mask(url)
    if config.ledger is None and not (Path(config.data_dir) / CATALOG_FILE).exists():
        yield Finding("ledger", "ok", "a SQLite file in the data dir; the first start makes it")
        return
    try:
        held, newest = run(_ask_schema(url))
    except MissingExtra as error:
        yield Finding("ledger", "fail", str(error), f"pip install 'tidegate[{error.extra}]'")
        return
    except TidegateError as error:
        step = "start it, or correct --ledger; meanwhile each region counts for itself"
        if config.ledger is None:
            file = Path(config.data_dir).absolute() / CATALOG_FILE
            step = f"repair {file}, or restore it from a backup: it holds keys, namespaces and overrides"
        yield Finding("ledger", "fail", _about(shown, error), step)
        return
    yield Finding("ledger", "ok", f"{shown} answers")
    if held < newest:
        have = "has no schema" if held == 0 else f"has schema {held}, this version needs {newest}"
        step = f"tidegate migrate --ledger '{shown}'"
        # An embedded server migrates its own file when it starts.
        yield Finding("schema", "fail" if config.ledger else "ok", have, step if config.ledger else "")
        return
    if held > newest:
        step = "upgrade this node, or go back only if the changelog says that the schemas fit"
        yield Finding("schema", "warn", f"has schema {held}, this version knows {newest}", step)
    else:
        yield Finding("schema", "ok", f"version {held}")
    if config.ledger is not None:
        yield from _regions(config, config.ledger)


def _regions(config: ServerConfig, url: str) -> Iterator[Finding]:
    try:
        overview, offset_ms = run(_ask_ledger(url))
    except TidegateError as error:
        yield Finding("regions", "fail", mask(str(error)), "see above")
        return
    yield _clock("ledger", offset_ms)
    live_ms = Tuning().region_live_ms
    live = sorted(beat.region for beat in overview.regions if overview.clock_ms - beat.beat_at_ms < live_ms)
    alike = [name for name in live if name != config.region and name.lower() == config.region_name.lower()]
    if alike:
        step = "region names are told apart byte for byte: correct one of them"
        yield Finding("region", "warn", f"{config.region} looks like {alike[0]}, which is alive", step)
    yield Finding("regions", "ok", f"alive in the ledger: {', '.join(live) or 'none yet'}")


async def _ask_schema(url: str) -> tuple[int, int]:
    from tidegate.adapters.migrations import load_migrations, schema_version
    from tidegate.adapters.urls import MYSQL_SCHEMES, POSTGRES_SCHEMES, scheme_of

    scheme = scheme_of(url, "a URL")
    dialect = "mysql" if scheme in MYSQL_SCHEMES else "postgres" if scheme in POSTGRES_SCHEMES else "sqlite"
    held = await schema_version(url, timeout_s=TIMEOUT_S)
    return held, load_migrations(dialect)[-1].version


async def _ask_ledger(url: str) -> tuple[LedgerOverview, float]:
    async with opened_ledger(url, TIMEOUT_S) as ledger:
        now_ms = time.time_ns() // 1_000_000
        overview = await ledger.overview(now_ms=now_ms, hottest_max=0, timeout_s=TIMEOUT_S)
        after_ms = time.time_ns() // 1_000_000
        return overview, (now_ms + after_ms) / 2 - overview.clock_ms


def _about(shown: str, error: TidegateError) -> str:
    """Most errors of a dependency begin with its URL; then it need not be said twice."""
    text = mask(str(error))
    return text if text.startswith(shown) else f"{shown}: {text}"


def _clock(of: str, offset_ms: float) -> Finding:
    detail = f"{offset_ms:+.0f} ms from the clock of the {of}"
    if abs(offset_ms) > CLOCK_OFFSET_WARN_MS:
        return Finding("clock", "warn", detail, "let NTP set the clocks of both machines")
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
    """Every check, whatever the others find."""
    for check in CHECKS:
        try:
            yield from check(config)
        except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, and the others go on
            detail = f"could not be checked: {type(error).__name__}: {mask(str(error))}"
            yield Finding(
                check.__name__.removeprefix("check_"), "fail", detail, "report it with TIDEGATE_DEBUG=1"
            )


@click.command()
@setting_options
@json_option
def doctor(load_settings: Callable[[], Loaded], as_json: bool) -> ExitCode:
    """Check everything that a server with this configuration needs, and say what to do.

    Takes the options of `serve`. Exits 0 if nothing failed (warnings are no failures), 2 otherwise. It changes
    nothing, except that like a starting server it claims for --region an origin that belongs to nobody yet.
    """
    try:
        loaded = load_settings()
    except ConfigFaults as error:
        findings = [Finding("config", "warn", warning) for warning in error.warnings]
        findings += [
            Finding(
                "config",
                "fail",
                f"{fault.field}: got {fault.value} from {fault.source}, expected {fault.expected}",
                fault.next_step,
            )
            for fault in error.faults
        ]
    else:
        findings = [Finding("config", "warn", warning) for warning in loaded.warnings]
        findings += [
            Finding("config", "ok", "file, environment and flags fit together"),
            *examine(loaded.config),
        ]
    is_well = all(finding.status != "fail" for finding in findings)
    lines = [
        f"{finding.status:<4}  {finding.check:<12} {finding.detail}"
        + (f"\n      {'':<12} -> {finding.next_step}" if finding.next_step else "")
        for finding in findings
    ]
    answer(as_json, {"ok": is_well, "checks": [finding._asdict() for finding in findings]}, "\n".join(lines))
    return ExitCode.OK if is_well else ExitCode.ERROR
