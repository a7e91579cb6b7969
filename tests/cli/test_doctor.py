from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import PROGRAM, Invoke, InvokeJSON, Program
from tests.disks import fill
from tidegate.adapters.redis.origin import RedisMemory
from tidegate.adapters.urls import open_origin
from tidegate.testing.servers import RedisServer

SECRET = "S3cretHunter2"


def findings(document: Any) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in document["checks"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def statuses(document: Any) -> dict[str, list[str]]:
    return {check: [finding["status"] for finding in found] for check, found in findings(document).items()}


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def test_an_embedded_server_that_never_ran_has_no_failed_check(
    invoke_json: InvokeJSON, tmp_path: Path
) -> None:
    document = invoke_json("doctor", "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0")
    assert document["ok"] is True
    found = statuses(document)
    for check in ("config", "data dir", "origin", "ledger", "listen", "region", "clock"):
        assert found[check] == ["ok"], check
    assert "core" in found
    assert not (tmp_path / "data").exists()


def test_the_doctor_checks_the_files_of_an_embedded_server(
    invoke: Invoke, invoke_json: InvokeJSON, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    invoke("keys", "create", "--data-dir", data)
    document = invoke_json("doctor", "--data-dir", data)
    assert statuses(document)["schema"] == ["ok"]
    assert statuses(document)["permissions"] == ["ok"]
    data.chmod(0o755)
    opened = findings(invoke_json("doctor", "--data-dir", data))["permissions"][0]
    assert opened["status"] == "warn"
    assert opened["next_step"] == f"chmod 700 {data}"


def test_a_data_dir_that_is_a_file_fails(invoke_json: InvokeJSON, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    document = invoke_json("doctor", "--data-dir", tmp_path / "file", exit_code=2)
    assert document["ok"] is False
    assert statuses(document)["data dir"] == ["fail"]


def test_a_full_disk_is_a_failure(invoke_json: InvokeJSON, small_disk: Path) -> None:
    arguments = ("doctor", "--data-dir", str(small_disk))
    assert statuses(invoke_json(*arguments))["data dir"] == ["warn"]  # it is small
    fill(small_disk)
    document = invoke_json(*arguments, exit_code=2)
    (finding,) = findings(document)["data dir"]
    assert finding["status"] == "fail"
    assert finding["detail"] == f"the disk of {small_disk} is full"


def test_faults_of_the_configuration_are_findings(invoke: Invoke, invoke_json: InvokeJSON) -> None:
    document = invoke_json("doctor", "--workers", "many", "--ledger", f"mysql://u:{SECRET}@h/db", exit_code=2)
    assert statuses(document) == {"config": ["fail", "fail"]}
    assert all(finding["next_step"] for finding in document["checks"])
    assert "'many'" in document["checks"][0]["detail"]
    assert "expected a whole number from 1 to 256" in document["checks"][0]["detail"]
    assert SECRET not in invoke("doctor", "--ledger", f"mysql://u:{SECRET}@h/db").output


def test_dependencies_that_are_down_fail_and_hide_their_passwords(
    invoke: Invoke, invoke_json: InvokeJSON
) -> None:
    arguments = (
        "doctor",
        "--region",
        "fra",
        "--origin",
        f"redis://:{SECRET}@127.0.0.1:1",
        "--ledger",
        f"mysql://u:{SECRET}@127.0.0.1:1/db",
    )
    document = invoke_json(*arguments, exit_code=2)
    found = findings(document)
    assert [finding["status"] for finding in found["origin"] + found["ledger"]] == ["fail", "fail"]
    assert "from their own memory" in found["origin"][0]["next_step"]
    assert found["ledger"][0]["detail"].count("mysql://") == 1, "the URL appears once"
    text = invoke(*arguments).output
    assert SECRET not in text
    assert "-> start it" in text


def test_a_taken_port_is_a_warning(invoke_json: InvokeJSON) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        document = invoke_json("doctor", "--listen", f"127.0.0.1:{other.getsockname()[1]}")
    assert statuses(document)["listen"] == ["warn"]


def test_too_few_open_files_are_a_warning(invoke_json: InvokeJSON) -> None:
    document = invoke_json("doctor", "--http-connections-max", "1000000")
    assert statuses(document)["descriptors"] == ["warn"]
    assert "ulimit -n" in findings(document)["descriptors"][0]["next_step"]


def test_a_low_soft_limit_of_open_files_is_not_a_warning_because_a_server_raises_it() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [*PROGRAM, "doctor", "--json", "--http-connections-max", "300"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -Sn 256 && exec "$0" "$@"', *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert findings(json.loads(done.stdout))["descriptors"][0]["detail"] == f"{hard} open files allowed"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", "/CN=localhost", "-days", "1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_files_must_match_and_the_key_must_not_be_readable_by_all(
    invoke_json: InvokeJSON, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    key.chmod(0o600)
    assert statuses(invoke_json("doctor", "--tls-cert", cert, "--tls-key", key))["tls"] == ["ok"]
    key.chmod(0o644)
    assert statuses(invoke_json("doctor", "--tls-cert", cert, "--tls-key", key))["tls"] == ["ok", "warn"]
    assert statuses(invoke_json("doctor", "--tls-cert", key, "--tls-key", cert, exit_code=2))["tls"] == [
        "fail"
    ]
    missing = invoke_json("doctor", "--tls-cert", tmp_path / "none", "--tls-key", key, exit_code=2)
    assert statuses(missing)["tls"] == ["fail"]


@pytest.mark.parametrize("command", ["config check", "serve"])
def test_tls_files_that_cannot_be_used_are_faults_that_name_field_value_and_next_step(
    invoke: Invoke, certificate: tuple[Path, Path], tmp_path: Path, command: str
) -> None:
    cert, key = certificate
    missing = tmp_path / "none.pem"
    start: list[str | Path] = [*command.split(), "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0"]
    for field, arguments in (
        ("tls.cert", ("--tls-cert", missing, "--tls-key", key)),
        ("tls.key", ("--tls-cert", cert, "--tls-key", missing)),
        ("tls.cert", ("--tls-cert", key, "--tls-key", key)),
    ):
        result = invoke(*start, *arguments)
        assert result.exit_code == 2
        assert (
            f"{field}: got '{dict(zip(('tls.cert', 'tls.key'), arguments[1::2], strict=True))[field]}'"
            in (result.output)
        )
        assert "Next: " in result.output
    assert not (tmp_path / "data").exists()


def test_an_encrypted_tls_key_is_a_fault_and_does_not_prompt_for_a_password(
    invoke: Invoke, invoke_json: InvokeJSON, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    assert "without a password" in invoke("config", "check", "--tls-cert", cert, "--tls-key", locked).output
    document = invoke_json("doctor", "--tls-cert", cert, "--tls-key", locked, exit_code=2)
    assert statuses(document)["tls"] == ["fail"]


def test_a_missing_driver_is_named_with_its_extra(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['hiredis'] = None; from tidegate.cli import main\n"
        "sys.argv = ['tidegate', 'doctor', '--region', 'fra', '--origin', 'redis://127.0.0.1:1']; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'tidegate[redis]'" in done.stdout


@pytest.mark.parametrize(("origin", "url_of"), [("redis", "mariadb_url"), ("valkey", "mysql_url")])
@pytest.mark.server
def test_a_fleet_without_faults_passes_all_checks(
    request: pytest.FixtureRequest, invoke: Invoke, invoke_json: InvokeJSON, origin: str, url_of: str
) -> None:
    redis: RedisServer = request.getfixturevalue(f"fresh_{origin}")
    ledger: str = request.getfixturevalue(url_of)
    arguments = ("doctor", "--region", "fra", "--origin", redis.url, "--ledger", ledger)
    without_schema = invoke_json(*arguments, exit_code=2)
    assert "tidegate migrate" in findings(without_schema)["schema"][0]["next_step"]
    invoke("migrate", "--ledger", ledger)
    found = statuses(invoke_json(*arguments))
    assert found["origin"] == ["ok"]
    assert found["region"] == ["ok"]
    assert found["schema"] == ["ok"]
    assert found["regions"] == ["ok"]
    # One clock of the origin, one of the ledger, both on this machine.
    assert found["clock"] == ["ok", "ok"]


@pytest.fixture
def set_redis(fresh_redis: RedisServer) -> Iterator[Callable[[str, str | int], None]]:
    """Changes the configuration of the server, which other tests use after this one."""

    def set_one(name: str, value: str | int) -> None:
        fresh_redis.command("CONFIG", "SET", name, value)

    yield set_one
    fresh_redis.command("CONFIG", "SET", "maxmemory", 0)
    fresh_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_redis_that_deletes_counts_when_its_memory_is_full_is_a_warning(
    invoke_json: InvokeJSON, fresh_redis: RedisServer, set_redis: Callable[[str, str | int], None]
) -> None:
    arguments = ("doctor", "--region", "fra", "--origin", fresh_redis.url)
    assert statuses(invoke_json(*arguments))["memory"] == ["ok"]
    set_redis("maxmemory-policy", "allkeys-lru")
    (finding,) = findings(invoke_json(*arguments))["memory"]
    assert finding["status"] == "warn"
    assert "allkeys-lru" in finding["detail"]
    assert "noeviction" in finding["next_step"]


@pytest.mark.parametrize("region", [("--region", "fra"), ()])
def test_a_redis_that_is_full_and_deletes_nothing_is_a_failure(
    invoke_json: InvokeJSON,
    fresh_redis: RedisServer,
    set_redis: Callable[[str, str | int], None],
    region: tuple[str, ...],
) -> None:
    arguments = ("doctor", *region, "--origin", fresh_redis.url)
    assert statuses(invoke_json(*arguments))["memory"] == ["ok"]
    set_redis("maxmemory", 1)
    document = invoke_json(*arguments, exit_code=2)
    (finding,) = findings(document)["memory"]
    assert finding["status"] == "fail"
    assert "takes no counts" in finding["detail"]
    assert "raise maxmemory" in finding["next_step"]
    assert statuses(document)["origin"] == ["ok"]
    set_redis("maxmemory", 0)
    fresh_redis.command("SET", "something else", "x" * 20_000_000)
    used = int(fresh_redis.info("memory")["used_memory"])
    set_redis("maxmemory", used + used // 20)
    (finding,) = findings(invoke_json(*arguments))["memory"]
    assert finding["status"] == "warn"
    assert "almost full" in finding["detail"]


def test_an_origin_of_another_region_fails(invoke_json: InvokeJSON, fresh_redis: RedisServer) -> None:
    invoke_json("doctor", "--region", "fra", "--origin", fresh_redis.url)
    document = invoke_json("doctor", "--region", "iad", "--origin", fresh_redis.url, exit_code=2)
    assert statuses(document)["region"] == ["fail"]
    assert "fra" in findings(document)["region"][0]["detail"]


def test_without_a_region_the_doctor_does_not_claim_the_origin(
    invoke_json: InvokeJSON, fresh_redis: RedisServer
) -> None:
    document = invoke_json("doctor", "--origin", fresh_redis.url)
    assert statuses(document)["origin"] == ["ok"]
    assert statuses(document)["region"] == ["warn"], "a server would call itself default here"
    assert "'default'" in findings(document)["region"][0]["detail"]
    # If that had claimed it, this would be a mismatch.
    assert statuses(invoke_json("doctor", "--region", "fra", "--origin", fresh_redis.url))["region"] == ["ok"]


@pytest.mark.parametrize(
    ("offset_ms", "status"), [(0, "ok"), (100, "ok"), (-101, "warn"), (3_600_000, "warn")]
)
def test_a_clock_that_is_off_by_more_than_100_ms_is_a_warning_that_names_ntp(
    invoke_json: InvokeJSON, monkeypatch: pytest.MonkeyPatch, offset_ms: int, status: str
) -> None:
    async def off(_url: str, _region: str | None) -> tuple[float, list[RedisMemory]]:
        return offset_ms, [RedisMemory(1, 0, "noeviction")]

    # A test cannot set the clock of the machine: the measured offset is a parameter.
    monkeypatch.setattr("tidegate.cli.doctor._query_origin", off)
    found = findings(invoke_json("doctor", "--region", "fra", "--origin", "redis://127.0.0.1:1"))["clock"][0]
    assert found["status"] == status
    assert ("NTP" in found["next_step"]) == (status == "warn")


def test_a_data_dir_of_another_region_is_a_failure_that_names_the_file_to_remove(
    invoke_json: InvokeJSON, tidegate: Program, tmp_path: Path
) -> None:
    """From embedded to a node of a fleet: the counts in the directory belong to the region without a name."""
    data = tmp_path / "data"
    data.mkdir()
    asyncio.run(_claim(data / "origin.db", "default"))
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    invoke_json("migrate", "--ledger", ledger)
    arguments = ("--data-dir", data, "--region", "fra", "--ledger", ledger, "--listen", "127.0.0.1:0")
    document = invoke_json("doctor", *arguments, exit_code=2)
    assert f"remove {data}/origin.db*" in findings(document)["region"][0]["next_step"]
    refused = tidegate("serve", *arguments)
    assert refused.returncode == 2
    assert f"remove {data}/origin.db*" in refused.stderr
    for file in data.glob("origin.db*"):
        file.unlink()
    assert statuses(invoke_json("doctor", *arguments))["origin"] == ["ok"]


async def _claim(file: Path, region: str) -> None:
    origin = open_origin(f"sqlite:///{file}")
    await origin.open(region, timeout_s=10)
    await origin.close()
