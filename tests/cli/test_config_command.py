from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from reference import example_toml
from tests.cli.conftest import Invoke, InvokeJSON, Program
from tidegate.server.process.config import SETTINGS, ServerConfig
from tidegate.server.process.config_load import load

SECRET = "S3cretHunter2"
LEDGER = f"mysql://tidegate:{SECRET}@db.internal/tidegate"


def test_show_names_every_value_and_where_it_comes_from(invoke_json: InvokeJSON, tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('region = "fra"\nworkers = 2\n[log]\nlevel = "debug"\n')
    shown = invoke_json(
        "config", "show", "--config", file, "--workers", "4", "--test-mode", "--ledger", LEDGER
    )
    assert set(shown) == {setting.path for setting in SETTINGS}
    assert shown["region"] == {"value": "fra", "source": f"file {file}"}
    assert shown["workers"] == {"value": 4, "source": "flag --workers"}
    assert shown["log.level"] == {"value": "debug", "source": f"file {file}"}
    assert shown["test_mode"] == {"value": True, "source": "flag --test-mode"}
    assert shown["listen"] == {"value": "127.0.0.1:8080", "source": "default"}


@pytest.mark.parametrize("as_json", [True, False])
def test_show_masks_secrets(invoke: Invoke, as_json: bool) -> None:
    arguments = [
        "config",
        "show",
        "--ledger",
        LEDGER,
        "--region",
        "fra",
        "--origin",
        f"redis://:{SECRET}@redis:6379",
    ]
    result = invoke(*arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 0
    assert SECRET not in result.output
    assert "mysql://tidegate:****@db.internal/tidegate" in result.stdout
    assert "redis://:****@redis:6379" in result.stdout


def test_the_text_of_show_is_toml_that_loads_again(invoke: Invoke, tmp_path: Path) -> None:
    odd = 'a "quoted" \\ name\twith\x7f'
    result = invoke(
        "config", "show", "--data-dir", odd, "--workers", "3", "--test-mode", "--http-idle-timeout-s", "1.5"
    )
    file = tmp_path / "again.toml"
    file.write_text(result.stdout, encoding="utf-8")
    again = load(file=file).config
    assert again.data_dir == odd
    assert (again.workers, again.test_mode, again.http.idle_timeout_s) == (3, True, 1.5)


def test_check_accepts_the_defaults(invoke: Invoke, invoke_json: InvokeJSON) -> None:
    assert invoke("config", "check").stdout == "ok\n"
    assert invoke_json("config", "check") == {"ok": True, "faults": [], "warnings": []}


def test_check_names_every_fault_and_exits_with_2(invoke: Invoke, invoke_json: InvokeJSON) -> None:
    arguments = ("config", "check", "--workers", "many", "--ledger", LEDGER)
    document = invoke_json(*arguments, exit_code=2)
    assert document["ok"] is False
    assert [(fault["field"], fault["source"]) for fault in document["faults"]] == [
        ("workers", "flag --workers"),
        ("region", "default"),
    ]
    assert all(fault["next_step"] for fault in document["faults"])
    text = invoke(*arguments)
    assert text.exit_code == 2
    assert text.stdout.count("fault: ") == 2
    assert SECRET not in text.output


def test_check_warns_about_a_variable_without_effect(invoke: Invoke) -> None:
    result = invoke("config", "check", env={"TIDEGATE_WORKRS": "2"})
    assert result.exit_code == 0
    assert "TIDEGATE_WORKRS is not a setting" in result.stdout
    assert "did you mean TIDEGATE_WORKERS?" in result.stdout


def test_the_environment_names_the_file(tidegate: Program, tmp_path: Path) -> None:
    file = tmp_path / "from-environment.toml"
    file.write_text("workers = 7\n")
    done = tidegate(
        "config", "show", "--json", env={"TIDEGATE_CONFIG": str(file), "TIDEGATE_LOG_FORMAT": "json"}
    )
    shown = json.loads(done.stdout)
    assert shown["workers"] == {"value": 7, "source": f"file {file}"}
    assert shown["log.format"] == {"value": "json", "source": "environment TIDEGATE_LOG_FORMAT"}


def test_a_missing_file_is_an_error(invoke: Invoke) -> None:
    result = invoke("config", "show", "--config", "none.toml")
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_every_setting_has_a_flag(invoke: Invoke, setting: object) -> None:
    flag = getattr(setting, "flag", "")
    for command in (["serve"], ["config", "check"], ["config", "show"], ["doctor"]):
        assert f"{flag} " in invoke(*command, "--help").output.replace("\n", " ").replace("/", " ")


def test_the_example_file_holds_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(example_toml())
    assert load(file=file).config == ServerConfig()


def test_the_commented_lines_of_the_example_are_valid_too(tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(example_toml().replace("\n# ", "\n"))
    tomllib.loads(file.read_text())
    config = load(file=file).config
    assert config.region == "fra"
    assert config.ledger is not None
    assert config.tls.key is not None


def test_a_misspelled_variable_is_reported_next_to_the_fault_that_it_caused(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_REGIO", "fra")
    monkeypatch.setenv("TIDEGATE_LEDGER", "mysql://u@h/db")
    text = invoke("config", "check").output
    assert "did you mean TIDEGATE_REGION?" in text and "fault: region" in text
    document = json.loads(invoke("config", "check", "--json").output)
    assert len(document["warnings"]) == 1
    checks = json.loads(invoke("doctor", "--json").output)["checks"]
    assert [check["status"] for check in checks] == ["warn", "fail"]
