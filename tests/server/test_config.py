from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.model import Tuning
from tidegate.errors import ConfigurationError
from tidegate.server.process import config as config_module
from tidegate.server.process.config import SETTINGS, ConfigFaults, Fault, ServerConfig, Setting, split_listen
from tidegate.server.process.config_load import check_files, load

SECRET = "S3cretHunter2"

# Two valid values for every setting, as text, so that the test can tell which source won.
RIGHT: dict[str, tuple[str, str, str]] = {
    "listen": ("0.0.0.0:1", "localhost:2", "[::1]:3"),
    "data_dir": ("a", "/b", "c d"),
    "region": ("fra", "iad-1", "eu.west_2"),
    "origin": ("redis://a:1", "rediss://u:p@b", "sqlite:///c.db"),
    "ledger": ("mysql://u:p@a/db", "postgres://b/db", "sqlite:////c.db"),
    "workers": ("2", "3", "4"),
    "workspace": ("x", "y", "z"),
    "snapshot_age_max_s": ("0", "1", "2"),
    "memory_bytes_max": ("16777216", "20000000", "30000000"),
    "origin_bytes_max": ("1048576", "2000000", "3000000"),
    "metrics_token": ("a" * 16, "b" * 512, "c d" * 10),
    "test_mode": ("true", "false", "true"),
    "http.body_bytes_max": ("2000", "3000", "4000"),
    "http.header_bytes_max": ("2000", "3000", "4000"),
    "http.headers_max": ("10", "20", "30"),
    "http.connections_max": ("1", "2", "3"),
    "http.header_timeout_s": ("1", "2.5", "3"),
    "http.request_timeout_s": ("1", "2.5", "3"),
    "http.idle_timeout_s": ("1", "2.5", "3"),
    "http.stop_timeout_s": ("1", "2.5", "3"),
    "tls.cert": ("a.pem", "b.pem", "c.pem"),
    "tls.key": ("a.key", "b.key", "c.key"),
    "rls.address": ("0.0.0.0:11", "localhost:12", "[::1]:13"),
    "rls.config": ("a.yaml", "/b", "c d"),
    "check.address": ("0.0.0.0:21", "localhost:22", "[::1]:23"),
    "check.config": ("a.toml", "/b.toml", "c d.toml"),
    "console.enabled": ("on", "off", "auto"),
    "log.level": ("debug", "warning", "error"),
    "log.format": ("json", "text", "json"),
    "decisions.log_dir": ("a", "/b", "c d"),
    "decisions.sample": ("0.5", "1", "0.001"),
    "decisions.bytes_max": ("65536", "1000000", "2000000"),
    "decisions.hash_key_file": ("a.key", "/b", "c d"),
    "otel.traces": ("true", "false", "true"),
    "otel.metrics": ("true", "false", "true"),
}


def value_of(config: ServerConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def typed(setting: Setting, text: str) -> Any:
    """Convert the text to the type of the setting's default, without the code under test."""
    if isinstance(setting.default, bool):
        return text == "true"
    if isinstance(setting.default, int):
        return int(text)
    return float(text) if isinstance(setting.default, float) else text


def as_toml(chosen: Mapping[str, str]) -> str:
    """A TOML document with these settings, the top level first."""
    by_path = {setting.path: setting for setting in SETTINGS}
    lines = []
    for path in sorted(chosen, key=lambda path: ("." in path, path)):
        section, _, name = path.rpartition(".")
        value = typed(by_path[path], chosen[path])
        if section and f"[{section}]" not in lines:
            lines.append(f"[{section}]")
        lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


def faults_of(**sources: Any) -> list[Fault]:
    with pytest.raises(ConfigFaults) as caught:
        load(**sources)
    return list(caught.value.faults)


def test_every_setting_is_tried_by_these_tests() -> None:
    assert set(RIGHT) == {setting.path for setting in SETTINGS}


def test_the_defaults_are_a_configuration_that_serves() -> None:
    loaded = load()
    assert loaded.config == ServerConfig()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.config.addresses == {"listen": "127.0.0.1:8080"}
    assert loaded.config.origin is None
    assert loaded.config.ledger is None


subsets = st.sets(st.sampled_from(sorted(RIGHT)))


@given(in_file=subsets, in_environment=subsets, in_flags=subsets)
def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path_factory: pytest.TempPathFactory, in_file: set[str], in_environment: set[str], in_flags: set[str]
) -> None:
    # Settings that need each other are always set together.
    complete = {"region", "tls.cert", "tls.key", "rls.config"}
    by_path = {setting.path: setting for setting in SETTINGS}
    file = tmp_path_factory.mktemp("config") / "tidegate.toml"
    file.write_text(as_toml({path: RIGHT[path][0] for path in in_file | complete}))
    loaded = load(
        file=file,
        environ={by_path[path].env: RIGHT[path][1] for path in in_environment},
        flags={path: RIGHT[path][2] if path in in_flags else None for path in RIGHT},
    )
    for path, setting in by_path.items():
        if path in in_flags:
            expected, source = typed(setting, RIGHT[path][2]), f"flag {setting.flag}"
        elif path in in_environment:
            expected, source = typed(setting, RIGHT[path][1]), f"environment {setting.env}"
        elif path in in_file | complete:
            expected, source = typed(setting, RIGHT[path][0]), f"file {file}"
        else:
            expected, source = setting.default, "default"
        assert value_of(loaded.config, path) == expected
        assert loaded.sources[path] == source


