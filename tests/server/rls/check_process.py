"""A stand-in for the HTTP server in front of the check's logic: run as a program by the tests of gateways.

`GET /v1/check?…` is answered by `tidegate.server.rls.check`, everything else with 200, as an application would.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path

from tidegate import AsyncLimiter
from tidegate.server.rls.check import (
    BadCheck,
    CheckAnswer,
    CheckConfig,
    CheckRequest,
    answer_check,
    ask_check,
    bad_check,
    parse_check_config,
)
from tidegate.server.rls.rules_file import load_rules
from tidegate.server.rls.service import Outcome, RateLimitService


async def check(request: CheckRequest, config: CheckConfig, service: RateLimitService) -> CheckAnswer:
    try:
        question = ask_check(request, config)
    except BadCheck as error:
        return bad_check(error)
    outcome = service.decide(service.plan(question.domain, question.descriptors, question.cost))
    return answer_check(question, outcome if isinstance(outcome, Outcome) else await outcome)


async def serve(port: int, rules: Path, config_file: Path) -> None:
    config = parse_check_config(tomllib.loads(config_file.read_text())["check"])  # noqa: ASYNC240 - before the start
    service = RateLimitService(AsyncLimiter(), load_rules(rules))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                }
                path, _, query = first.split(" ")[1].partition("?")
                answer = CheckAnswer(200, {}, b"hello")
                if path == "/v1/check":
                    peer = writer.get_extra_info("peername")[0]
                    answer = await check(CheckRequest(query, headers, peer), config, service)
                fields = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
                length = f"Content-Length: {len(answer.body)}\r\n\r\n"
                writer.write(f"HTTP/1.1 {answer.status} X\r\n{fields}{length}".encode() + answer.body)
                if first.endswith("1.0") or headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
