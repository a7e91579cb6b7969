"""The settings of the server as options, with the same names, help and error messages as in file and environment.

Every option comes from `tidegate.server.process.config.SETTINGS`. click passes the text on unchecked, so that a wrong
value has the same message wherever it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from tidegate.server.process.config import SETTINGS, Setting
from tidegate.server.process.config_load import load, load_values

__all__ = ["setting_options", "value_options"]

F = TypeVar("F", bound=Callable[..., Any])


def _parameter(setting: Setting) -> str:
    return "setting_" + setting.path.replace(".", "__")


def _option(setting: Setting) -> Callable[[F], F]:
    default = "" if setting.default is None else f"  [default: {setting.default}]"
    text = f"{setting.description}{default}"
    if setting.is_switch:
        both = f"{setting.flag}/--no-{setting.flag[2:]}"
        return click.option(both, _parameter(setting), default=None, help=text)
    metavar = "URL" if setting.shown == "url" else "PATH" if setting.shown == "path" else "VALUE"
    if isinstance(setting.default, int | float):
        metavar = "N"
    kind = click.Path() if setting.shown == "path" else click.STRING
    return click.option(setting.flag, _parameter(setting), metavar=metavar, type=kind, help=text)


def setting_options(command: F) -> F:
    """`--config` and a flag for every setting; the command gets `load_settings`.

    Each call reads file, environment and flags again, and may raise `ConfigFaults`.
    """

    def given(file: Path | None, flags: dict[str, object]) -> dict[str, Any]:
        return {"load_settings": lambda: load(file=file, environ=os.environ, flags=flags)}

    return _with_options(command, SETTINGS, given)


def value_options(*paths: str) -> Callable[[F], F]:
    """`--config` and flags for these settings; the command gets their `values` by path."""
    chosen = tuple(setting for setting in SETTINGS if setting.path in paths)

    def given(file: Path | None, flags: dict[str, object]) -> dict[str, Any]:
        return {"values": load_values(paths, file=file, environ=os.environ, flags=flags)}

    return lambda command: _with_options(command, chosen, given)


def _with_options(
    command: F, chosen: Sequence[Setting], given: Callable[[Path | None, dict[str, object]], dict[str, Any]]
) -> F:
    @wraps(command)
    def wrapped(config_file: str | None, **rest: Any) -> Any:
        flags = {setting.path: rest.pop(_parameter(setting)) for setting in chosen}
        return command(**given(Path(config_file) if config_file else None, flags), **rest)

    decorated: Any = wrapped
    for setting in reversed(chosen):
        decorated = _option(setting)(decorated)
    option = click.option(
        "--config",
        "config_file",
        envvar="TIDEGATE_CONFIG",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(),
        help="TOML file. Environment variables (TIDEGATE_…) override it, flags override both.",
    )
    return option(decorated)  # type: ignore[no-any-return] # what click.option returns for any callable
