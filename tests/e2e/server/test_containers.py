"""The container file, the compose file and the chart. Tests that need a missing program are skipped, and name it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.server.harness import TidegateServer
from tidegate.cli.root import root
from tidegate.server.process.config import SETTINGS
from tidegate.testing.servers.redis import create_certificate

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tidegate"
VARIABLES = {setting.env for setting in SETTINGS}
IMAGE_USER = "65532"


def program(name: str) -> str:
    """A tool that checks files, if it is installed; an environment variable can name one elsewhere."""
    found = os.environ.get(name.upper()) or shutil.which(name)
    if found is None:
        pytest.skip(f"not checked on {name}, files for deployment: not installed")
    return found


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file: continued lines are joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))


def is_known(variable: str) -> bool:
    return variable in VARIABLES or variable.removesuffix("_FILE") in VARIABLES


def parses(words: list[str]) -> bool:
    """Whether the command line knows this command and its options; nothing is run."""
    names = [word for word in words if word.isalpha()]
    shown = CliRunner().invoke(root, [*names, "--help"])
    return shown.exit_code == 0 and all(word in shown.output for word in words if word.startswith("--"))


def test_the_image_runs_without_rights_and_with_variables_that_exist() -> None:
    steps = instructions()
    last_from = max(number for number, (name, _) in enumerate(steps) if name == "FROM")
    final = steps[last_from:]
    users = [rest for name, rest in final if name == "USER"]
    assert users == [f"{IMAGE_USER}:{IMAGE_USER}"], "a number, so that Kubernetes can see that it is not root"
    set_there = dict(pair.split("=", 1) for name, rest in final if name == "ENV" for pair in rest.split())
    ours = {name for name in set_there if name.startswith("TIDEGATE_")}
    assert ours and ours <= VARIABLES
    (volume,) = [rest for name, rest in final if name == "VOLUME"]
    assert set_there["TIDEGATE_DATA_DIR"] == volume, "the only place that it writes to"
    assert {"HEALTHCHECK", "ENTRYPOINT", "CMD"} <= {name for name, _ in final}
    assert not any(name == "RUN" for name, _ in final), "nothing is installed in the last stage"


def test_what_the_image_copies_is_in_the_build_context() -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


def test_hadolint_finds_no_fault() -> None:
    run(program("hadolint"), str(DEPLOY / "Containerfile"))


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_health_check_follows_the_server(tmp_path: Path, tls: bool) -> None:
    arguments: list[str] = []
    if tls:
        create_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
        arguments = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with TidegateServer(*arguments) as server:
        environment = {"TIDEGATE_LISTEN": f"0.0.0.0:{server.port}"}
        if tls:
            environment["TIDEGATE_TLS_CERT"] = arguments[1]
        check = [sys.executable, "-I", str(DEPLOY / "container-health.py")]
        assert subprocess.run(check, env=environment, timeout=60, check=False).returncode == 0
        server.stop()
        done = subprocess.run(check, env=environment, timeout=60, check=False, capture_output=True, text=True)
        assert done.returncode == 1 and "does not answer" in done.stderr


def test_every_server_of_the_compose_file_is_read_only_and_has_settings_that_exist() -> None:
    services = compose()["services"]
    ours = {name: service for name, service in services.items() if service["image"] == "tidegate"}
    assert set(ours) == {"migrate", "tidegate-fra", "tidegate-iad", "cleanup"}
    for name, service in ours.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(map(is_known, service["environment"])), name
        assert parses(service.get("command", ["serve"])), name
    for region in ("fra", "iad"):
        environment = ours[f"tidegate-{region}"]["environment"]
        assert environment["TIDEGATE_REGION"] == region
        assert f"redis-{region}:" in environment["TIDEGATE_ORIGIN"]
        assert region in services[f"redis-{region}"]["networks"]


def test_the_compose_file_publishes_ports_on_this_machine_only_and_mounts_files_that_exist() -> None:
    document = compose()
    for name, service in document["services"].items():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert set(service.get("networks", ())) <= set(document["networks"]), name
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            is_there = (
                (DEPLOY / "compose" / source).exists()
                if source.startswith(".")
                else source in document["volumes"]
            )
            assert is_there, f"{name}: {mount}"
        assert ":" in service["image"] or service["image"] == "tidegate", f"{name}: which version?"
    given = {name for service in document["services"].values() for name in service.get("secrets", ())}
    assert given == set(document["secrets"]) == {"metrics_token"}
    kept = set((DEPLOY / "compose" / ".gitignore").read_text().split())
    assert kept == {".env", *(secret["file"] for secret in document["secrets"].values())}, (
        "no secret is committed"
    )
    wanted = set(re.findall(r"\$\{([A-Z_]+)", (DEPLOY / "compose" / "compose.yaml").read_text()))
    offered = set(re.findall(r"^([A-Z_]+)=$", (DEPLOY / "compose" / "env.example").read_text(), re.MULTILINE))
    assert wanted == offered


def test_prometheus_scrapes_the_servers_of_the_compose_file() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target.split(":")[0]
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {name for name in compose()["services"] if name.startswith("tidegate-")}
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    # The file with the token exists in the container only.
    run(
        program("promtool"), "check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml")
    )


def test_every_value_of_the_chart_is_used_and_every_used_value_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    templates = "\n".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    used = {match.removeprefix(".Values.") for match in re.findall(r"\.Values(?:\.[A-Za-z]+)+", templates)}

    def paths(tree: Any, prefix: str) -> set[str]:
        found = set()
        for name, value in tree.items():
            path = f"{prefix}{name}"
            is_section = isinstance(value, dict) and value and not any(path == each for each in used)
            found |= paths(value, f"{path}.") if is_section else {path}
        return found

    assert paths(values, "") == used
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]) <= set(values)


EVERYTHING = "monitoring.serviceMonitor=true,monitoring.prometheusRule=true,monitoring.grafanaDashboard=true"
SETTINGS_OF_CHART = "env.TIDEGATE_WORKERS=2,metricsTokenSecret=f,nodeSelector.c=d,imagePullSecrets[0].name=e"


def rendered(*values: str) -> list[Any]:
    arguments = [
        part
        for value in ("region=fra", *values)
        for part in ("--set-string" if "env." in value else "--set", value)
    ]
    text = run(program("helm"), "template", "edge", str(CHART), *arguments)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("values", [(), (EVERYTHING, SETTINGS_OF_CHART)], ids=["defaults", "everything"])
def test_helm_renders_pods_without_rights_with_settings_that_exist(values: tuple[str, ...]) -> None:
    run(program("helm"), "lint", "--strict", "--set", "region=fra", str(CHART))
    documents = rendered(*values)
    kinds = {document["kind"] for document in documents}
    assert {"Deployment", "Job", "Service", "ServiceAccount", "PodDisruptionBudget"} <= kinds
    assert bool(values) == ({"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= kinds)
    pods = [
        document["spec"]["template"]["spec"]
        for document in documents
        if document["kind"] in {"Deployment", "Job"}
    ]
    assert len(pods) == 3
    for pod in pods:
        assert (
            pod["securityContext"]["runAsNonRoot"] and str(pod["securityContext"]["runAsUser"]) == IMAGE_USER
        )
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert all(is_known(variable["name"]) for variable in container["env"])
            assert parses(container["args"])
    server = next(pod for pod in pods if pod["containers"][0]["name"] == "tidegate")
    assert server["terminationGracePeriodSeconds"] >= 10 + 3 + 5


def test_helm_refuses_a_release_without_a_region() -> None:
    done = subprocess.run(
        [program("helm"), "template", "edge", str(CHART)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0 and "region" in done.stderr


def test_the_commands_of_the_deployment_page_exist() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in page.splitlines() if " tidegate " in f" {line}" and "exec" in line]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert parses(words[len(words) - words[::-1].index("tidegate") :]), line
    for path in re.findall(r"\]\((\.\./\.\./deploy/[^)]+)\)", page):
        assert (ROOT / "docs" / "how-to" / path).exists(), path
