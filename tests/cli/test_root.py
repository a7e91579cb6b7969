from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.cli.conftest import PROGRAM, Invoke, Program
from tests.untraced import run_untraced
from tidegate import __version__, compiled
from tidegate.cli import root as root_module
from tidegate.cli.outcomes import EXIT_CODES, ExitCode
from tidegate.cli.root import COMMANDS, Entry, root
from tidegate.errors import InvalidInput, TidegateError

HEAVY = ("redis", "hiredis", "asyncmy", "asyncpg", "msgspec", "httptools", "uvloop", "matplotlib", "sqlite3")


def leaves(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, command


def own_commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(root)
    for name, entry in COMMANDS.items():
        if entry.module.startswith("tidegate.cli."):
            command = root.get_command(context, name)
            assert command is not None
            yield from leaves(command, (name,))


OWN = dict(own_commands())


def test_the_documented_subcommands_exist() -> None:
    server = "serve limit multi-limit overrides keys namespaces config doctor"
    others = "migrate cleanup ledger simulate version completion"
    assert set(f"{server} {others}".split()) <= set(COMMANDS)
    assert {path[1] for path in OWN if path[0] == "overrides"} == {"set", "get", "list", "delete"}
    assert {path[1] for path in OWN if path[0] == "keys"} == {"create", "list", "expire", "revoke"}
    assert {path[1] for path in OWN if path[0] == "config"} == {"check", "show"}


@pytest.mark.parametrize("path", OWN, ids=" ".join)
def test_every_command_has_json_and_help(path: tuple[str, ...], invoke: Invoke) -> None:
    assert any("--json" in parameter.opts for parameter in OWN[path].params)
    for flag in ("--help", "-h"):
        result = invoke(*path, flag)
        assert result.exit_code == 0
        assert "--json" in result.output


@pytest.mark.parametrize("path", OWN, ids=" ".join)
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    for parameter in OWN[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts


def test_simulate_is_a_subcommand(invoke: Invoke) -> None:
    result = invoke("simulate", "--help")
    assert result.exit_code == 0
    assert "simulate" in result.output


def test_help_loads_no_driver_no_server_and_no_telemetry() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['tidegate', '--help']\n"
        "from tidegate.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "loaded = [name for name in sys.modules]\n"
        "sys.stderr.write(' '.join(loaded))\n"
    )
    done = run_untraced(program)
    loaded = set(done.stderr.split())
    assert loaded.isdisjoint(HEAVY)
    ours = {
        name
        for name in loaded
        if name.startswith(("tidegate.server", "tidegate.telemetry.", "tidegate.cli."))
    }
    assert ours == {"tidegate.cli.root", "tidegate.cli.outcomes"}
    assert "Run the rate limit server." in done.stdout


def test_without_click_the_program_says_what_to_install() -> None:
    program = "import sys; sys.modules['click'] = None; from tidegate.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "tidegate: the command line needs click; install it with: pip install 'tidegate[cli]'\n"
    )


