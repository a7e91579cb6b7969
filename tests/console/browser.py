"""The console in a real browser: the Chromium of the system, driven by Playwright, and axe-core, which checks whether
the page works with a screen reader or without a mouse. If one of them is not available, its tests are skipped, and the
summary of the run says what was not checked.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pytest

from tests.server.harness import TIMEOUT_S, TidegateServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

T = TypeVar("T")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = Path(__file__).parent / "npm"
# Records what the content security policy of the page blocks.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


def aside(work: Callable[[], T]) -> T:
    """Run this in another thread: Playwright runs an event loop in this one, and the harness needs its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def find_chromium() -> str:
    """The path of the browser, or a skipped test."""
    if find_spec("playwright") is None:
        pytest.skip("not checked on Chromium, the pages of the console: playwright is not installed")
    found = next((path for name in CHROMIUM if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.skip("not checked on Chromium, the pages of the console: not installed (package chromium)")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, or a skipped test."""
    found = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The tests may run as root in a container, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def install_axe(folder: Path) -> str:
    """The source of axe-core, or a skipped test."""
    if shutil.which("npm") is None:
        pytest.skip("not checked on axe-core, accessibility of the console: npm is not installed")
    shutil.copy(PACKAGES / "package.json", folder)
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if installed.returncode != 0:
        pytest.skip("not checked on axe-core, accessibility of the console: npm cannot install it")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


class ConsolePage:
    """One page, and a record of everything that must not happen on it."""

    def __init__(self, page: Page, server: TidegateServer) -> None:
        self.page = page
        self.server = server
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(TIMEOUT_S * 1000)
        page.add_init_script(WATCH)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def sign_in(self, key: str) -> None:
        self.page.goto(f"{self.server.url}/console")
        self.page.get_by_label("Root key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.wait_live()

    def wait_live(self) -> None:
        self.page.locator("header .chip", has_text="Live").wait_for()

    def open(self, view: str) -> None:
        self.page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        self.page.get_by_role("heading", name=view, level=1).wait_for()

    def open_identifier(self, namespace: str, identifier: str) -> None:
        self.page.evaluate(
            "(parameters) => { location.hash = `#/identifier?${new URLSearchParams(parameters)}`; }",
            {"namespace": namespace, "identifier": identifier},
        )
        self.page.locator("svg.window").first.wait_for()

    def until(self, expression: str, timeout_s: float = TIMEOUT_S) -> None:
        """Poll an expression. Playwright's own function evaluates text in the page, which the policy forbids."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {expression}"
            self.page.wait_for_timeout(50)

    def check(self) -> None:
        """There was no error, nothing that the policy blocked, and nothing loaded from another host."""
        assert self.errors == []
        assert self.page.evaluate("violations") == []
        elsewhere = [url for url in self.requests if not url.startswith(self.server.url + "/")]
        assert elsewhere == []

    def overflow(self) -> int:
        """How many pixels the page is wider than its window."""
        found: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return found

    def axe(self, source: str) -> list[str]:
        """The violations that axe-core rates serious or worse."""
        self.page.evaluate(source)
        found: Any = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        return [
            f"{each['impact']}: {each['id']}: {node['html'][:160]}"
            for each in found["violations"]
            if each["impact"] in {"serious", "critical"}
            for node in each["nodes"]
        ]


class Traffic:
    """Requests of several callers to several servers, until the block ends."""

    def __init__(self, servers: Sequence[TidegateServer], key: str) -> None:
        self._servers = servers
        self._key = key
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(server,)) for server in servers]
        self.failures: list[Exception] = []

    def _send(self, server: TidegateServer) -> None:
        chance = random.Random(server.port)
        callers = ["user_123", "user_77", "org_9", "10.2.0.14", "user_5"]
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
        number = 0
        while not self._stopped.is_set():
            number += 1
            namespace, limit = chance.choice([("email.send", 30), ("login", 10), ("search", 200)])
            # The attacker sends in bursts.
            identifier = (
                "attacker" if number % 900 > 500 and chance.random() < 0.6 else chance.choice(callers)
            )
            body = {"namespace": namespace, "identifier": identifier, "limit": limit, "duration": 60_000}
            try:
                connection.request("POST", "/v2/ratelimit.limit", json.dumps(body).encode(), headers)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                connection.close()
            self._stopped.wait(chance.expovariate(60))
        connection.close()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
