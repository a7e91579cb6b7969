from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

from tests.server.harness import TIMEOUT_S, TidegateServer, eventually


def lines(server: TidegateServer) -> list[dict[str, Any]]:
    written = server.log.rpartition("\n")[0]
    return [json.loads(line) for line in written.splitlines()]


def of_requests(server: TidegateServer) -> dict[str, str]:
    """Messages by request id."""
    return {line["request_id"]: line["message"] for line in lines(server) if "request_id" in line}


def test_at_debug_every_answer_is_in_the_log_by_its_id_and_no_secret_is(tmp_path: Path) -> None:
    arguments = ("--log-level", "debug", "--log-format", "json")
    with TidegateServer(*arguments, data_dir=tmp_path / "data") as server:
        workspace = server.workspace()
        replies = {
            "limit 200": [workspace.limit(identifier="somebody@example.com") for _ in range(3)],
            "limit 400": [server.call("limit", b"{", workspace.key.secret)],
            "limit 401": [server.call("limit", {**BODY, "namespace": "x"}, "tg_" + "s" * 32)],
            "multiLimit 200": [workspace.call("multiLimit", [BODY])],
            "getOverride 404": [workspace.call("getOverride", {"namespace": "api", "identifier": "x"})],
            "liveness 200": [server.get("/v2/liveness")],
            "unknown 404": [server.get("/nothing")],
        }
        with server.socket() as raw:
            raw.sendall(b"GET /livez HTTP/1.1\r\nbroken\r\n\r\n")
            raw.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: raw.recv(65_536), b""))
        refused = json.loads(answer.partition(b"\r\n\r\n")[2])["meta"]["requestId"]
        eventually(lambda: refused in of_requests(server), "the last one is written")
        found = of_requests(server)
        for message, answers in replies.items():
            for reply in answers:
                assert found[reply.json["meta"]["requestId"]] == message
        assert found[refused].startswith("refused 400")
        assert all(line["took_ms"] >= 0 for line in lines(server) if line["logger"].endswith("request_log"))
        for secret in (workspace.key.secret, "s" * 32, "somebody@example.com"):
            assert secret not in server.log


BODY = {"namespace": "api", "identifier": "user", "limit": 10, "duration": 60_000}


def test_requests_are_logged_from_when_sighup_says_debug_until_it_says_info(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('[log]\nformat = "json"\n')
    with TidegateServer("--config", str(file), data_dir=tmp_path / "data") as server:
        workspace = server.workspace()

        def is_logged() -> bool:
            request_id = workspace.limit().json["meta"]["requestId"]
            marker = len(lines(server))
            server.signal(signal.SIGHUP)
            eventually(lambda: len(lines(server)) > marker, "a line that came later is there")
            return request_id in of_requests(server)

        assert not is_logged()
        file.write_text('[log]\nformat = "json"\nlevel = "debug"\n')
        eventually(is_logged, "debug shows requests", TIMEOUT_S)
        file.write_text('[log]\nformat = "json"\nlevel = "info"\n')
        eventually(lambda: not is_logged(), "info does not", TIMEOUT_S)


def test_a_server_says_in_its_log_where_it_listens(tmp_path: Path) -> None:
    with TidegateServer("--json", data_dir=tmp_path / "data") as server:
        eventually(lambda: bool(lines(server)), "the first line")
        assert lines(server)[0]["message"] == f"listening on {server.host}:{server.port}"