def test_without_msgspec_serve_says_what_to_install(tidegate: Program) -> None:
    program = (
        "import sys; sys.modules['msgspec'] = None; sys.argv = ['tidegate', 'serve']\n"
        "from tidegate.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'tidegate[server]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["version"], 0),
        (["config", "check"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["--nonsense"], 2),
        (["limit"], 2),
        (["limit", "a", "b", "nonsense", "--key", "k"], 2),
        (["limit", "a", "b", "1/s"], 2),
        (["overrides"], 2),
        (["config", "check", "--workers", "many"], 2),
        (["migrate"], 2),
        (["keys", "list"], 2),
        (["serve", "--workers", "many"], 2),
    ],
)
def test_the_program_exits_with_its_documented_code(
    tidegate: Program, arguments: list[str], code: int
) -> None:
    done = tidegate(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_only_a_denial_exits_with_1() -> None:
    assert [code for code in EXIT_CODES if code == 1] == [ExitCode.DENIED]
    assert set(EXIT_CODES) == set(ExitCode)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """`tidegate broken` raises what the test puts in."""
    errors: list[BaseException] = []

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def command(as_json: bool) -> None:
        raise errors[0]

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "broken_command", command, raising=False)
    monkeypatch.setitem(root_module.COMMANDS, "broken", Entry(__name__, "broken_command", "Fails."))
    return errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("tg_S3cretHunter2"), 2, "error: unexpected RuntimeError: tg_****"),
        (InvalidInput("cost", -1, "at least 0"), 2, "error: cost: got -1, expected at least 0"),
        (TidegateError("mysql://u:S3cretHunter2@h is down"), 2, "error: mysql://u:****@h is down"),
        (FileNotFoundError(2, "No such file", "x.toml"), 2, "error: No such file: x.toml"),
        (ModuleNotFoundError("No module named 'x'"), 2, "error: unexpected ModuleNotFoundError"),
        (AssertionError("impossible"), 2, "error: unexpected AssertionError: impossible"),
        (click.ClickException("no"), 2, "error: no"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_any_error_exits_with_its_code_and_shows_no_secret(
    invoke: Invoke, broken: list[BaseException], error: BaseException, code: int, message: str
) -> None:
    broken.append(error)
    result = invoke("broken")
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert result.stdout == ""
    assert "S3cretHunter2" not in result.output


def test_tidegate_debug_shows_a_masked_traceback(invoke: Invoke, broken: list[BaseException]) -> None:
    broken.append(RuntimeError("tg_S3cretHunter2"))
    result = invoke("broken", env={"TIDEGATE_DEBUG": "1"})
    assert "Traceback" in result.stderr
    assert "S3cretHunter2" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["limit", "--json", "a"],
        ["limit", "a", "b", "nonsense", "--key", "k", "--json"],
        ["limit", "a", "b", "1/s", "--nonsense", "--json"],
        ["limit", "a", "b", "1/s", "--key", "k", "--url", "http://127.0.0.1:1", "--json"],
        ["keys", "list", "--json"],
        ["serve", "--workers", "many", "--json"],
    ],
)
def test_an_error_is_json_with_the_json_option(invoke: Invoke, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    error = json.loads(result.stderr)["error"]
    assert error["type"] and "Click" not in error["type"], "not the class name of a library"
    assert error["message"]
    assert result.stdout == ""


def test_an_interruption_is_json_with_the_json_option(invoke: Invoke, broken: list[BaseException]) -> None:
    broken.append(KeyboardInterrupt())
    result = invoke("broken", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stderr)["error"]["type"] == "Interrupted"


def test_the_help_explains_the_exit_codes(invoke: Invoke) -> None:
    text = " ".join(invoke("--help").output.split())
    assert "1 denied (limit, multi-limit) or failed (simulate); 2 error" in text


def test_a_closed_pipe_exits_with_141(tmp_path: Path) -> None:
    # The pipe has no reader from the start, so that the first write fails.
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*PROGRAM, "version"], stdout=write_end, stderr=subprocess.PIPE, check=False, cwd=tmp_path
    )
    os.close(write_end)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_version_shows_whether_the_core_is_compiled(invoke: Invoke) -> None:
    document = json.loads(invoke("version", "--json").stdout)
    assert document == {
        "version": __version__,
        "compiled": compiled,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert invoke("--version").stdout == f"tidegate {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_a_shell(invoke: Invoke, shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_TIDEGATE_COMPLETE" in result.stdout
    document = json.loads(invoke("completion", shell, "--json").stdout)
    assert document["script"] == result.stdout.removesuffix("\n")


def test_bash_completes_with_the_completion_script(tidegate: Program, tmp_path: Path) -> None:
    # A `tidegate` on the PATH, as an installation would have put it there.
    script = tmp_path / "tidegate"
    script.write_text(f"#!{sys.executable}\nfrom tidegate.cli import main\nmain()\n")
    script.chmod(0o755)
    program = (
        'eval "$(tidegate completion bash)"\n'
        "COMP_WORDS=(tidegate keys re) COMP_CWORD=2\n"
        "_tidegate_completion tidegate re keys\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    assert done.stdout.split() == ["revoke"], done.stderr


def test_completing_the_first_word_loads_no_subcommand(tidegate: Program) -> None:
    done = tidegate(env={"_TIDEGATE_COMPLETE": "zsh_complete", "COMP_WORDS": "tidegate", "COMP_CWORD": "1"})
    completed = done.stdout.splitlines()
    assert completed[1::3] == list(COMMANDS)
    assert completed[2::3] == [entry.summary for entry in COMMANDS.values()]
