"""Reading the server's configuration: a TOML file, then the environment, then flags; the later of these wins.

Every fault is collected instead of stopping at the first, and every value remembers where it came from. The
settings are defined in `tidegate.server.process.config`; this module only finds their values. It reads the files that
it is given and nothing else: the environment is passed in.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.adapters.secrets import mask
from tidegate.adapters.urls import parse_server_url, scheme_of, sqlite_path
from tidegate.core.model import checked_region
from tidegate.errors import ConfigurationError, MissingExtra
from tidegate.server.process.config import (
    LEDGER_SCHEMES,
    ORIGIN_SCHEMES,
    SETTINGS,
    ConfigFaults,
    Fault,
    Loaded,
    ServerConfig,
    Setting,
    split_listen,
)
from tidegate.server.process.decision_log import read_hash_key

# Variables that are not settings of the server.
OTHER_VARIABLES: Final = frozenset(
    {"TIDEGATE_CONFIG", "TIDEGATE_URL", "TIDEGATE_KEY", "TIDEGATE_DEBUG", "TIDEGATE_PURE"}
)
BY_PATH: Final = {setting.path: setting for setting in SETTINGS}
SECTIONS: Final = {path.rpartition(".")[0] for path in BY_PATH} - {""}
# The settings that name a listener.
LISTENERS: Final = ("listen", "rls.address", "check.address")
# Kubernetes sets these in every pod if there is a Service called tidegate.
SERVICE_LINK: Final = re.compile(r"TIDEGATE_(?:SERVICE_(?:HOST|PORT.*)|PORT(?:_.*)?)")


class _Reading:
    """One reading of all sources: the values that were found, and every fault."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.sources: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.warnings: list[str] = []

    def put(self, path: str, value: object, source: str) -> None:
        """A later source wins."""
        self.values[path] = value
        self.sources[path] = source

    def put_named(self, path: str, value: object, source: str) -> None:
        """The same from a source that may name what is not a setting."""
        if path in BY_PATH:
            self.put(path, value, source)
            return
        step = f"correct or remove it{_did_you_mean(path, BY_PATH)}"
        # The value of an unknown name may be a password: `redis_password = "…"`.
        shown = mask(f"{path}={value!r}").partition("=")[2]
        self.faults.append(Fault(path, shown, source, "a setting that exists", step))

    def read_file(self, file: Path) -> None:
        source = f"file {file}"
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            given, expected = "--config or TIDEGATE_CONFIG", f"a file ({error.strerror})"
            step = "give a readable file, or leave --config and TIDEGATE_CONFIG out"
            self.faults.append(Fault("config", repr(str(file)), given, expected, step))
            return
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            step = "correct that line"
            self.faults.append(Fault("config", repr(str(file)), source, f"TOML ({error})", step))
            return
        for key, value in document.items():
            if key not in SECTIONS:
                self.put_named(key, value, source)
            elif isinstance(value, dict):
                for name, inner in value.items():
                    self.put_named(f"{key}.{name}", inner, source)
            else:
                step = f"write it as a table: [{key}]"
                self.faults.append(Fault(key, mask(repr(value)), source, "a table", step))

    def read_environment(self, environ: Mapping[str, str]) -> None:
        by_env = {setting.env: setting for setting in SETTINGS}
        from_file = {
            f"{env}_FILE": setting for env, setting in by_env.items() if setting.shown in {"url", "secret"}
        }
        # An empty variable counts as unset, as in compose files and shells.
        for name in sorted(name for name, value in environ.items() if name.startswith("TIDEGATE_") and value):
            if name in by_env:
                self.put(by_env[name].path, environ[name], f"environment {name}")
            elif name in from_file:
                self._read_secret_file(from_file[name], name, environ)
            elif name not in OTHER_VARIABLES and SERVICE_LINK.fullmatch(name) is None:
                self.warnings.append(
                    f"{name} is not a setting and has no effect{_did_you_mean(name, by_env)}"
                )

    def _read_secret_file(self, setting: Setting, name: str, environ: Mapping[str, str]) -> None:
        source = f"environment {name}"
        if environ.get(setting.env):
            step = f"set only one of {setting.env} and {name}"
            self.faults.append(Fault(setting.path, "two values", source, "one value", step))
            return
        try:
            self.put(setting.path, Path(environ[name]).read_text(encoding="utf-8").strip(), source)
        except (OSError, UnicodeDecodeError) as error:
            step = f"make {name} name a readable file that holds the value"
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            # The value may be the secret itself instead of the name of its file.
            shown = setting.show(environ[name])
            self.faults.append(Fault(setting.path, shown, source, f"a text file ({reason})", step))

    def convert(self) -> dict[str, Any]:
        """Every value in its type; a value that cannot be converted is a fault and is left out."""
        converted: dict[str, Any] = {}
        for setting in SETTINGS:
            if setting.path not in self.values:
                converted[setting.path] = setting.default
                self.sources[setting.path] = "default"
                continue
            value = self.values[setting.path]
            # TOML has types of its own, so "8" is not a number there; variables and flags are always text.
            strict = self.sources[setting.path].startswith("file ")
            try:
                typed = msgspec.convert(value, setting.type, strict=strict)
                self._check(setting, typed)
            except (msgspec.ValidationError, ValueError):
                self._fault(setting, value)
            except ConfigurationError as error:
                # The adapters' message names the part of the URL that is wrong, with the secret masked.
                self._fault(setting, value, f"a URL that can be read ({error})")
            else:
                converted[setting.path] = typed
        return converted

    def _fault(self, setting: Setting, value: object, expected: str = "", next_step: str = "") -> None:
        source = self.sources[setting.path]
        kind, _, name = source.partition(" ")
        correct = f"correct {setting.path} in {name}" if kind == "file" else f"correct {name}"
        shown = "nothing" if value is None else setting.show(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        self.faults.append(
            Fault(setting.path, shown, source, expected or setting.expected, next_step or correct)
        )

    @staticmethod
    def _check(setting: Setting, value: Any) -> None:
        """Checks of one value beyond its type; ValueError or ConfigurationError if it is wrong."""
        if setting.path in LISTENERS and value is not None:
            split_listen(value)
        elif setting.path == "region" and value is not None:
            checked_region(value)
        elif setting.path in {"origin", "ledger"} and value is not None:
            scheme = scheme_of(value, setting.expected)
            if scheme not in (ORIGIN_SCHEMES if setting.path == "origin" else LEDGER_SCHEMES):
                raise ValueError(value)
            if scheme == "sqlite":
                sqlite_path(value)
            elif scheme != "memory":
                parse_server_url(value, default_port=1)
        elif setting.shown == "path" and value == "":
            raise ValueError(value)

    def check_together(self, converted: Mapping[str, Any]) -> None:
        """Checks of several values together. A value that is a fault by itself is not checked again."""
        ledger, region = converted.get("ledger"), converted.get("region", "")
        if ledger is not None and region is None:
            because = f"required, since a ledger is set by {self.sources['ledger']}"
            step = "name this node's region with --region, TIDEGATE_REGION or region = in the file; it has no default"
            self._fault(BY_PATH["region"], None, f"{BY_PATH['region'].expected} ({because})", step)
        for one, other in (("tls.cert", "tls.key"), ("tls.key", "tls.cert")):
            if converted.get(one) and other in converted and converted[other] is None:
                step = f"give {other} too, or remove {one}"
                self._fault(
                    BY_PATH[other], None, f"a PEM file, since {one} is set by {self.sources[one]}", step
                )
        if "rls.config" in converted and converted["rls.config"] is None:
            for path in ("rls.address", "check.address", "check.config"):
                if converted.get(path) is not None:
                    expected = (
                        f"{BY_PATH['rls.config'].expected}, since {path} is set by {self.sources[path]}"
                    )
                    step = "name the rules with --rls-config, TIDEGATE_RLS_CONFIG or config = in [rls]"
                    self._fault(BY_PATH["rls.config"], None, expected, step)
                    break
        listeners: dict[str, str] = {}
        for path in LISTENERS:
            address = converted.get(path)
            if address is None or split_listen(address)[1] == 0:
                continue
            if address in listeners:
                expected = f"an address of its own, since {listeners[address]} has this one"
                self._fault(BY_PATH[path], address, expected, "choose another port")
            listeners[address] = path
        origin, workers = converted.get("origin"), converted.get("workers", 1)
        if origin is not None and origin.startswith("memory:") and workers > 1:
            step = "leave origin unset (a SQLite file in data_dir), or give a Redis URL, or run one worker"
            self._fault(BY_PATH["origin"], origin, f"an origin that {workers} workers can share", step)


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Loaded:
    """Read the file, then the environment, then the flags (by `Setting.path`; None is "not given"); later wins.

    `arguments` are those of a Python function: the same, but a name may be unknown.

    Raises `ConfigFaults` with everything that is wrong.
    """
    reading = _read(file, environ, flags)
    for path, value in (arguments or {}).items():
        reading.put_named(path, value, f"argument {path}")
    converted = reading.convert()
    reading.check_together(converted)
    if reading.faults:
        raise ConfigFaults(tuple(reading.faults), tuple(reading.warnings))
    tree: dict[str, Any] = {}
    for path, value in converted.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    for field in msgspec.structs.fields(ServerConfig):
        if isinstance(field.default, msgspec.Struct):
            tree[field.name] = type(field.default)(**tree[field.name])
    if tree["test_mode"]:
        reading.warnings.append("test_mode is on: every caller of the API can choose the time of a request")
    return Loaded(ServerConfig(**tree), reading.sources, tuple(reading.warnings))


def check_files(loaded: Loaded) -> None:
    """Raises `ConfigFaults` unless the files that the settings name can be used: TLS, rules, policies, hash key."""
    faults = [*_certificate_faults(loaded), *_gateway_faults(loaded), *_hash_key_faults(loaded)]
    if faults:
        raise ConfigFaults(tuple(faults), loaded.warnings)


def _file_fault(loaded: Loaded, path: str, file: str | None, expected: str, step: str) -> Fault:
    return Fault(path, repr(file), loaded.sources[path], expected, step)


def _gateway_faults(loaded: Loaded) -> list[Fault]:
    rls, check = loaded.config.rls, loaded.config.check
    if rls.config is None:
        return []
    try:
        from tidegate.server.rls.check_operation import read_check_config
        from tidegate.server.rls.rules_file import load_rules
    except ModuleNotFoundError as error:
        raise MissingExtra("rls", "rls.config") from error
    faults = []
    try:
        load_rules(Path(rls.config))
    except ConfigurationError as error:
        step = "correct the rules; `tidegate rules check` checks them"
        faults.append(_file_fault(loaded, "rls.config", rls.config, f"rules without errors ({error})", step))
    try:
        read_check_config(check.config)
    except ConfigurationError as error:
        expected = f"a file with valid policies ({error})"
        faults.append(_file_fault(loaded, "check.config", check.config, expected, "correct the file"))
    return faults


def _hash_key_faults(loaded: Loaded) -> list[Fault]:
    file = loaded.config.decisions.hash_key_file
    try:
        read_hash_key(file)
    except ConfigurationError as error:
        step = "make one with `head -c 32 /dev/urandom | base64 > FILE`, and give it to every node"
        expected = f"a file of 16 to 64 bytes ({error})"
        return [_file_fault(loaded, "decisions.hash_key_file", file, expected, step)]
    return []


def _certificate_faults(loaded: Loaded) -> list[Fault]:
    """Whether the TLS files can be read and belong together."""
    tls = loaded.config.tls
    if tls.cert is None or tls.key is None:
        return []
    import ssl

    faults = []
    for path, file in (("tls.cert", tls.cert), ("tls.key", tls.key)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            expected = f"a PEM file that this user can read ({error.strerror})"
            step = "name another file, or give this user the right to read it"
            faults.append(_file_fault(loaded, path, file, expected, step))
    if not faults:
        try:
            # For an encrypted key OpenSSL would ask the terminal for a password.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            expected = f"a certificate chain in PEM to which the key in {tls.key} belongs ({error})"
            step = "give PEM files that belong together as tls.cert and tls.key, the key without a password"
            faults.append(_file_fault(loaded, "tls.cert", tls.cert, expected, step))
    return faults


def load_values(
    paths: Collection[str],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Only these settings, for a command that needs no others: their faults are ignored."""
    reading = _read(file, environ, flags)
    converted = reading.convert()
    faults = tuple(fault for fault in reading.faults if fault.field in {"config", *paths})
    if faults:
        raise ConfigFaults(faults)
    return {path: converted[path] for path in paths}


def _read(
    file: Path | None, environ: Mapping[str, str] | None, flags: Mapping[str, object] | None
) -> _Reading:
    reading = _Reading()
    if file is not None:
        reading.read_file(file)
    if environ is not None:
        reading.read_environment(environ)
    for path, value in (flags or {}).items():
        if value is not None:
            reading.put(path, value, f"flag {BY_PATH[path].flag}")
    return reading
