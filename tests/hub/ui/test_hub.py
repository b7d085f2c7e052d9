"""The pages on a real hub: sign-in, runs, live points, commands.

A test asks for `page` last, so that the browser leaves before the server stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from skyward.testing.hub import HubServer

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def owner(hub: HubServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, headers=hub.headers) as client:
        yield client


def test_a_signed_in_browser_follows_a_run(hub: HubServer, owner: httpx.Client, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{hub.url}/runs")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    user = owner.get("/v1/me").json()["user"]
    page.goto(owner.post(f"/v1/users/{user}/link").json()["link"])
    expect(page).to_have_url(f"{hub.url}/experiments")

    made = owner.post("/v1/runs", json={"experiment": "pretraining", "name": "first", "params": {"lr": 0.1}}).json()
    metrics = [{"key": "loss", "value": 1 / (step + 1), "step": step} for step in range(10)]
    assert owner.post(f"/v1/runs/{made['id']}/metrics", json={"metrics": metrics}).is_success
    page.goto(f"{hub.url}/runs?filter=params.lr+=+'0.1'")
    page.get_by_role("link", name="first", exact=True).click()
    card = page.get_by_role("article", name="loss", exact=True)
    expect(card).to_have_attribute("data-points", "10")
    sent = time.monotonic()
    point = {"key": "loss", "value": 0.0625, "step": 10}
    assert owner.post(f"/v1/runs/{made['id']}/metrics", json={"metrics": [point]}).is_success
    expect(card.locator(".last")).to_have_text("0.0625")
    print(f"on the page after {time.monotonic() - sent:.2f} s")

    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_test_id("command")).to_have_text("save: waiting")
    assert [one["action"] for one in owner.get(f"/v1/runs/{made['id']}/commands").json()["commands"]] == ["save"]


@pytest.fixture
def open_hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", with_auth=False) as server:
        yield server


def test_each_page_shows_a_new_hub_without_a_problem(open_hub: HubServer, page: Page) -> None:
    from playwright.sync_api import expect

    for path in ("/experiments", "/runs", "/projects", "/members", "/tokens", "/audit"):
        page.goto(open_hub.url + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("note")).to_contain_text("--no-auth")
        expect(page.locator("main .card > *, main .empty").first).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
