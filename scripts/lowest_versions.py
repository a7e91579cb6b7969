#!/usr/bin/env python3
"""Runs the tests of the integrations with the lowest versions of all frameworks that pyproject.toml promises.

    python scripts/lowest_versions.py [PYTEST_ARGUMENT]...

They are installed into a separate environment in a temporary folder. Warnings are not errors there: an old framework
with new libraries causes some of its own.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from environment import ROOT

FRAMEWORKS = ("starlette", "fastapi", "flask", "django", "litestar", "aiohttp", "grpc", "httpx", "requests")
# What the tests need beside the frameworks; newest versions.
TOOLS = ("asgiref", "flask-login", "gunicorn", "hiredis", "hypothesis", "pytest", "pytest-asyncio", "pytest-xdist",
         "quart", "sanic", "uvicorn", "websockets")  # fmt: skip


def lowest(project: dict[str, dict[str, dict[str, list[str]]]]) -> list[str]:
    """`name==version` for the lower bound of each framework."""
    extras = project["project"]["optional-dependencies"]
    found = [re.sub(r">=([\d.]+).*", r"==\1", extras[name][0]) for name in FRAMEWORKS]
    return [one.replace("flask==", "flask[async]==") for one in found]


def main() -> int:
    wanted = lowest(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    print("lowest versions:", ", ".join(wanted), flush=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-lowest-") as name:
        python = str(Path(name) / "venv" / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(Path(name) / "venv")], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted, *TOOLS],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        tests = ["-q", "-W", "ignore", "-o", "filterwarnings=ignore", "tests/integrations", *sys.argv[1:]]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            [python, "-m", "pytest", *tests], cwd=ROOT, env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
