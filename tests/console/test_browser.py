"""The console in a real browser, over a fleet of two regions with Redis and MariaDB."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

from tests.console.browser import ConsolePage, Traffic, aside, chromium, find_chromium, install_axe
from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually
from tidegate.adapters.migrations import migrate
from tidegate.testing import RedisServer
from tidegate.testing.servers.mysql_family import MySQLFamilyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Route

pytestmark = [pytest.mark.server, pytest.mark.slow]

VIEWS = ("Live", "Identifiers", "Fleet", "What if", "Overrides", "Namespaces", "Keys")
Scheme = Literal["light", "dark"]
DESKTOP = (1280, 900)
PHONE = (375, 812)
# The directory for screenshots of the documentation (`make screenshots`); by default they are thrown away.
PICTURES = os.environ.get("TIDEGATE_SCREENSHOTS")
HOSTILE = (
    "<script>window.pwned = true</script>",
    '"><img src=x onerror="window.pwned = true">',
    "\u202egnp.exe\u2066",
    "\U0001f600" * 512,
    "javascript:window.pwned=true",
    "مستخدم ١٢٣",
    "two\nlines\u0000",
)


class Fleet(NamedTuple):
    fra: TidegateServer
    iad: TidegateServer
    workspace: Workspace


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    find_chromium()  # checked first, so that nothing is started in vain
    request.getfixturevalue("redis_server")
    mariadb_server: MySQLFamilyServer = request.getfixturevalue("mariadb_server")
    mariadb_server.recover()
    ledger = mariadb_server.create_database()
    asyncio.run(migrate(ledger))
    with ExitStack() as stack:
        regions = {}
        for region in ("fra", "iad"):
            redis = stack.enter_context(RedisServer())
            arguments = ("--region", region, "--origin", redis.url, "--ledger", ledger)
            regions[region] = stack.enter_context(TidegateServer(*arguments))
        workspace = regions["fra"].workspace()
        with Traffic(list(regions.values()), workspace.key.secret):
            yield Fleet(regions["fra"], regions["iad"], workspace)


@pytest.fixture(scope="module")
def browser(fleet: Fleet) -> Iterator[Browser]:
    # After the fleet, because this thread has an event loop while Playwright runs.
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe_source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install_axe(tmp_path_factory.mktemp("axe"))


def new_context(browser: Browser, size: tuple[int, int], scheme: Scheme = "light") -> BrowserContext:
    width, height = size
    return browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = new_context(browser, DESKTOP)
    yield context
    context.close()


@pytest.fixture
def console(context: BrowserContext, fleet: Fleet) -> Iterator[ConsolePage]:
    """Signed in at the server of fra."""
    console = ConsolePage(context.new_page(), fleet.fra)
    console.sign_in(fleet.workspace.key.secret)
    yield console
    console.check()


def open_with_data(console: ConsolePage, view: str) -> None:
    console.open(view)
    if view == "What if":
        console.page.get_by_label("Namespace").select_option("login")
        console.page.get_by_role("textbox", name="Other limit").fill("5/minute")
        console.page.get_by_role("button", name="Replay").click()
    console.until("document.querySelectorAll('main table tbody tr').length > 0")


def test_each_view_shows_the_fleet(console: ConsolePage, fleet: Fleet) -> None:
    page = console.page
    console.until("parseFloat(document.querySelector('.tiles .allowed .value').textContent) > 0")
    page.get_by_role("cell", name="email.send").first.wait_for()
    assert page.get_by_role("img", name=re.compile("Decisions per second.*allowed")).count() == 1
    console.open("Identifiers")
    page.get_by_role("link", name="user_123").first.wait_for()
    console.open("Fleet")
    for region in ("fra", "iad"):
        row = page.get_by_role("region", name="Regions").get_by_role("row", name=re.compile(f"^{region}"))
        row.get_by_text("live").wait_for()
    for dependency in ("Origin (Redis)", "Ledger (database)", "Catalog (keys, overrides)"):
        row = page.get_by_role("row", name=re.compile(re.escape(dependency)))
        row.get_by_text("ok", exact=True).wait_for()
    for breaker in ("origin", "ledger publish", "ledger import"):
        page.get_by_role("row", name=re.compile(f"^{breaker}.* closed$")).first.wait_for()
    assert re.search(r"[-+]?\d+ ms", page.get_by_role("region", name="Processes of this server").inner_text())
    console.open("Overrides")
    page.get_by_label("Namespace").select_option("search")  # in others the tests make some
    page.get_by_text("This namespace has no overrides.").wait_for()
    console.open("Namespaces")
    page.get_by_role("cell", name="email.send", exact=True).wait_for()
    console.open("Keys")
    page.get_by_text("(yours)").wait_for()


def test_an_identifier_shows_its_cells_with_the_part_of_other_regions_and_why_it_was_denied(
    console: ConsolePage, fleet: Fleet
) -> None:
    page = console.page
    console.open_identifier("login", "user_123")
    picture = page.locator("svg.window").first
    has_foreign = (
        "/[1-9]\\d* by other regions/.test(document.querySelector('svg.window').getAttribute('aria-label'))"
    )
    console.until(has_foreign)
    label = picture.get_attribute("aria-label")
    assert label is not None
    assert re.search(r"\d+ by this node, \d+ by other nodes of the region, \d+ by other regions", label)
    page.locator("details[open] li", has_text="was denied at").wait_for()
    reasons = page.locator("details[open]").inner_text()
    assert "user_123 in login was denied at" in reasons
    assert "the limit is 10 per minute" in reasons
    assert "Current window, since" in reasons
    assert "No override applies" in reasons
    assert "Decided" in reasons


def test_an_identifier_is_found_by_a_part_of_its_name(console: ConsolePage) -> None:
    console.open("Identifiers")
    console.page.get_by_role("searchbox", name="Find an identifier").fill("org")
    console.page.get_by_role("button", name="Find").click()
    found = console.page.get_by_role("region", name="Found identifiers")
    found.get_by_role("link", name="org_9").first.click()
    console.page.get_by_role("heading", name="org_9", level=1).wait_for()


def limit_of(server: TidegateServer, fleet: Fleet, identifier: str) -> int:
    body = {"namespace": "email.send", "identifier": identifier, "limit": 30, "duration": 60_000, "cost": 0}
    return int(server.call("limit", body, fleet.workspace.key.secret).data["limit"])


def test_an_override_made_by_hand_changes_the_next_decision_and_its_preview_names_whom(
    console: ConsolePage, fleet: Fleet
) -> None:
    page = console.page
    assert limit_of(fleet.fra, fleet, "user_77") == 30
    console.open("Overrides")
    page.get_by_label("Namespace").select_option("email.send")
    page.get_by_role("button", name="New override").click()
    dialog = page.get_by_role("dialog", name="New override")
    dialog.get_by_label("Identifier or pattern").fill("user_7*")
    dialog.get_by_text(re.compile(r"Matches 1 of \d+ identifiers")).wait_for()
    assert "user_77" in dialog.inner_text()
    dialog.get_by_label("Limit").fill("7")
    dialog.get_by_label("Per").fill("2")
    dialog.get_by_label("Unit").select_option("hours")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("row", name=re.compile(r"user_7\* 7 per 2 hours")).wait_for()
    assert limit_of(fleet.fra, fleet, "user_77") == 7, "the next decision"
    eventually(partial(lambda: limit_of(fleet.iad, fleet, "user_77") == 7), "the other region knows it")

    page.get_by_role("button", name="Edit override user_7*").click()
    dialog = page.get_by_role("dialog", name="Change an override")
    dialog.get_by_label("Limit").fill("0")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("row", name=re.compile(r"user_7\* blocked")).wait_for()
    assert limit_of(fleet.fra, fleet, "user_77") == 0

    page.get_by_role("button", name="Delete override user_7*").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("This namespace has no overrides.").wait_for()
    assert limit_of(fleet.fra, fleet, "user_77") == 30


def test_an_override_is_made_only_when_the_list_of_namespaces_is_there(console: ConsolePage) -> None:
    # The dialog would have no namespace, and neither preview nor save.
    page = console.page
    console.open("Overrides")
    button = page.get_by_role("button", name="New override")
    requests: list[Route] = []

    def hold(request: Route) -> None:  # Playwright takes no method of a list
        requests.append(request)

    page.route(re.compile("/console/namespaces"), hold)
    page.get_by_label("Namespace").select_option("email.send")
    page.wait_for_function("document.querySelector('select').options.length === 0")
    assert button.is_disabled()
    for request in requests:
        request.continue_()
    button.click()
    page.get_by_role("dialog", name="New override").get_by_text("In namespace email.send").wait_for()


def test_another_limit_is_replayed_with_the_last_minutes_and_changes_nothing(
    console: ConsolePage, fleet: Fleet
) -> None:
    page = console.page
    key = fleet.workspace.key.secret
    body = {"namespace": "replayed", "identifier": "user_123", "limit": 10, "duration": 3_600_000}
    for _ in range(12):
        assert fleet.fra.call("limit", body, key).status == 200
    console.open("What if")
    page.get_by_label("Namespace").select_option("replayed")
    page.get_by_role("textbox", name="Other limit").fill("4 per hour")
    page.keyboard.press("Enter")
    page.get_by_text("With 4 per hour, 6 requests of 1 identifier would have been denied as well").wait_for()
    page.get_by_text("12 requests of 1 identifier in").wait_for()
    page.get_by_role("row", name="user_123 12 10 4 6 0").wait_for()
    assert page.get_by_role("img", name=re.compile("Denied per second")).count() == 1
    assert fleet.fra.call("limit", {**body, "cost": 0}, key).data["limit"] == 10
    page.get_by_role("textbox", name="Other limit").fill("many")
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("'many'").wait_for()
    page.get_by_role("textbox", name="Other limit").fill("10/hour")
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("With 10 per hour nothing would have changed.").wait_for()


def test_namespaces_are_made_deleted_and_restored(console: ConsolePage, fleet: Fleet) -> None:
    page = console.page
    console.open("Namespaces")
    page.get_by_role("button", name="New namespace").click()
    page.get_by_role("dialog").get_by_label("Name").fill("made by hand")
    page.get_by_role("dialog").get_by_role("button", name="Create").click()
    page.get_by_role("cell", name="made by hand", exact=True).wait_for()
    body = {"namespace": "made by hand", "identifier": "x", "limit": 5, "duration": 60_000}
    key = fleet.workspace.key.secret
    assert fleet.fra.call("limit", body, key).status == 200
    page.get_by_role("button", name="Delete made by hand").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Restore made by hand").wait_for()
    assert fleet.fra.call("limit", body, key).status == 410
    page.get_by_role("button", name="Restore made by hand").click()
    page.get_by_role("dialog").get_by_role("button", name="Restore").click()
    page.get_by_role("button", name="Delete made by hand").wait_for()
    assert fleet.fra.call("limit", body, key).status == 200


def test_a_read_only_key_is_made_used_and_revoked(
    console: ConsolePage, fleet: Fleet, browser: Browser
) -> None:
    page = console.page
    console.open("Keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog", name="New key")
    dialog.get_by_label("Name", exact=True).fill("wall screen")
    dialog.get_by_role("button", name="Create").click()
    secret = page.locator(".secret").inner_text()
    assert secret.startswith("tg_")
    page.get_by_role("button", name="Close").click()
    context = browser.new_context()
    try:
        reader = ConsolePage(context.new_page(), fleet.fra)
        reader.sign_in(secret)
        reader.page.get_by_text("read only").wait_for()
        reader.open("Overrides")
        assert reader.page.get_by_role("button", name="New override").count() == 0
        page.get_by_role("row", name=re.compile("wall screen")).get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        reader.page.get_by_text("The session has ended.").wait_for()
        reader.check()
    finally:
        context.close()


def test_a_hostile_name_stays_text(console: ConsolePage, fleet: Fleet) -> None:
    page = console.page
    for name in HOSTILE:
        body = {"namespace": name, "identifier": name, "limit": 1, "duration": 60_000}
        for _ in range(3):
            assert fleet.fra.call("limit", body, fleet.workspace.key.secret).status == 200
        change = {"namespace": name, "identifier": name, "limit": 2, "duration": 60_000}
        assert fleet.fra.call("setOverride", change, fleet.workspace.key.secret).status == 200
    for name in HOSTILE:
        console.open_identifier(name, name)
        page.locator("details[open] li", has_text="was denied at").wait_for()
        heading = page.get_by_role("heading", level=1).inner_text()
        if name.isprintable():
            assert heading == name
        else:
            assert "⟨U+" in heading and "\u202e" not in heading
    for view in VIEWS:
        console.open(view)
        console.until("violations.length === 0")
        assert page.locator("main img, main script, main iframe").count() == 0
    console.open("Overrides")
    page.get_by_label("Namespace").select_option(HOSTILE[0])
    page.get_by_role("link", name=HOSTILE[0]).wait_for()
    assert page.evaluate("window.pwned") is None


def test_the_page_comes_back_by_itself_after_a_restart_of_the_server(browser: Browser, fleet: Fleet) -> None:
    with TidegateServer() as server:
        workspace = aside(server.workspace)
        context = browser.new_context()
        try:
            console = ConsolePage(context.new_page(), server)
            console.sign_in(workspace.key.secret)
            console.until("document.querySelector('.tiles .allowed .value').textContent !== '–'")
            assert server.stop() == 0
            console.page.locator("header .chip", has_text="Connecting").wait_for()
            server.start()
            console.wait_live()
            assert workspace.limit(namespace="after", identifier="x").status == 200
            console.page.get_by_role("cell", name="after", exact=True).wait_for()
            assert console.errors == []
        finally:
            context.close()


def test_everything_can_be_done_with_the_keyboard(context: BrowserContext, fleet: Fleet) -> None:
    console = ConsolePage(context.new_page(), fleet.fra)
    page = console.page
    keyboard = page.keyboard

    def focused() -> str:
        found: str = page.evaluate(
            "(document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.textContent ?? '').trim()"
        )
        return found

    def tab_to(name: str) -> None:
        for _ in range(60):
            if focused() == name:
                return
            keyboard.press("Tab")
        raise AssertionError(f"the keyboard does not reach {name!r}")

    page.goto(f"{fleet.fra.url}/console")
    page.get_by_label("Root key").wait_for()
    keyboard.type(fleet.workspace.key.secret)  # the field has the focus
    keyboard.press("Enter")
    console.wait_live()
    keyboard.press("Tab")
    assert focused() == "Skip to content"
    keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur()")
    tab_to("Overrides")
    keyboard.press("Enter")
    page.get_by_role("heading", name="Overrides", level=1).wait_for()
    page.get_by_label("Namespace").select_option("search")  # the arrows of a list are the browser's
    tab_to("New override")
    keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="New override")
    dialog.wait_for()
    keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert focused() == "New override", "the focus is back where it was"
    keyboard.press("Enter")
    dialog.wait_for()
    keyboard.type("by_keyboard")
    keyboard.press("Enter")
    page.get_by_role("row", name=re.compile("by_keyboard 100 per minute")).wait_for()
    tab_to("Delete override by_keyboard")
    keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    tab_to("Delete")
    keyboard.press("Enter")
    page.get_by_role("row", name=re.compile("by_keyboard")).wait_for(state="detached")
    console.check()


def test_the_focus_stays_where_it_is_while_numbers_change(console: ConsolePage) -> None:
    page = console.page
    console.open("Identifiers")
    link = page.get_by_role("region", name="Hottest").get_by_role("link", name="user_123").first
    link.focus()
    before = page.evaluate("performance.now()")
    console.until(f"performance.now() > {before} + 3500")  # three ticks, with their changes of order
    assert page.evaluate("document.activeElement.innerText") == "user_123"


def test_every_view_fits_a_phone(console: ConsolePage) -> None:
    console.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    for view in VIEWS:
        open_with_data(console, view)
        assert console.overflow() <= 0, view
    console.open_identifier("login", "user_123")
    assert console.overflow() <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, fleet: Fleet, axe_source: str, scheme: Scheme) -> None:
    context = new_context(browser, DESKTOP, scheme)
    try:
        console = ConsolePage(context.new_page(), fleet.fra)
        console.page.goto(f"{fleet.fra.url}/console")
        console.page.get_by_label("Root key").wait_for()
        found = {"sign-in": console.axe(axe_source)}
        console.sign_in(fleet.workspace.key.secret)
        for view in VIEWS:
            open_with_data(console, view)
            found[view] = console.axe(axe_source)
        console.page.get_by_role("button", name="New key").click()
        console.page.get_by_role("dialog").wait_for()
        found["dialog"] = console.axe(axe_source)
        console.page.keyboard.press("Escape")
        console.open_identifier("login", "user_123")
        found["identifier"] = console.axe(axe_source)
        assert {view: faults for view, faults in found.items() if faults} == {}
    finally:
        context.close()


@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE)],
)
def test_pictures_can_be_made(
    browser: Browser, fleet: Fleet, tmp_path: Path, name: str, scheme: Scheme, size: tuple[int, int]
) -> None:
    folder = tmp_path if PICTURES is None else Path(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    context = new_context(browser, size, scheme)
    try:
        console = ConsolePage(context.new_page(), fleet.fra)
        console.sign_in(fleet.workspace.key.secret)
        points = 5 if PICTURES is None else 75  # enough history for a useful curve in the documentation
        console.until(
            "[...document.querySelectorAll('.line.allowed')].map((each) => each.getAttribute('points')).join(' ')"
            f".split(' ').length > {points}",
            timeout_s=TIMEOUT_S * 5,
        )
        console.until("document.querySelectorAll('main tbody tr:not(.empty)').length > 6")
        pictures = [("live", folder / f"live-{name}.png")]
        console.page.screenshot(path=pictures[0][1], full_page=name == "phone")
        console.open_identifier("login", "user_123")
        console.page.locator("details[open] li").first.wait_for()
        pictures.append(("identifier", folder / f"identifier-{name}.png"))
        console.page.screenshot(path=pictures[1][1])
        if name == "light":
            console.open("Fleet")
            console.page.get_by_role("region", name="Regions").get_by_text("live").first.wait_for()
            pictures.append(("fleet", folder / "fleet-light.png"))
            console.page.screenshot(path=pictures[2][1])
            open_with_data(console, "What if")
            pictures.append(("what-if", folder / "what-if-light.png"))
            console.page.screenshot(path=pictures[3][1])
        assert all(path.stat().st_size > 10_000 for _, path in pictures)
        console.check()
    finally:
        context.close()
