from __future__ import annotations

from pathlib import Path

import pytest

from tidegate import ConfigurationError
from tidegate.integrations.rate_limits import SyncRateLimits
from tidegate.integrations.settings import ENVIRONMENT, ONLY_REGION, read_settings

URL = "redis://localhost:6379"


def test_the_names_are_those_of_the_server() -> None:
    pytest.importorskip("msgspec", reason="the server's extra is not installed: names were not compared")
    from tidegate.server.process import config

    names = {setting.path: setting.env for setting in config.SETTINGS}
    assert {field: names[field] for field in ENVIRONMENT} == ENVIRONMENT
    assert config.ONLY_REGION == ONLY_REGION


def test_without_settings_the_limiter_is_embedded() -> None:
    assert read_settings({}) == {"region": None, "origin": None, "ledger": None}
    assert read_settings({"TIDEGATE_ORIGIN": "", "TIDEGATE_REGION": ""})["origin"] is None


def test_the_settings_of_a_framework_win_over_the_environment() -> None:
    found = read_settings(
        {"TIDEGATE_ORIGIN": URL}, {"TIDEGATE_ORIGIN": "redis://other", "TIDEGATE_REGION": "fra"}
    )
    assert found == {"region": "fra", "origin": URL, "ledger": None}


def test_an_origin_without_a_ledger_needs_no_region() -> None:
    assert read_settings({"TIDEGATE_ORIGIN": URL})["region"] == "default"
    assert read_settings({"TIDEGATE_ORIGIN": URL, "TIDEGATE_LEDGER": "mysql://db/t"})["region"] is None


def test_a_url_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "origin"
    file.write_text(URL + "\n")
    assert read_settings({"TIDEGATE_ORIGIN_FILE": str(file)})["origin"] == URL
    with pytest.raises(ConfigurationError, match="both set"):
        read_settings({"TIDEGATE_ORIGIN_FILE": str(file), "TIDEGATE_ORIGIN": URL})
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        read_settings({"TIDEGATE_ORIGIN_FILE": "redis://:secret@host"})
    assert "secret" not in str(caught.value)


def test_a_wrong_setting_is_an_error_when_the_limiter_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "gopher://host")
    with pytest.raises(ConfigurationError):
        _ = SyncRateLimits("1/minute").limiter
    with pytest.raises(ConfigurationError, match="expected a text"):
        read_settings({"TIDEGATE_REGION": 5})
