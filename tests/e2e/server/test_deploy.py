from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.server.harness import TidegateServer
from tidegate.cli.root import root
from tidegate.server.process.config import SETTINGS, ServerConfig
from tidegate.server.process.config_load import load
from tidegate.testing.servers.redis import create_certificate

DEPLOY = Path(__file__).parents[3] / "deploy"
SAMPLE = DEPLOY / "tidegate.toml"
UNITS = sorted(DEPLOY.glob("*.service"))


def local_copy(tmp_path: Path) -> Path:
    """The sample with paths that exist here, and nothing else changed."""
    create_certificate(tmp_path / "fullchain.pem", tmp_path / "privkey.pem")
    text = SAMPLE.read_text().replace("/etc/tidegate/tls", str(tmp_path))
    file = tmp_path / "tidegate.toml"
    file.write_text(text.replace("/var/lib/tidegate", str(tmp_path / "data")))
    return file


def environment(tmp_path: Path) -> dict[str, str]:
    """What the unit sets, with files in the place of credentials."""
    (tmp_path / "origin").write_text("redis://:secret@redis.internal:6379/0\n")
    (tmp_path / "ledger").write_text("mysql://tidegate:secret@db.internal/tidegate\n")
    return {
        "TIDEGATE_ORIGIN_FILE": str(tmp_path / "origin"),
        "TIDEGATE_LEDGER_FILE": str(tmp_path / "ledger"),
    }


def unit_of(path: Path) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment, method-assign] # the documented way to keep the case of keys
    unit.read_string(path.read_text())
    return unit


def test_the_sample_loads_without_a_warning_and_has_the_values_that_it_shows(tmp_path: Path) -> None:
    loaded = load(file=local_copy(tmp_path), environ=environment(tmp_path), flags={})
    config = loaded.config
    assert not loaded.warnings
    assert (config.region, config.workers, config.listen, config.log.format) == (
        "fra",
        4,
        "0.0.0.0:8443",
        "json",
    )
    assert config.ledger == "mysql://tidegate:secret@db.internal/tidegate"
    assert config.tls.cert is not None
    commented = [
        line for line in SAMPLE.read_text().splitlines() if line.startswith(("# origin =", "# ledger ="))
    ]
    assert len(commented) == 2, "the other way to say it is shown"


@pytest.mark.parametrize("unit_file", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_is_one_that_the_program_knows(unit_file: Path) -> None:
    service = unit_of(unit_file)["Service"]
    for name in ("ExecStart", "ExecStartPre"):
        if name not in service:
            continue
        program, *words = shlex.split(service[name])
        assert Path(program).name == "tidegate"
        # `--help` in front of the values: the subcommand and its options are parsed, nothing is run.
        names = [word for word in words if not word.startswith(("-", "/", "60"))]
        flags = [word for word in words if word.startswith("--")]
        shown = CliRunner().invoke(root, [*names, "--help"])
        assert shown.exit_code == 0, shown.output
        assert all(flag in shown.output for flag in flags)


def test_the_unit_allows_a_stop_more_time_than_the_server_takes() -> None:
    service = unit_of(DEPLOY / "tidegate.service")["Service"]
    stop_timeout_s = load(file=None, environ={}, flags={}).config.http.stop_timeout_s
    assert float(service["TimeoutStopSec"]) >= stop_timeout_s + 5
    known = {setting.env for setting in SETTINGS}
    named = {
        line.partition("=")[2].partition("=")[0].removesuffix("_FILE")
        for line in (DEPLOY / "tidegate.service").read_text().splitlines()
        if line.startswith("Environment=")
    }
    assert named <= known and len(named) == 2
    assert isinstance(ServerConfig().http.stop_timeout_s, float)


def test_the_unit_can_read_the_tls_key_as_the_how_to_says(tmp_path: Path) -> None:
    how_to = (DEPLOY.parent / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(line) for line in how_to.splitlines() if line.startswith(("group", "install", "sed"))
    ]
    (group,) = [words[-1] for words in commands if words[0] == "groupadd"]
    installed = {words[-1]: words for words in commands if words[0] == "install"}
    tls = tomllib.loads(SAMPLE.read_text(encoding="utf-8"))["tls"]
    assert tls["cert"] in installed
    key = installed[tls["key"]]
    assert (key[key.index("-g") + 1], key[key.index("-m") + 1]) == (group, "640")

    unit = tmp_path / "tidegate.service"
    unit.write_text((DEPLOY / unit.name).read_text(encoding="utf-8"), encoding="utf-8")
    assert "SupplementaryGroups" not in unit_of(unit)["Service"], (
        "a unit with a group that does not exist cannot start"
    )
    (edit,) = [words for words in commands if words[0] == "sed"]
    assert edit[-1] in installed, "it edits what was installed"
    subprocess.run([*edit[:-1], str(unit)], check=True, timeout=60)
    assert unit_of(unit)["Service"]["SupplementaryGroups"] == group


@pytest.mark.parametrize("unit_file", UNITS, ids=lambda path: path.name)
def test_systemd_finds_no_fault_in_a_unit(unit_file: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("not checked on systemd-analyze, the unit files: not installed")
    copy = tmp_path / unit_file.name
    copy.write_text(unit_file.read_text().replace("/opt/tidegate/bin/tidegate", "/bin/true"))
    found = subprocess.run(
        [analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert copy.name not in found.stderr, found.stderr


def test_a_server_starts_from_the_sample(tmp_path: Path) -> None:
    """Without the shared servers: one region, embedded."""
    with TidegateServer(
        "--config", str(local_copy(tmp_path)), "--workers", "1", data_dir=tmp_path / "data"
    ) as server:
        assert server.url.startswith("https://")
        assert server.stop() == 0
        assert all(line.startswith("{") for line in server.log.splitlines())
