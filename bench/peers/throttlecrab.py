"""throttlecrab-server, a rate limiter over HTTP in Rust: the installed one, or built from its registry with cargo."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Final

__all__ = ["PATH", "body", "command", "find", "free_port"]

NAME: Final = "throttlecrab-server"
VERSION: Final = "0.4.40"
PATH: Final = "/throttle"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate-bench" / NAME
QUOTA: Final = 1_000_000_000


def find() -> Path | str:
    """The program, which is built first if needed; or why there is none."""
    installed = shutil.which(NAME) or shutil.which(NAME, path=CACHE / "bin")
    if installed is not None:
        return Path(installed)
    for tool, package in (("cargo", "cargo"), ("protoc", "protobuf-compiler")):
        if shutil.which(tool) is None:
            return f"no {NAME}, and no {tool} to build it with: apt-get install {package}"
    print(f"building {NAME} {VERSION} in {CACHE}: some minutes, once", flush=True)
    cargo = ["cargo", "install", NAME, "--version", VERSION, "--locked", "--root", str(CACHE)]
    built = subprocess.run(cargo, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        return f"{NAME} could not be built: {built.stderr[-300:]}"
    return CACHE / "bin" / NAME


def command(binary: Path, port: int) -> list[str]:
    """It runs as many threads as it has cores: one, as it is started here."""
    return [str(binary), "--http", "--http-host", "127.0.0.1", "--http-port", str(port)]


def free_port() -> int:
    """It does not print its port, so a free one is chosen here."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def body(identifier: str) -> str:
    """One check that is always allowed."""
    fields = {
        "key": identifier,
        "max_burst": QUOTA,
        "count_per_period": QUOTA,
        "period": 3_600,
        "quantity": 1,
    }
    return json.dumps(fields, separators=(",", ":"))
