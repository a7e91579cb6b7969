"""The interactive page computes what the limiter computes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from tidegate.core import windows

SCRIPT = Path(__file__).parent.parent / "docs" / "assets" / "sliding-window.js"
PROGRAM = """
const page = require(process.argv[1]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(([previous, current, elapsed, duration, cost, quota]) => {
  const counts = new Map([[6, previous], [7, current]]);
  const now = 7 * duration + elapsed;
  return [page.effective(counts, duration, now, cost).total, page.retryAfterMs(counts, duration, now, cost, quota)];
})));
"""


def test_the_script_of_the_page_agrees_with_the_core() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("not checked on Node, the script of the sliding window page: not installed")
    random = Random(1)
    cases = []
    for _ in range(2_000):
        duration = random.choice([1_000, 60_000, 3_600_000])
        quota = random.randrange(1, 200)
        cases.append(
            [
                random.randrange(quota + 1),
                random.randrange(quota + 1),
                random.randrange(duration),
                duration,
                random.randrange(1, quota + 5),
                quota,
            ]
        )
    done = subprocess.run(
        [node, "-e", PROGRAM, str(SCRIPT)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        previous, current, elapsed, duration, cost, quota = case
        total = windows.effective(current, previous, elapsed, duration) + cost
        wait = windows.wait_ms(current, previous, quota - cost, elapsed, duration) if cost <= quota else None
        assert found == [total, wait], case
