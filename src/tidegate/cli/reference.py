"""The reference pages of the documentation, written from the data that the programs themselves run on.

    python -m tidegate.cli.reference docs/reference

writes config.md, cli.md, errors.md, metrics.md and exit-codes.md; a test fails when they differ from what is there.
Prose that no data holds stands here, next to the data that it explains.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from tidegate.cli.outcomes import EXIT_CODES
from tidegate.cli.root import COMMANDS, root
from tidegate.server.api.pages import ERRORS_PATH
from tidegate.server.api.problems import DOCUMENTATION, problems_by_suffix
from tidegate.server.process.config import SETTINGS, Setting
from tidegate.telemetry.metrics import METRICS, Metric

__all__ = ["PAGES", "example_toml"]

MADE: Final = "<!-- Made by `python -m tidegate.cli.reference docs/reference`; do not edit. -->\n"

# Written elsewhere, or not a page of its own.
COMMANDS_ELSEWHERE: Final = {
    "simulate": "Its options are those of the simulator: `tidegate simulate --help`."
}


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), line(("---",) * len(head)), *map(line, rows)])


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def example_toml() -> str:
    """Every setting with its default, as a file to start from; what has no default is commented out."""
    examples = {
        "region": '"fra"',
        "origin": '"redis://redis.internal:6379/0"',
        "ledger": '"mysql://tidegate:PASSWORD@db.internal/tidegate"',
        "tls.cert": '"/etc/tidegate/cert.pem"',
        "tls.key": '"/etc/tidegate/key.pem"',
    }
    lines: list[str] = []
    section = ""
    for setting in SETTINGS:
        here, _, name = setting.path.rpartition(".")
        if here != section:
            section = here
            lines += ["", f"[{here}]"]
        value = setting.default
        if value is None:
            lines.append(f"# {name} = {examples[setting.path]}")
        else:
            written = (
                str(value).lower()
                if isinstance(value, bool)
                else f'"{value}"'
                if isinstance(value, str)
                else value
            )
            lines.append(f"{name} = {written}")
    return "\n".join(lines)


def _config_table(chosen: list[Setting]) -> str:
    rows = [
        (
            f"`{setting.path}`",
            f"`{setting.flag}`" + (f", `--no-{setting.flag[2:]}`" if setting.is_switch else ""),
            f"`{setting.env}`",
            _shown(setting.default),
            setting.expected[0].upper() + setting.expected[1:],
            setting.description,
        )
        for setting in chosen
    ]
    return _table(("setting", "flag of `serve`", "variable", "default", "accepted", "meaning"), rows)


def config_page() -> str:
    sections = dict.fromkeys(setting.path.rpartition(".")[0] for setting in SETTINGS)
    parts = [
        MADE,
        "# Configuration of the server\n",
        "Three sources, read in this order; the later one wins:\n",
        (
            "1. a TOML file, named by `--config FILE` or `TIDEGATE_CONFIG` (no file is read unless you name one),\n"
            "2. environment variables `TIDEGATE_…`,\n"
            "3. flags of `tidegate serve`.\n"
        ),
        (
            "`tidegate config check` says whether the whole fits together, `tidegate config show` where each value "
            "comes from; both take the flags of `serve`. Every fault is reported at once and names the field, the "
            "value, where it came from and the next step. Passwords in URLs are never shown.\n"
        ),
        (
            "- An empty variable counts as unset.\n"
            "- `TIDEGATE_ORIGIN_FILE` and `TIDEGATE_LEDGER_FILE` name files that hold the URL: for secrets that are "
            "mounted, not set.\n"
            "- A `TIDEGATE_…` variable that is no setting is warned about. Those that Kubernetes makes for a Service "
            "called `tidegate` (`TIDEGATE_PORT`, `TIDEGATE_SERVICE_HOST`, …) are ignored.\n"
            "- `region` is required as soon as a `ledger` is set, and has no default: two regions with one name would "
            "overwrite each other's rows.\n"
            "- There are no settings for the constants of convergence: nodes of one fleet must not drift apart.\n"
            "- `SIGHUP` reads `log.level` again, and what the `tls` files hold. Every other setting needs a restart.\n"
        ),
    ]
    for section in sections:
        chosen = [setting for setting in SETTINGS if setting.path.rpartition(".")[0] == section]
        parts += [f"## {f'[{section}]' if section else 'Top level'}\n", _config_table(chosen) + "\n"]
    parts += ["## A file to start from\n", f"```toml\n{example_toml()}\n```"]
    return "\n".join(parts) + "\n"


def _prose(text: str) -> str:
    r"""Help of click as Markdown: what follows a `\b` is an example."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            paragraphs.append("```sh\n" + inspect.cleandoc(paragraph.removeprefix("\b\n")) + "\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs) + "\n"


def _option_row(option: click.Option) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    notes = (option.help or "").strip()
    if option.show_default and option.default is not None:
        notes += f" Default: `{option.default}`."
    if option.show_envvar and option.envvar:
        notes += f" Variable: `{option.envvar}`."
    return f"{names}{value}", notes


def _command_parts(path: list[str], command: click.Command, level: int) -> Iterator[str]:
    # click keeps the help option that it makes for the first context it meets: it must know of -h.
    context = click.Context(command, info_name=" ".join(path), **root.context_settings)
    yield f"{'#' * level} {' '.join(path)}\n"
    yield f"`{command.get_usage(context).removeprefix('Usage: ')}`\n"
    yield _prose(command.help or "")
    if command.epilog:
        yield _prose(command.epilog)
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _command_parts([*path, name], child, level + 1)
        return
    settings = {setting.flag for setting in SETTINGS}
    options = [option for option in command.params if isinstance(option, click.Option)]
    own = [option for option in options if not settings.intersection(option.opts)]
    if len(options) - len(own) == len(SETTINGS):
        yield "Takes a flag for every [setting of the server](config.md).\n"
    else:
        own = options
    yield _table(("option", "meaning"), [_option_row(option) for option in own]) + "\n"


def cli_page() -> str:
    parts = [
        MADE,
        "# The command line\n",
        f"{_prose(root.help or '')}",
        (
            "`--json` on every command: the answer is one JSON document on stdout, an error is one on stderr "
            '(`{"error": {"type": …, "message": …}}`), and so are warnings of what worked (`{"warnings": […]}`). '
            "Codes: [exit codes](exit-codes.md). `tidegate completion SHELL` "
            "prints the completion script of bash, zsh or fish. `TIDEGATE_DEBUG=1` adds a traceback to errors.\n"
        ),
        (
            "Commands that talk to a running server (`limit`, `multi-limit`, `overrides`) take `--url` and `--key`, or "
            "`TIDEGATE_URL` and `TIDEGATE_KEY`. Commands that work on a database (`keys`, `namespaces`, `workspaces`, "
            "`migrate`, `cleanup`, `ledger`) take `--ledger`, the first three `--data-dir` for an embedded server.\n"
        ),
        _table(
            ("command", ""),
            [(f"[`{name}`](#tidegate-{name})", entry.summary) for name, entry in COMMANDS.items()],
        )
        + "\n",
    ]
    context = click.Context(root, info_name="tidegate")
    for name, entry in COMMANDS.items():
        if name in COMMANDS_ELSEWHERE:
            parts += [f"## tidegate {name}\n", f"{entry.summary} {COMMANDS_ELSEWHERE[name]}\n"]
            continue
        command = root.get_command(context, name)
        assert command is not None, name
        parts += _command_parts(["tidegate", name], command, 2)
    return "\n".join(parts).rstrip("\n") + "\n"


def _metric_row(entry: Metric) -> tuple[str, ...]:
    labels: list[str] = []
    for number, label in enumerate(entry.labels):
        known = f" = {', '.join(entry.values[number])}" if number < len(entry.values) else ""
        labels.append(f"`{label}`{known}")
    kind: Any = entry.kind
    if entry.series_max is not None:
        kind = f"{kind}, top {entry.series_max}"
    across = "" if entry.kind != "gauge" else "sum" if entry.across == "sum" else "worst"
    return f"`{entry.full_name}`", kind, "; ".join(labels), across, entry.help, entry.worry


def metrics_page() -> str:
    buckets = [
        (f"`{entry.full_name}`", ", ".join(f"{bound:g}" for bound in entry.bounds))
        for entry in METRICS
        if entry.bounds
    ]
    parts = [
        MADE,
        "# Metrics\n",
        (
            "`GET /metrics` answers in the text format of Prometheus. With several workers it is one page for all of "
            "them: counters and histograms are sums, also over workers that have been replaced; the table says what a "
            "gauge is. Numbers by workspace or identifier are bounded to the largest few, because callers choose those "
            "names and cardinality is an attack surface.\n"
        ),
        "Applications that use `prometheus_client` register `tidegate.telemetry.prometheus.Collector` instead.\n",
        _table(
            ("metric", "kind", "labels", "over workers", "meaning", "when to worry"),
            [_metric_row(entry) for entry in METRICS],
        )
        + "\n",
        "## Buckets\n",
        "Upper bounds in seconds.\n",
        _table(("histogram", "buckets"), buckets),
    ]
    return "\n".join(parts) + "\n"


def exit_codes_page() -> str:
    rows = [(f"`{int(code)}`", meaning) for code, meaning in EXIT_CODES.items()]
    parts = [
        MADE,
        "# Exit codes\n",
        "The same for every command of `tidegate`.\n",
        _table(("code", "meaning"), rows) + "\n",
        "```sh",
        "if tidegate limit email.send user_123 100/minute; then",
        "    echo sending",
        "elif [ $? -eq 1 ]; then",
        "    echo too many, try later",
        "else",
        "    echo the limiter is broken: decide yourself whether to go on",
        "fi",
        "```",
    ]
    return "\n".join(parts) + "\n"


