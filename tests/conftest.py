"""What all tests share: the fixtures with real servers, the hypothesis profiles, and a check of what is under test.

CI=true makes property tests repeatable: the same examples in every run, so that a red build can be run again. At a
desk they search further each time. Deadlines are off everywhere, because a busy machine is not a bug.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

import tidegate

# A checkout of the library alone has no servers to offer. Looked for, not imported: pytest rewrites it on import.
pytest_plugins = ["tidegate.testing.fixtures"] if find_spec("tidegate.testing.fixtures") else []

settings.register_profile(
    "desk", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "desk")


def pytest_configure(config: pytest.Config) -> None:
    expected = os.environ.get("TIDEGATE_EXPECT_COMPILED")
    if expected is not None and tidegate.compiled != (expected == "1"):
        found = "compiled" if tidegate.compiled else "interpreted"
        raise pytest.UsageError(
            f"TIDEGATE_EXPECT_COMPILED={expected}, but the tidegate under test is {found}: {tidegate.__file__}"
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"tidegate: {'compiled' if tidegate.compiled else 'interpreted'}, {tidegate.__file__}"
