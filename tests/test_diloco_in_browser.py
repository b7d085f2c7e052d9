"""The page of a DiLoCo server in a real browser, with workers that train."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from skyward.training.diloco import DiLoCoServer, DiLoCoWorker
from skyward.training.diloco.addresses import page_link
from tests.hub.ui.test_accessibility import NAMELESS, faint_texts
from tests.training.diloco.runs import TOKEN, make_model, serving, worker_of

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiLoCoServer]:
    with serving(make_model(), save_dir=tmp_path) as server:
        yield server


@pytest.fixture
def worker(server: DiLoCoServer) -> Iterator[DiLoCoWorker]:
    """A worker with two rounds behind it."""
    worker = worker_of(server, make_model(), None, "<b>berlin</b>")
    worker.start()
    for loss in (2.5, 1.5):
        worker.count_loss(loss)
        assert worker.force_sync()
    yield worker
    worker.stop()


def test_the_page_shows_rounds_and_workers_and_has_the_controls(
    server: DiLoCoServer, worker: DiLoCoWorker, tmp_path: Path, page: Page
) -> None:
    from playwright.sync_api import expect

    address = server.address
    asked: set[str] = set()
    page.on("response", lambda response: asked.add(response.url))
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))

    page.goto(page_link(address, TOKEN))
    row = page.locator("#workers tbody tr")
    expect(row.locator("td").first).to_have_text("<b>berlin</b>")  # text of a worker is no markup
    expect(row.locator("td").nth(5)).to_have_text("1.5")
    expect(row).to_have_attribute("title", re.compile(rf"^on {re.escape(socket.gethostname())}, .*sends 32 bits"))
    expect(page.locator("#tiles")).to_contain_text("Mean loss1.5")
    expect(page.locator("#rounds tbody tr")).to_have_count(2)
    expect(page.get_by_role("img", name="Loss by round. <b>berlin</b>: 1.5, mean: 1.5")).to_be_visible()
    assert page.url == f"{address}/"  # the token is not in the address bar, and outlives a reload
    page.reload()
    expect(row).to_have_count(1)
    assert worker.force_sync()
    expect(page.locator("#rounds tbody tr")).to_have_count(3)

    assert page.locator("button, input").evaluate_all(NAMELESS) == []
    assert faint_texts(page) == []
    page.get_by_role("button", name="Save now").click()
    expect(page.locator("#notices")).to_contain_text(f"Saved: {tmp_path}")
    page.get_by_role("button", name="Evict <b>berlin</b>").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Evict <b>berlin</b>").click()
    page.get_by_role("button", name="Evict", exact=True).click()
    expect(row).to_have_count(0)
    page.get_by_role("button", name="Stop the server").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#notices")).to_contain_text("The server has saved, and ends.")
    server.wait()
    server.stop()
    expect(page.locator("#state")).to_have_text("stopped")
    with (  # at the same address, and soon ahead of the first server
        serving(make_model(), port=int(address.rpartition(":")[2])) as another,
        worker_of(another, make_model(), None, "oslo") as newcomer,
    ):
        assert all(newcomer.force_sync() for _ in range(4))
        expect(page.locator("#rounds tbody tr")).to_have_count(4)
        expect(page.locator("#legend")).to_contain_text("oslo")
        expect(page.locator("#legend")).not_to_contain_text("berlin")

    assert {url.partition("?")[0].removeprefix(address) for url in asked} == {
        *("/", "/status", "/history", "/control/save", "/control/kick", "/control/stop"),
    }
    assert [text for text in problems if "Failed to load resource" not in text] == []  # the server has ended


def test_a_page_without_a_token_asks_for_one(server: DiLoCoServer, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(server.address)
    page.get_by_label("Token of the server").fill("another")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("The server refuses this token.")
    page.get_by_label("Token of the server").fill(TOKEN)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#state")).to_have_text("waiting for workers")
    expect(page.get_by_label("Token of the server")).to_be_hidden()


def test_only_the_page_itself_needs_no_token_and_it_names_no_other_file(server: DiLoCoServer) -> None:
    with httpx.Client(base_url=server.address) as client:
        answer = client.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'sha256-" in policy
        assert "unsafe" not in policy
        assert not any(
            f'{attribute}="{start}' in answer.text for attribute in ("src", "href") for start in ("/", "http")
        )
        assert "import " not in answer.text
        for path in ("/status", "/history", "/index.html", "/control/stop"):
            assert client.get(path).status_code == 401, path
