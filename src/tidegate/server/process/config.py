"""The server's configuration: one typed source for file, environment and flags; the later of these wins.

`ServerConfig` defines everything: its fields have defaults, bounds and descriptions, and the flags of `tidegate serve`,
the `TIDEGATE_…` variables, `tidegate config show` and docs/reference/config.md are made from them. `config_load` fills
it. Laws: a fault names the field, the value, where the value came from and the next step; a secret is never shown.
Tuning constants are not settings, because all nodes of a fleet must use the same. This module opens no connection and
creates no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Meta

from tidegate.adapters.secrets import MASK, mask_url, url_password
from tidegate.adapters.urls import MYSQL_SCHEMES, POSTGRES_SCHEMES, REDIS_SCHEMES
from tidegate.core.model import REGION_EXPECTED
from tidegate.errors import ConfigurationError
from tidegate.server.http1.bounds import HttpConfig

ORIGIN_SCHEMES: Final = REDIS_SCHEMES | {"sqlite", "memory"}
# Several processes share the ledger, so that one in the memory of a process is not accepted.
LEDGER_SCHEMES: Final = MYSQL_SCHEMES | POSTGRES_SCHEMES | {"sqlite"}

# The files of an embedded server in `data_dir`. Two, so that counting never waits for a change of the catalog.
CATALOG_FILE: Final = "tidegate.db"
ORIGIN_FILE: Final = "origin.db"

# The region of a server that has no ledger, and therefore no other region.
ONLY_REGION: Final = "default"


def _path(description: str) -> Meta:
    """Of a setting that names a file or a directory."""
    return Meta(description=description, extra={"shown": "path"})


def _url(description: str) -> Meta:
    """Of a setting whose value may hold a password."""
    return Meta(description=description, extra={"shown": "url"})


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of all listeners: both files or none."""

    cert: Annotated[str | None, _path("PEM file with the certificate chain.")] = None
    key: Annotated[str | None, _path("PEM file with its private key.")] = None


class RlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Envoy's rate limit service, and the rules that it shares with the check."""

    address: Annotated[
        str | None,
        Meta(
            description="HOST:PORT of Envoy's rate limit service (gRPC); needs rls.config and the rls extra."
        ),
    ] = None
    config: Annotated[
        str | None,
        _path(
            "Rules file in the layout of envoyproxy/ratelimit, or a directory of such files. They are read again when "
            "they change. With it the HTTP API has /v1/check."
        ),
    ] = None


class CheckSection(msgspec.Struct, frozen=True, kw_only=True):
    """The yes/no check (`/v1/check`) for gateways that understand 200 or 429."""

    address: Annotated[
        str | None,
        Meta(
            description="HOST:PORT of a listener that serves only /v1/check and needs no key: for gateways, on a "
            "private network; needs rls.config."
        ),
    ] = None
    config: Annotated[
        str | None,
        _path(
            "TOML file with named policies and trusted hops for /v1/check; needs rls.config. SIGHUP reads it again."
        ),
    ] = None


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The web console at /console."""

    enabled: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Serve the console at /console: auto only if `listen` is a loopback address. It shows "
            "identifiers to those who sign in with a key that has console.read."
        ),
    ] = "auto"


class DecisionsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The log of decisions, for `tidegate simulate replay`."""

    log_dir: Annotated[
        str | None,
        _path(
            "Directory for a log of all decisions as JSON lines; unset: no such log. It contains identifiers."
        ),
    ] = None
    sample: Annotated[
        float,
        Meta(gt=0, le=1),
        Meta(description="Share of the identifiers that are logged, each with all of its requests."),
    ] = 1.0
    bytes_max: Annotated[
        int,
        Meta(ge=65_536, le=1_099_511_627_776),
        Meta(description="Size of the log of each worker: older lines are removed."),
    ] = 67_108_864
    hash_key_file: Annotated[
        str | None,
        _path(
            "File with a secret of 16 to 64 bytes, the same on all nodes: identifiers are logged as hashes with this "
            "key."
        ),
    ] = None


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The log on stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least severe message that is written. SIGHUP reads it again."),
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="Text lines, or one JSON object a line.")] = (
        "text"
    )


class OtelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry, exported over OTLP as the standard variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, …) say."""

    traces: Annotated[
        bool, Meta(description="Spans on round trips to Redis and the database; needs the otel extra.")
    ] = False
    metrics: Annotated[
        bool,
        Meta(
            description="All metrics but those that name workspaces, identifiers and rules; needs the otel extra."
        ),
    ] = False


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `tidegate serve`."""

    listen: Annotated[
        str, Meta(description="HOST:PORT to serve on; [::1]:PORT for IPv6; port 0 takes a free one.")
    ] = "127.0.0.1:8080"
    data_dir: Annotated[
        Annotated[str, Meta(min_length=1)],
        _path("Directory for what this node keeps on disk: embedded databases and the local snapshot."),
    ] = "tidegate-data"
    region: Annotated[
        str | None,
        Meta(description="Stable name of this node's region, the same on all nodes that share its origin."),
    ] = None
    origin: Annotated[
        str | None,
        _url(
            "URL of the region's shared counter (redis://, rediss://, redis+cluster://, redis+sentinel://, valkey://, "
            "sqlite:///path, memory://). Unset: a SQLite file in data_dir."
        ),
    ] = None
    ledger: Annotated[
        str | None,
        _url(
            "URL of the database that all regions share (mysql://, postgres://, sqlite:///path); it also holds keys, "
            "namespaces and overrides. Unset: a SQLite file in data_dir, and no other region."
        ),
    ] = None
    workers: Annotated[
        int, Meta(ge=1, le=256, description="Number of processes, each a node of its own.")
    ] = 1
    workspace: Annotated[
        str,
        Meta(min_length=1, max_length=512, description="Workspace of the key that the first start creates."),
    ] = "default"
    snapshot_age_max_s: Annotated[
        int,
        Meta(ge=0, le=2_592_000),
        Meta(
            description="How old the local snapshot of keys, namespaces and overrides may be when a node starts while "
            "the database is down; 0 never uses it."
        ),
    ] = 86_400
    memory_bytes_max: Annotated[
        int,
        Meta(ge=16_777_216, le=1_099_511_627_776),
        Meta(
            description="Estimated memory for subjects in one worker; beyond it the least recently used are evicted."
        ),
    ] = 1_073_741_824
    origin_bytes_max: Annotated[
        int,
        Meta(ge=1_048_576, le=1_099_511_627_776),
        Meta(
            description="Largest size of the SQLite file with counts (no origin set), without its log (the -wal file), "
            "which comes on top; other counts stay in memory."
        ),
    ] = 1_073_741_824
    metrics_token: Annotated[
        Annotated[str, Meta(min_length=16, max_length=512)] | None,
        Meta(
            description="Secret that a scrape sends as `Authorization: Bearer TOKEN`. With it /metrics shows more, "
            "and only to those who send it; /readyz shows why a dependency is degraded. Unset: /metrics is shown "
            "to everyone, without the series that identify workspaces and identifiers.",
            extra={"shown": "secret"},
        ),
    ] = None
    test_mode: Annotated[
        bool, Meta(description="Let a request set its own time with X-Test-Time. Never in production.")
    ] = False
    http: HttpConfig = HttpConfig()
    tls: TlsConfig = TlsConfig()
    rls: RlsConfig = RlsConfig()
    check: CheckSection = CheckSection()
    console: ConsoleConfig = ConsoleConfig()
    log: LogConfig = LogConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    otel: OtelConfig = OtelConfig()

    @property
    def addresses(self) -> dict[str, str]:
        """The HOST:PORT of every listener, by its setting."""
        named = {"listen": self.listen, "rls.address": self.rls.address, "check.address": self.check.address}
        return {path: address for path, address in named.items() if address is not None}

    @property
    def serves_console(self) -> bool:
        """Whether the console is served: if it was asked for, or if only this machine can reach it."""
        if self.console.enabled != "auto":
            return self.console.enabled == "on"
        host = split_listen(self.listen)[0]
        return host == "localhost" or is_loopback(host)

    @property
    def catalog_url(self) -> str:
        """The database of keys, namespaces and overrides: the ledger's, or a file in `data_dir`."""
        return catalog_url(self.data_dir, self.ledger)

    @property
    def origin_url(self) -> str:
        """The region's shared counter: the one that was configured, or a file in `data_dir`."""
        return self.origin or sqlite_url(Path(self.data_dir) / ORIGIN_FILE)

    @property
    def region_name(self) -> str:
        """`region`, or a name for the only region of a fleet that has no ledger."""
        return self.region or ONLY_REGION

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in this configuration, which the log masks."""
        passwords = [url_password(url) for url in (self.origin, self.ledger) if url]
        return tuple(secret for secret in [*passwords, self.metrics_token] if secret)


class Setting(NamedTuple):
    """One field of the configuration, for file, environment, flags, `config show` and the docs."""

    path: str
    """`http.body_bytes_max`: the section and the key in the TOML file."""
    type: Any
    default: Any
    description: str
    expected: str
    """What a valid value looks like."""
    shown: str
    """`secret` hides all, `url` the password; `path` and `plain` are shown as they are."""

    @property
    def env(self) -> str:
        """The environment variable."""
        return "TIDEGATE_" + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The flag of `tidegate serve`."""
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """True for a flag that takes no value."""
        return isinstance(self.default, bool)

    def masked(self, value: Any) -> Any:
        """`value` without its secret."""
        if value is None or self.shown not in {"secret", "url"}:
            return value
        return mask_url(value) if self.shown == "url" and isinstance(value, str) else MASK

    def show(self, value: object) -> str:
        """`value` as it is shown, without its secret."""
        return repr(self.masked(value))


