from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring import FILES
from tidegate.telemetry.alerts import ALERTS, Alert
from tidegate.telemetry.metrics import METRICS, Metric

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "operations" / "runbooks"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "tidegate.json"

BY_FULL_NAME = {entry.full_name: entry for entry in METRICS}
SERIES = re.compile(r"(tidegate_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'([a-z_]+)\s*(=~|=|!=|!~)\s*"([^"]*)"')


def declared(name: str) -> Metric:
    """The metric that a name in an expression belongs to."""
    entry = BY_FULL_NAME.get(name)
    if entry is None:
        base, _, suffix = name.rpartition("_")
        assert suffix in {"bucket", "count", "sum"}, f"{name} is not a metric"
        entry = BY_FULL_NAME[base]
        assert entry.kind == "histogram", name
    return entry


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [*shown, *(alert.promql for alert in ALERTS)]


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_the_tables_of_metrics_and_alerts_give(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == FILES[name](), "run: make docs-reference"


def test_every_expression_uses_metrics_labels_and_values_that_exist() -> None:
    found = 0
    for expression in expressions():
        for name, matchers in SERIES.findall(expression):
            found += 1
            entry = declared(name)
            for label, _, value in MATCHER.findall(matchers):
                if label in {"job", "instance"}:
                    continue
                if label == "le":
                    assert float(value) in entry.bounds, expression
                    continue
                assert label in entry.labels, f"{label} in {expression}"
                place = entry.labels.index(label)
                if place < len(entry.values):
                    assert set(value.split("|")) <= set(entry.values[place]), expression
    assert found > len(METRICS)


def test_every_metric_has_a_panel_with_its_help_and_its_worry() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    by_title = {panel["title"]: panel for panel in panels if panel["type"] != "row"}
    for entry in METRICS:
        panel = by_title[entry.name]
        assert entry.help in panel["description"] and entry.worry in panel["description"]
        assert any(entry.full_name in target["expr"] for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"index"}
    assert pages == {alert.page for alert in ALERTS}
    assert len(pages) == len(ALERTS)
    for alert in ALERTS:
        text = (RUNBOOKS / f"{alert.page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {alert.name}\n")
        assert "## What to do\n" in text


def test_the_runbook_of_breakers_names_them_all() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/tidegate/runtime").glob("*.py")
    )
    first, _, _ = (RUNBOOKS / "breaker-open.md").read_text(encoding="utf-8").partition("\n## ")
    assert set(re.findall(r"`(\w+)`", first)) - {"name"} == set(re.findall(r'Calls\(\s*"(\w+)"', sources))


def test_the_rules_are_yaml_with_a_description_and_a_runbook_each() -> None:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert rule["expr"] == alert.promql
        assert rule["annotations"]["runbook_url"].endswith(f"/runbooks/{alert.page}")
        assert declared(f"tidegate_{alert.metric}").worry in rule["annotations"]["description"]
        assert f"tidegate_{alert.metric}" in rule["expr"], "an alert is about its metric"


# With promtool, if it is installed: each alert fires on the series that it is for, and none on a healthy fleet.

PLACE = 'job="t",instance="a"'
HERE = {"job": "t", "instance": "a"}
# By alert: series with their values, one a minute; and the labels of the alert.
FIRES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TidegateAbsent": ({f"tidegate_workers{{{PLACE}}}": "1x120"}, {}),
    "TidegateServerErrors": (
        {f'tidegate_http_requests_total{{{PLACE},operation="limit",status="500"}}': "0+1x120"},
        HERE,
    ),
    "TidegateRlsErrors": (
        {f'tidegate_rls_calls_total{{{PLACE},method="m",status="INTERNAL"}}': "0+1x120"},
        HERE,
    ),
    "TidegateBreakerOpen": (
        {f'tidegate_breaker_state{{{PLACE},name="origin_read"}}': "2x120"},
        {**HERE, "name": "origin_read"},
    ),
    "TidegateOriginErrors": (
        {f'tidegate_origin_errors_total{{{PLACE},op="replay",reason="timeout"}}': "0+1x120"},
        HERE,
    ),
    "TidegateOriginSlow": (
        {
            f'tidegate_origin_latency_seconds_bucket{{{PLACE},op="replay",le="0.05"}}': "0+90x120",
            f'tidegate_origin_latency_seconds_bucket{{{PLACE},op="replay",le="0.1"}}': "0+100x120",
            f'tidegate_origin_latency_seconds_bucket{{{PLACE},op="replay",le="+Inf"}}': "0+100x120",
        },
        HERE,
    ),
    "TidegateOriginLostData": ({f"tidegate_origin_heals_total{{{PLACE}}}": "0+3x120"}, HERE),
    "TidegateReplayLag": ({f"tidegate_replay_lag_seconds{{{PLACE}}}": "2x120"}, HERE),
    "TidegateMemoryFull": (
        {f'tidegate_subjects_evicted_total{{{PLACE},reason="unreplayed"}}': "0+1x120"},
        HERE,
    ),
    "TidegateSubjectsAtBound": (
        {f"tidegate_subjects{{{PLACE}}}": "1999000x120", f"tidegate_workers{{{PLACE}}}": "2x120"},
        HERE,
    ),
    "TidegateDenialsJump": (
        {f'tidegate_decisions_total{{{PLACE},outcome="denied",source="local"}}': "0+60x110 7000+6000x9"},
        {"job": "t"},
    ),
    "TidegateDecisionsWait": (
        {
            f'tidegate_decisions_total{{{PLACE},outcome="allowed",source="local"}}': "0+70x120",
            f'tidegate_decisions_total{{{PLACE},outcome="allowed",source="origin"}}': "0+30x120",
        },
        {"job": "t"},
    ),
    "TidegateRecallsMissing": ({f"tidegate_credit_listening{{{PLACE}}}": "2x90 1x30"}, HERE),
    "TidegateCreditHeld": ({f"tidegate_credit_denied_held_total{{{PLACE}}}": "0+60x120"}, HERE),
    "TidegateOriginFileNearlyFull": ({f"tidegate_origin_file_bytes{{{PLACE}}}": "900000000x120"}, HERE),
    "TidegateRowsUnreadable": ({f"tidegate_global_import_rows_unreadable_total{{{PLACE}}}": "0+1x120"}, HERE),
    "TidegateConnectionsEvicted": ({f"tidegate_http_connections_evicted_total{{{PLACE}}}": "0+1x120"}, HERE),
    "TidegatePublishErrors": ({f"tidegate_global_publish_errors_total{{{PLACE}}}": "0+1x120"}, HERE),
    "TidegateImportErrors": ({f"tidegate_global_import_errors_total{{{PLACE}}}": "0+1x120"}, HERE),
    "TidegateImportsBehind": ({f"tidegate_global_import_rows_last{{{PLACE}}}": "50000x120"}, HERE),
    "TidegateRowsRejected": ({f"tidegate_global_rows_set_aside_total{{{PLACE}}}": "0+1x120"}, HERE),
    "TidegateRegionLag": (
        {
            f'tidegate_global_lag_seconds{{{PLACE},region="iad"}}': "40x120",
            f"tidegate_global_import_rows_total{{{PLACE}}}": "0+10x120",
        },
        {**HERE, "region": "iad"},
    ),
    "TidegateRegionMissing": ({f"tidegate_regions{{{PLACE}}}": "3x60 2x60"}, HERE),
    "TidegateClockOff": ({f"tidegate_clock_offset_seconds{{{PLACE}}}": "-0.4x120"}, HERE),
    "TidegateLoopStalls": (
        {
            f"tidegate_loop_stall_seconds_count{{{PLACE}}}": "0+100x120",
            f'tidegate_loop_stall_seconds_bucket{{{PLACE},le="0.005"}}': "0+90x120",
        },
        HERE,
    ),
    "TidegateKeyGuessing": (
        {f'tidegate_http_requests_total{{{PLACE},operation="limit",status="401"}}': "0+1200x120"},
        HERE,
    ),
    "TidegateConnectionsNearlyFull": (
        {f"tidegate_http_connections{{{PLACE}}}": "9000x120", f"tidegate_workers{{{PLACE}}}": "1x120"},
        HERE,
    ),
    "TidegateRulesFaulty": ({f"tidegate_rls_rules_faulty{{{PLACE}}}": "1x120"}, HERE),
    "TidegateRlsConnectionsEnded": (
        {f'tidegate_rls_connections_ended_total{{{PLACE},reason="evicted"}}': "0+1x120"},
        HERE,
    ),
    "TidegateWorkersMissing": ({f"tidegate_workers{{{PLACE}}}": "4x90 3x30"}, HERE),
    "TidegateDecisionLogDropped": (
        {f'tidegate_decision_log_records_total{{{PLACE},outcome="dropped"}}': "0+1x120"},
        HERE,
    ),
    "TidegateMixedVersions": (
        {
            f'tidegate_build_info{{{PLACE},version="1",python="3.13",compiled="true"}}': "1x120",
            'tidegate_build_info{job="t",instance="b",version="2",python="3.13",compiled="true"}': "1x120",
        },
        {"job": "t"},
    ),
    "TidegateInterpreted": (
        {f'tidegate_build_info{{{PLACE},version="1",python="3.13",compiled="false"}}': "1x120"},
        {**HERE, "version": "1", "python": "3.13", "compiled": "false"},
    ),
}


def promtool() -> str:
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if program is None:
        pytest.skip("not checked on promtool, the alert rules: not installed (package prometheus)")
    return program


def healthy_series() -> dict[str, str]:
    """Every metric of a fleet without a problem."""
    steady = {
        "workers": "2x120",
        "regions": "3x120",
        "subjects": "5000x120",
        "http_connections": "100x120",
        "global_import_rows_last": "40x120",
        "global_lag_seconds": "3x120",
        "build_info": "1x120",
    }
    known = {"region": "iad", "name": "origin_read", "version": "1", "python": "3.13", "compiled": "true"}
    series: dict[str, str] = {}
    for entry in METRICS:
        for values in entry.known_series() or [tuple(known.get(label, "200") for label in entry.labels)]:
            labels = "".join(f',{label}="{value}"' for label, value in zip(entry.labels, values, strict=True))
            name, place = entry.full_name, f"{PLACE}{labels}"
            if entry.kind == "histogram":
                for bound in (*(f"{bound:g}" for bound in entry.bounds), "+Inf"):
                    series[f'{name}_bucket{{{place},le="{bound}"}}'] = "0+100x120"
                series[f"{name}_count{{{place}}}"] = "0+100x120"
            elif entry.kind == "gauge":
                series[f"{name}{{{place}}}"] = steady.get(entry.name, "0x120")
            else:
                is_fault = re.search("error|heals|aside|ended|evicted|unreadable|held", entry.name) or set(
                    values
                ) & {
                    "blocked",
                    "unreplayed",
                    "dropped",
                    "origin",
                }
                series[f"{name}{{{place}}}"] = "0x120" if is_fault else "0+60x120"
    return series


def run_rule_tests(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def rule_test(alert: Alert, series: dict[str, str], labels: dict[str, str] | None) -> dict[str, Any]:
    """`labels` are those of the expected alert; None if no alert may fire."""
    entry = declared(f"tidegate_{alert.metric}")
    expected = {
        "exp_labels": {**(labels or {}), "severity": alert.severity},
        "exp_annotations": {
            "summary": alert.summary,
            "description": f"{entry.help} When to worry: {entry.worry}",
            "runbook_url": alert.url,
        },
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": "118m",
                "alertname": alert.name,
                "exp_alerts": [] if labels is None else [expected],
            }
        ],
    }


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [promtool(), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = [
        {
            "record": f"query{number}",
            "expr": re.sub(r"\$(?:job|instance)", ".+", query.replace("$__rate_interval", "5m")),
        }
        for number, query in enumerate(queries)
    ]
    assert len(rules) > len(METRICS) and not any("$" in rule["expr"] for rule in rules)
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [promtool(), "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_on_its_problem(tmp_path: Path) -> None:
    assert set(FIRES) == {alert.name for alert in ALERTS}
    run_rule_tests(tmp_path, [rule_test(alert, *FIRES[alert.name]) for alert in ALERTS])


def test_no_alert_fires_on_a_healthy_fleet(tmp_path: Path) -> None:
    tests = [rule_test(alert, healthy_series(), None) for alert in ALERTS]
    # One set of series for all of them.
    tests[0]["alert_rule_test"] = [each for test in tests for each in test["alert_rule_test"]]
    run_rule_tests(tmp_path, tests[:1])
