"""A browser for the tests of pages: Chromium or Chrome as this machine has it, driven by playwright.

A test asks for `page`. One browser runs for the session, and each test has a context of its own there: no cookie, no
storage and no open page of another test. Playwright downloads no browser and starts none: it connects for each test.
Its driver runs for the session, because each start takes half a second of processor time. While a test has a page,
Playwright's loop is the running one, and the test can call `asyncio.run` in another thread only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import lines_of, until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Playwright

__all__ = ["browser_address", "browser_driver", "page"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
"""Time for the first start, on a loaded machine."""
WAIT_S = 30.0
"""Time in which a page must show what a test waits for."""

_OPTIONS = (
    "--headless=new",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",  # /dev/shm of a container is often 64 MB
    "--disable-extensions",
    # Each new window has an address bar, whose list would be two pages in a process of its own.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup",
    "--disable-gpu",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--password-store=basic",
    "--window-size=1280,1000",
)


def find_browser() -> str | None:
    """Return the path of a browser on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def require_browser() -> str:
    """Return the path of a browser. Without one, skip the test, or fail it in continuous integration."""
    found = find_browser()
    if found is not None:
        return found
    why = f"no browser here: install one of {', '.join(NAMES)}"
    if os.environ.get("CI"):
        pytest.fail(f"{why} (CI is set, so this test must run)", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def browser_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a browser without a window and give the address by which playwright drives it."""
    program = require_browser()
    profile = tmp_path_factory.mktemp("browser")
    options = [*_OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # root has no other way
    log = profile / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *options, "about:blank"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _wait_for_address(process, profile / "DevToolsActivePort", log)
    finally:
        _end(process)


def _wait_for_address(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    until(lambda: len(lines_of(port_file)) >= 2 or process.poll() is not None, START_S)
    if process.poll() is not None:
        pytest.fail(f"the browser ended with status {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
    return f"http://127.0.0.1:{lines_of(port_file)[0]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the browser and its helpers: they are one process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


class Driver:
    """Playwright's driver. Its event loop is the running one of this thread only within `loop_runs`.

    It stands still in between, in a greenlet of its own.
    """

    def __init__(self, playwright: Playwright) -> None:
        self.playwright = playwright
        self._loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)

    @contextmanager
    def loop_runs(self) -> Iterator[None]:
        """Let Playwright's functions be called."""
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


@pytest.fixture(scope="session")
def browser_driver() -> Iterator[Driver]:
    """Start Playwright's driver."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_S * 1000)
    driver = Driver(sync_playwright().start())
    yield driver
    with driver.loop_runs():
        driver.playwright.stop()


@pytest.fixture
def page(browser_address: str, browser_driver: Driver) -> Iterator[Page]:
    """Give a new page. Its waits last up to WAIT_S, and an exception that no script caught fails the test."""
    with browser_driver.loop_runs():
        browser = browser_driver.playwright.chromium.connect_over_cdp(browser_address, timeout=START_S * 1000)
        context = browser.new_context(viewport={"width": 1280, "height": 1000})
        context.set_default_timeout(WAIT_S * 1000)
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        try:
            yield page
        finally:
            context.close()
            browser.close()
    assert errors == []
