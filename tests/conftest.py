"""Shared by all tests: the fixtures with real servers, the hypothesis profiles, and a check of the build under test.

With CI=true, property tests use the same examples in every run, so that a failed build can be repeated. Otherwise each
run tries new ones. Deadlines are off everywhere, because a busy machine is not a bug.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

import tidegate

if TYPE_CHECKING:
    from tests.running_server import RunningServer

# A copy without the test tools has no server fixtures. `find_spec`, not an import: pytest must import the plugin itself
# to rewrite its assertions.
pytest_plugins = ["tests.disks"]
if find_spec("tidegate.testing.fixtures"):
    pytest_plugins.append("tidegate.testing.fixtures")

settings.register_profile(
    "local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "local")


def pytest_configure(config: pytest.Config) -> None:
    expected = os.environ.get("TIDEGATE_EXPECT_COMPILED")
    if expected is not None and tidegate.compiled != (expected == "1"):
        found = "compiled" if tidegate.compiled else "interpreted"
        raise pytest.UsageError(
            f"TIDEGATE_EXPECT_COMPILED={expected}, but the tidegate under test is {found}: {tidegate.__file__}"
        )


# No test takes longer than this. One of a minute took more than five beside another run of all tests. One that does
# is hanging: its process prints the traceback of every thread and exits, which ends the run. Measuring coverage takes
# several times as long.
HANGS_AFTER_S = 1_500 if "coverage" in sys.modules else 600


def watch_for_a_hang(config: pytest.Config) -> None:
    stderr = config.stash[fault_handler_stderr_fd_key]  # captured output would be lost with the process
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True, file=stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    watch_for_a_hang(item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    # pytest cancels the timer when a test fails, but the teardown of a failed test may hang.
    watch_for_a_hang(node.config)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Printed at once, because a run that is stopped prints no summary. Workers only report to the main process.
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)  # noqa: T201 - the output of a test run


def pytest_report_header(config: pytest.Config) -> str:
    return f"tidegate: {'compiled' if tidegate.compiled else 'interpreted'}, {tidegate.__file__}"


@pytest.fixture(scope="session")
def running_server() -> Iterator[RunningServer]:
    """The database server that `TIDEGATE_TEST_LEDGER` names."""
    from tests.running_server import RunningServer

    with RunningServer() as server:
        yield server


@pytest.fixture
def running_url(running_server: RunningServer) -> Iterator[str]:
    """The URL of a new database on it, dropped afterwards."""
    running_server.recover()
    url = running_server.create_database()
    yield url
    running_server.recover()
    running_server.drop_database(url)