class Fault(NamedTuple):
    """One thing that is wrong with a configuration."""

    field: str
    value: str
    source: str
    expected: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.value} from {self.source}, expected {self.expected}. Next: {self.next_step}."


class ConfigFaults(ConfigurationError):
    """The configuration cannot be used. `faults` has every fault that was found, `warnings` everything else."""

    def __init__(self, faults: tuple[Fault, ...], warnings: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults
        self.warnings = warnings

    def __reduce__(self) -> tuple[type[ConfigFaults], tuple[tuple[Fault, ...], tuple[str, ...]]]:
        return ConfigFaults, (self.faults, self.warnings)


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, and where each of its values came from."""

    config: ServerConfig
    sources: Mapping[str, str]
    """By `Setting.path`: `default`, `file x.toml`, `environment TIDEGATE_X` or `flag --x`."""
    warnings: tuple[str, ...]


def _expected(info: Any) -> str:
    """What a value of this msgspec type looks like, in words."""
    if isinstance(info, msgspec.inspect.Metadata):
        return _expected(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return " or ".join(
            _expected(part) for part in info.types if not isinstance(part, msgspec.inspect.NoneType)
        )
    if isinstance(info, msgspec.inspect.LiteralType):
        return "one of " + ", ".join(str(value) for value in info.values)
    if isinstance(info, msgspec.inspect.BoolType):
        return "true or false"
    if isinstance(info, msgspec.inspect.IntType):
        return f"a whole number from {info.ge} to {info.le}"
    if isinstance(info, msgspec.inspect.FloatType):
        return f"a number of seconds above {info.gt:g}, at most {info.le:g}"
    if isinstance(info, msgspec.inspect.StrType):
        if info.max_length is None:
            return "text"
        least = f"{info.min_length} to " if info.min_length and info.min_length > 1 else "at most "
        return f"text of {least}{info.max_length} characters"
    raise AssertionError(f"no words for {info!r}")


def _settings_of(struct: type[msgspec.Struct], prefix: str) -> Iterator[Setting]:
    sections = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.default, msgspec.Struct):
            sections.append(field)
            continue
        info = msgspec.inspect.type_info(field.type)
        description = ""
        extra: dict[Any, Any] = {}
        # Nested Annotated types (Seconds) come as Meta in Meta: the outermost one with a text wins.
        for meta in reversed(getattr(field.type, "__metadata__", ())):
            if isinstance(meta, Meta):
                description = description or (meta.description or "")
                extra = extra or (meta.extra or {})
        expected = EXPECTED_BY_PATH.get(prefix + field.name) or _expected(info)
        shown = str(extra.get("shown", "plain"))
        yield Setting(prefix + field.name, field.type, field.default, description, expected, shown)
    for field in sections:
        yield from _settings_of(type(field.default), f"{prefix}{field.name}.")


EXPECTED_BY_PATH: Final = {
    "listen": "HOST:PORT with a port from 0 to 65535",
    "data_dir": "a directory",
    "region": REGION_EXPECTED,
    "origin": "a URL that begins with redis://, rediss://, redis+cluster://, redis+sentinel://, valkey://, "
    "sqlite:///path or memory://",
    "ledger": "a URL that begins with mysql://, postgres:// or sqlite:///path",
    "tls.cert": "a PEM file",
    "tls.key": "a PEM file",
    "rls.address": "HOST:PORT with a port from 0 to 65535",
    "rls.config": "a rules file, or a directory with some",
    "check.address": "HOST:PORT with a port from 0 to 65535",
    "check.config": "a TOML file",
    "decisions.log_dir": "a directory",
    "decisions.sample": "a number above 0, at most 1",
    "decisions.hash_key_file": "a file of 16 to 64 bytes",
}

SETTINGS: Final = tuple(_settings_of(ServerConfig, ""))
"""Every setting, in the order of the reference page: the top level first, then section by section."""


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; absolute, so that it does not depend on the current directory."""
    return f"sqlite:///{quote(str(path.absolute()))}"


def catalog_url(data_dir: str, ledger: str | None) -> str:
    """`ServerConfig.catalog_url` for a command that needs nothing else of the configuration."""
    return ledger or sqlite_url(Path(data_dir) / CATALOG_FILE)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only. A name may have any address, and is not resolved."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def split_listen(listen: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; ValueError if it has another form."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", listen)
    if match is None or int(match.group(3)) > 65_535:
        raise ValueError(listen)
    return match.group(1) or match.group(2), int(match.group(3))
