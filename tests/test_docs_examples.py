"""Every code block of README and docs is checked according to its language.

Python runs, the blocks of a page one after the other. A block that cannot run, because it needs a server, begins with
```python no-run: and the reason; it is only compiled. ```python sdk and ```js sdk run in tests/server/test_sdk_docs.py,
the configurations of gateways in tests/server/rls. Shell commands are parsed, and each `tidegate` command must exist
with its options. JSON, TOML and YAML are parsed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

from tidegate.cli.root import root

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("bench/*.md")]
)
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# The marks of blocks that other tests run.
RUN_ELSEWHERE = {("python", "sdk"), ("js", "sdk")}
# A page shows what a minute allows, so the minute must not end while its examples run.
AT_NOON = "import tests.midday; noon = tests.midday.begins_now(); noon.__enter__()\n"
GATEWAYS = {"nginx", "haproxy", "caddy", "lua"}


class Block(NamedTuple):
    page: str
    language: str
    mark: str
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        name = page.relative_to(ROOT).as_posix()
        yield Block(name, found["language"], found["mark"].strip(), textwrap.dedent(found["code"]))


BLOCKS = {page.relative_to(ROOT).as_posix(): found for page in PAGES if (found := list(blocks_of(page)))}


def of_language(*languages: str) -> dict[str, list[Block]]:
    chosen = {name: [one for one in found if one.language in languages] for name, found in BLOCKS.items()}
    return {name: found for name, found in chosen.items() if found}


def is_run_here(block: Block) -> bool:
    return not block.mark.startswith("no-run") and (block.language, block.mark) not in RUN_ELSEWHERE


def test_every_block_has_a_known_language_and_mark() -> None:
    known = {"", "python", "js", "sh", "console", "json", "toml", "yaml", *GATEWAYS}
    for block in (one for found in BLOCKS.values() for one in found):
        assert block.language in known, block
        if block.mark.startswith("no-run"):
            assert block.mark.removeprefix("no-run").strip(" :"), (
                f"an example that does not run says why: {block}"
            )
        else:
            assert not block.mark or (block.language, block.mark) in RUN_ELSEWHERE, block
        if block.language == "js":
            assert block.mark == "sdk", f"nothing runs it: {block}"
        if block.language in GATEWAYS:
            assert "behind-" in block.page, f"nothing runs it: {block}"


@pytest.mark.parametrize("page", of_language("python"))
def test_the_examples_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    blocks = of_language("python")[page]
    for block in blocks:
        compile(block.code, page, "exec")
    program = "\n".join(block.code for block in blocks if is_run_here(block))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AT_NOON + program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def shell_lines(block: Block) -> Iterator[str]:
    """The commands of a block, each on one line, without comments; of a console session, only the input."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]  # noqa: PLW2901 - the prompt is not part of the command
        yield re.sub(r"(^|\s)#.*", "", line).strip()


@pytest.mark.parametrize("page", of_language("sh", "console"))
def test_shell_commands_are_well_formed_and_exist(page: str) -> None:
    for block in of_language("sh", "console")[page]:
        commands = list(shell_lines(block))
        subprocess.run(["bash", "-n", "-c", "\n".join(commands)], check=True, timeout=60)
        for command in commands:
            for part in re.split(r"\s(?:\||&&|;)\s|;\s|<<<|\bif\b|\bthen\b", command):
                if part.strip().startswith("tidegate "):
                    check_command(shlex.split(part))


def check_command(words: list[str]) -> None:
    """The command exists, and has the options that it is given."""
    command: click.Command = root
    context = click.Context(root, info_name="tidegate")
    for word in words[1:]:
        if isinstance(command, click.Group):
            found = command.get_command(context, word)
            if found is not None:
                command = found
                continue
        if word.startswith("--"):
            options = {name for one in command.params for name in [*one.opts, *one.secondary_opts]}
            if isinstance(command, click.Group):  # `simulate` runs a hidden command when none is named
                unnamed = command.get_command(context, "run")
                assert unnamed is not None, words
                options |= {name for one in unnamed.params for name in one.opts}
            assert word.partition("=")[0] in {*options, "--help"}, f"{' '.join(words)}: no option {word}"
    assert command is not root, words


@pytest.mark.parametrize("page", of_language("json", "toml", "yaml"))
def test_documents_are_well_formed(page: str) -> None:
    for block in of_language("json", "toml", "yaml")[page]:
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "toml":
            tomllib.loads(block.code)
        else:
            assert list(yaml.safe_load_all(block.code))


def test_the_readme_has_examples() -> None:
    assert sum(is_run_here(block) for block in of_language("python")["README.md"]) >= 2


def test_the_docstring_of_the_package_runs() -> None:
    import tidegate

    assert tidegate.__doc__ is not None
    lines = [line[4:] for line in tidegate.__doc__.splitlines() if line.startswith("    ")]
    exec(compile("\n".join(lines), "tidegate.__doc__", "exec"), {})