WRONG: dict[str, tuple[str, ...]] = {
    "listen": ("8080", "host", "host:99999", "host:-1", "::1:80", "http://h:80", "a b:80"),
    "data_dir": (),
    "region": ("", "a b", "-x", "x" * 65, "fra!", "fra\n"),
    "origin": (
        "",
        "localhost:6379",
        "http://h",
        "mysql://h",
        "redis://",
        "redis://h:port",
        "sqlite://x",
        "memory",
    ),
    "ledger": ("", "h/db", "redis://h", "memory://", "mysql://", "mysql://h:0/db", "sqlite:///"),
    "workers": ("0", "-1", "many", "1.5", "257", "true"),
    "workspace": ("x" * 513,),
    "snapshot_age_max_s": ("-1", "1d", "2592001"),
    "memory_bytes_max": ("", "1000", "1.5", "many"),
    "origin_bytes_max": ("", "1000", "1.5", "many"),
    "metrics_token": ("", "short", "x" * 513),
    "test_mode": ("perhaps", "2", "on"),
    "otel.traces": ("perhaps",),
    "http.body_bytes_max": ("0", "1023", "1073741825", "10MB"),
    "http.header_bytes_max": ("0", "1048577"),
    "http.headers_max": ("7", "10001"),
    "http.connections_max": ("0", "1000001"),
    "http.header_timeout_s": ("0", "-1", "nan", "inf", "1s", "86401"),
    "http.request_timeout_s": ("0", "nan"),
    "http.idle_timeout_s": ("0", "nan"),
    "http.stop_timeout_s": ("0", "nan"),
    "tls.cert": (),
    "tls.key": (),
    "rls.address": ("", "8081", "localhost:", "localhost:http", "localhost:70000"),
    "rls.config": ("",),
    "check.address": ("", "8081", "localhost:70000"),
    "check.config": ("",),
    "console.enabled": ("yes", "true"),
    "log.level": ("loud", "INFO"),
    "log.format": ("xml",),
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_refused_with_its_field_value_source_and_next_step(path: str, value: str) -> None:
    setting = next(setting for setting in SETTINGS if setting.path == path)
    (fault,) = (fault for fault in faults_of(flags={path: value}) if fault.field == path)
    assert fault.source == f"flag {setting.flag}"
    assert fault.next_step == f"correct {setting.flag}"
    assert fault.value == setting.show(value) or fault.value.endswith("...")
    assert fault.expected
    if value:
        (fault,) = (fault for fault in faults_of(environ={setting.env: value}) if fault.field == path)
        assert fault.source == f"environment {setting.env}"
        assert fault.next_step == f"correct {setting.env}"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_a_file_has_types_of_its_own(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    section, _, name = setting.path.rpartition(".")
    for wrong in (
        "[1]",
        '{x = "y"}',
        "2026-01-01",
        '"8"' if not isinstance(setting.default, str | None) else "8",
    ):
        file.write_text((f"[{section}]\n" if section else "") + f"{name} = {wrong}\n")
        (fault,) = (fault for fault in faults_of(file=file) if fault.field == setting.path)
        assert fault.source == f"file {file}"
        assert fault.next_step == f"correct {setting.path} in {file}"


def test_all_faults_are_reported_at_once_and_each_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text(
        f'ledger = "mysql://u:{SECRET}@h/db"\nregoin = "fra"\nhttp = 3\n[log]\nlevel = "loud"\ncolour = 1\n'
    )
    faults = faults_of(
        file=file, environ={"TIDEGATE_WORKERS": "many", "TIDEGATE_TLS_KEY": "k"}, flags={"listen": "x"}
    )
    assert {(fault.field, fault.source) for fault in faults} == {
        ("regoin", f"file {file}"),
        ("http", f"file {file}"),
        ("log.level", f"file {file}"),
        ("log.colour", f"file {file}"),
        ("workers", "environment TIDEGATE_WORKERS"),
        ("listen", "flag --listen"),
        ("region", "default"),
        ("tls.cert", "default"),
    }
    assert "did you mean region?" in next(fault.next_step for fault in faults if fault.field == "regoin")


def test_the_message_of_the_error_is_every_fault_on_a_line_of_its_own() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(flags={"workers": "many", "log.format": "xml"})
    assert str(caught.value).splitlines() == [
        "workers: got 'many' from flag --workers, expected a whole number from 1 to 256. Next: correct --workers.",
        "log.format: got 'xml' from flag --log-format, expected one of json, text. Next: correct --log-format.",
    ]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copied, ConfigFaults)
    assert str(copied) == str(caught.value)


def test_a_region_is_required_as_soon_as_a_ledger_is_configured() -> None:
    (fault,) = faults_of(environ={"TIDEGATE_LEDGER": "mysql://h/db"})
    assert fault.field == "region"
    assert "since a ledger is set by environment TIDEGATE_LEDGER" in fault.expected
    assert "--region" in fault.next_step
    assert load(flags={"ledger": "mysql://h/db", "region": "fra"}).config.region == "fra"


def test_workers_do_not_share_memory() -> None:
    (fault,) = faults_of(flags={"origin": "memory://", "workers": "2"})
    assert fault.field == "origin"
    assert "SQLite" in fault.next_step
    assert load(flags={"origin": "memory://"}).config.origin == "memory://"


def test_a_certificate_needs_its_key() -> None:
    (fault,) = faults_of(flags={"tls.cert": "c.pem"})
    assert (fault.field, fault.value) == ("tls.key", "nothing")


@pytest.mark.parametrize("path", ["rls.address", "check.address", "check.config"])
def test_gateways_need_rules(path: str) -> None:
    (fault,) = faults_of(flags={path: RIGHT[path][0]})
    assert fault.field == "rls.config"
    assert f"since {path} is set by flag --{path.replace('.', '-')}" in fault.expected
    assert "--rls-config" in fault.next_step


def test_two_listeners_cannot_have_one_address() -> None:
    (fault,) = faults_of(flags={"rls.config": "r", "listen": "h:1", "check.address": "h:1"})
    assert (fault.field, fault.source) == ("check.address", "flag --check-address")
    assert "listen has this one" in fault.expected
    assert load(flags={"rls.config": "r", "listen": "h:0", "check.address": "h:0"}).config.rls.config == "r"


def test_every_fault_of_the_files_is_named_with_its_setting(tmp_path: Path) -> None:
    rules, policies = tmp_path / "rules.yaml", tmp_path / "check.toml"
    rules.write_text("domain: edge\ndescriptors: [{key: user, rate_limit: {unit: fortnight}}]")
    policies.write_text("trusted_hops = -1")
    flags = {"rls.config": str(rules), "check.config": str(policies), "tls.cert": "no", "tls.key": "no"}
    with pytest.raises(ConfigFaults) as caught:
        check_files(load(flags=flags))
    assert [fault.field for fault in caught.value.faults] == [
        "tls.cert",
        "tls.key",
        "rls.config",
        "check.config",
    ]
    assert "fortnight" in str(caught.value)
    assert "trusted_hops" in str(caught.value)
    rules.unlink()
    policies.unlink()
    with pytest.raises(ConfigFaults, match="cannot be read"):
        check_files(load(flags={"rls.config": str(rules), "check.config": str(policies)}))


def test_no_fault_shows_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        f'redis_password = "{SECRET}"\nleger = "mysql://u:{SECRET}@h/db"\norigin = ["redis://:{SECRET}@h"]\n'
        f'[http]\nauth_token = "{SECRET}"\n'
    )
    environ = {"TIDEGATE_LEDGER": f"mysq://u:{SECRET}@h/db"}
    for sources in (
        {"file": file},
        {"environ": environ},
        {"flags": {"ledger": f"mysql://u:{SECRET}@h:port/db"}},
    ):
        with pytest.raises(ConfigFaults) as caught:
            load(**sources)
        assert SECRET not in str(caught.value)
        assert SECRET not in repr(caught.value.faults)