def errors_page() -> str:
    types = problems_by_suffix()
    rows = [
        (", ".join(str(row.status) for row in rows), f"[`{suffix}`](#{suffix.replace('/', '')})")
        for suffix, rows in types.items()
    ]
    parts = [
        MADE,
        "# Errors of the HTTP API\n",
        (
            '`{"meta": {"requestId": …}, "error": {"title", "detail", "status", "type"}}`. `type` is '
            f"`{DOCUMENTATION}` and one of the paths below. It does not change; titles and details may. A running "
            f"server has this page at `{ERRORS_PATH}`, and each error at `{ERRORS_PATH}/` and its path.\n"
        ),
        (
            "A denied check is no error: it is a 200 with `success: false` (`passed: false` in a batch). Every 400 has "
            "`errors`, which may be empty. The content type is `application/json`; `application/problem+json` if "
            "`Accept` asks for it, and always for 429.\n"
        ),
        _table(("status", "type"), rows) + "\n",
    ]
    for suffix, problems in types.items():
        parts.append(f"## {suffix}\n")
        for problem in problems:
            parts += [
                f"**{problem.status} {problem.title}.** {problem.when}\n",
                f"What to do: {problem.remedy}\n",
            ]
    return "\n".join(parts).rstrip("\n") + "\n"


PAGES: Final = {
    "config.md": config_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "exit-codes.md": exit_codes_page,
}


def main() -> None:
    """Write all pages into the directory that was given."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
