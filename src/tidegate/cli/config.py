"""`tidegate config`: check the configuration, and show where each value comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.settings import setting_options
from tidegate.server.process.config import SETTINGS, ConfigFaults, Loaded, Setting
from tidegate.server.process.config_load import check_files

__all__ = ["config"]


@click.group()
def config() -> None:
    """Check and show the configuration of `serve`: file, environment and flags together."""


@config.command()
@setting_options
@json_option
def check(load_settings: Callable[[], Loaded], as_json: bool) -> ExitCode:
    """Check the configuration; exits 2 and lists every error if it is invalid.

    It opens no connection (`tidegate doctor` does), but checks that the files of TLS and rules can be used.
    """
    try:
        loaded = load_settings()
        check_files(loaded)
    except ConfigFaults as error:
        document = {
            "ok": False,
            "faults": [fault._asdict() for fault in error.faults],
            "warnings": list(error.warnings),
        }
        # Warnings first: a misspelled variable is often why a setting is missing.
        lines = [f"warning: {warning}" for warning in error.warnings]
        print_result(as_json, document, "\n".join([*lines, *(f"fault: {fault}" for fault in error.faults)]))
        return ExitCode.ERROR
    lines = [f"warning: {warning}" for warning in loaded.warnings]
    print_result(
        as_json, {"ok": True, "faults": [], "warnings": list(loaded.warnings)}, "\n".join([*lines, "ok"])
    )
    return ExitCode.OK


@config.command()
@setting_options
@json_option
def show(load_settings: Callable[[], Loaded], as_json: bool) -> None:
    """Show every value, with secrets masked, and where it comes from. The text is TOML."""
    loaded = load_settings()
    document = {
        setting.path: {"value": _shown(setting, loaded), "source": loaded.sources[setting.path]}
        for setting in SETTINGS
    }
    print_result(as_json, document, "\n".join(_toml(loaded)))


def _value(setting: Setting, loaded: Loaded) -> Any:
    value: Any = loaded.config
    for name in setting.path.split("."):
        value = getattr(value, name)
    return value


def _shown(setting: Setting, loaded: Loaded) -> Any:
    return setting.masked(_value(setting, loaded))


def _toml(loaded: Loaded) -> list[str]:
    lines: list[str] = []
    section = ""
    for setting in SETTINGS:
        here, _, name = setting.path.rpartition(".")
        if here != section:
            section = here
            lines += ["", f"[{here}]"]
        value = _shown(setting, loaded)
        source = loaded.sources[setting.path]
        if value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{f'{name} = {_literal(value)}':<40} # {source}")
    return lines


def _literal(value: str | bool | float) -> str:
    """A TOML literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            f"\\u{ord(letter):04x}" if ord(letter) < 32 or ord(letter) == 127 else letter
            for letter in value.replace("\\", "\\\\").replace('"', '\\"')
        )
        return f'"{escaped}"'
    return str(value)