def test_an_empty_variable_counts_as_unset() -> None:
    assert load(environ={"TIDEGATE_WORKERS": "", "TIDEGATE_REGION": ""}).config == ServerConfig()


def test_a_misspelled_variable_is_warned_about_and_those_of_kubernetes_are_not() -> None:
    loaded = load(
        environ={
            "TIDEGATE_REGOIN": "fra",
            "TIDEGATE_PORT": "tcp://10.0.0.1:80",
            "TIDEGATE_PORT_80_TCP_ADDR": "10.0.0.1",
            "TIDEGATE_SERVICE_HOST": "10.0.0.1",
            "TIDEGATE_SERVICE_PORT_HTTP": "80",
            "TIDEGATE_KEY": "tg_x",
            "TIDEGATE_URL": "http://x",
            "HOME": "/",
        }
    )
    (warning,) = loaded.warnings
    assert "TIDEGATE_REGOIN" in warning
    assert "did you mean TIDEGATE_REGION?" in warning


def test_no_setting_has_a_name_that_kubernetes_or_the_client_uses() -> None:
    for setting in SETTINGS:
        assert not setting.env.startswith(
            ("TIDEGATE_PORT", "TIDEGATE_SERVICE", "TIDEGATE_URL", "TIDEGATE_KEY")
        )
    assert len({setting.env for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)


def test_a_url_with_a_secret_can_come_from_a_file_of_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "ledger-url"
    secret.write_text(f"mysql://u:{SECRET}@h/db\n")
    loaded = load(environ={"TIDEGATE_LEDGER_FILE": str(secret), "TIDEGATE_REGION": "fra"})
    assert loaded.config.ledger == f"mysql://u:{SECRET}@h/db"
    assert loaded.sources["ledger"] == "environment TIDEGATE_LEDGER_FILE"
    assert loaded.config.secrets == (SECRET,)
    (fault,) = faults_of(
        environ={
            "TIDEGATE_LEDGER_FILE": str(secret),
            "TIDEGATE_LEDGER": "mysql://h/db",
            "TIDEGATE_REGION": "x",
        }
    )
    assert fault.next_step == "set only one of TIDEGATE_LEDGER and TIDEGATE_LEDGER_FILE"
    (fault,) = faults_of(environ={"TIDEGATE_LEDGER_FILE": f"mysql://u:{SECRET}@h/db"})
    assert SECRET not in str(fault)


@pytest.mark.parametrize("content", [b"listen = ", b"\xff\xfe", b"a = 1\na = 2", b"[http]\n[http]"])
def test_a_file_that_is_not_toml_is_a_fault(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    (fault,) = faults_of(file=file)
    assert fault.field == "config"
    assert str(file) in fault.value


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults_of(file=tmp_path / "none.toml")
    assert "No such file" in fault.expected


def test_test_mode_is_off_and_warns_when_it_is_on() -> None:
    assert load().config.test_mode is False
    assert any("test_mode" in warning for warning in load(flags={"test_mode": "true"}).warnings)


def test_every_setting_has_an_effect() -> None:
    """Each is read by name somewhere in the server, outside of the modules that define and load it."""
    folder = Path(config_module.__file__).parents[1]
    sources = "\n".join(
        file.read_text(encoding="utf-8")
        for file in folder.rglob("*.py")
        if not file.name.startswith("config")
    )
    by_property = {"listen": ("addresses",), "ledger": ("ledger", "catalog_url"), "origin": ("origin_url",)}
    by_property["region"] = ("region_name",)
    by_property |= {"rls.address": ("addresses",), "check.address": ("addresses",)}
    by_property["console.enabled"] = ("serves_console",)
    for setting in SETTINGS:
        # The log's format is applied by `tidegate serve` before there is a server.
        if setting.path != "log.format":
            for name in by_property.get(setting.path, (setting.path,)):
                last = name.rpartition(".")[2]
                assert re.search(rf"\b(?:config|tls|log|http|rls|check|decisions|otel)\.{last}\b", sources), (
                    setting.path
                )


@pytest.mark.parametrize(
    ("listen", "is_served"),
    [
        ("127.0.0.1:8080", True),
        ("127.9.9.9:8080", True),
        ("[::1]:8080", True),
        ("localhost:8080", True),
        ("0.0.0.0:8080", False),
        ("[::]:8080", False),
        ("10.0.0.1:8080", False),
        ("limits.example.com:8080", False),
    ],
)
def test_the_console_is_served_by_default_only_where_this_machine_alone_can_reach_it(
    listen: str, is_served: bool
) -> None:
    assert load(flags={"listen": listen}).config.serves_console is is_served
    assert load(flags={"listen": listen, "console.enabled": "on"}).config.serves_console
    assert not load(flags={"listen": listen, "console.enabled": "off"}).config.serves_console


def test_there_is_no_setting_for_a_tuning_constant() -> None:
    names = {setting.path.rpartition(".")[2] for setting in SETTINGS}
    assert names.isdisjoint(Tuning.__dataclass_fields__)


@pytest.mark.parametrize(
    ("listen", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::]:80", ("::", 80)),
        ("tide.example:65535", ("tide.example", 65535)),
    ],
)
def test_listen_is_a_host_and_a_port(listen: str, parts: tuple[str, int]) -> None:
    assert split_listen(listen) == parts
