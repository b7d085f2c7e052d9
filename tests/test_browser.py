"""The browser of the tests."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAGE = b"""<!doctype html><title>Count</title>
<button onclick="this.textContent = ++window.count; document.cookie = 'count=1'">0</button>
<script>window.count = 0; document.title += document.cookie</script>"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("time", [1, 2])
def test_each_test_has_a_page_without_the_cookies_of_another(page: Page, address: str, time: int) -> None:
    page.goto(address)
    assert page.title() == "Count"
    page.get_by_role("button").click()
    page.get_by_role("button", name="1").wait_for()
    assert page.evaluate("document.cookie") == "count=1"


def test_a_browser_of_the_session_blocks_no_event_loop(browser_address: str) -> None:
    assert asyncio.run(asyncio.sleep(0, "ran")) == "ran"


def test_without_a_browser_tests_skip_and_in_continuous_integration_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser here: install one of chromium, "):
        browser.require_browser()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI is set"):
        browser.require_browser()
