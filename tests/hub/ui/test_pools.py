"""The pages of pools, in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import skyward as sky
from skyward import hub as hub_client
from skyward.testing.hub import HubServer
from tests.hub.ui.conftest import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def connected(open_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connect this program to the hub for one test, so that its pools record themselves."""
    monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))
    hub_client.connect(open_hub.url)
    yield
    hub_client.disconnect()


def test_a_pool_shows_its_machines_money_lost_nodes_and_calls(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/pools")
    page.get_by_role("link", name="train", exact=True).click()
    main = page.get_by_role("main")
    expect(main).to_contain_text("0.3350 USD")
    expect(main).to_contain_text("2, 1 lost, 1 replaced")
    expect(page.get_by_role("table", name="Machines")).to_contain_text("g5.xlarge, spot")
    expect(page.get_by_role("table", name="Events")).to_contain_text("preempted")
    calls = page.get_by_role("list", name="Calls by node").get_by_role("listitem")
    expect(calls).to_have_count(2)
    expect(calls.nth(1)).to_have_attribute("title", "train: 4 s, failed")


def nap(seconds: float) -> None:
    time.sleep(seconds)


def test_a_real_pool_records_itself_and_is_followed_on_its_page(
    open_hub: HubServer, connected: None, page: Page
) -> None:
    from playwright.sync_api import expect

    with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
        sky.compute(nap)(0.1) @ pool
        with pytest.raises(ZeroDivisionError):
            sky.compute(divmod)(1, 0) >> pool
        page.goto(f"{open_hub.url}/pools")
        row = page.get_by_role("row").nth(1)
        expect(row).to_contain_text("open")
        row.get_by_role("link").click()
        nodes = page.get_by_role("table", name="Nodes").get_by_role("row")
        expect(nodes).to_have_count(3)
        expect(nodes.filter(has_text="ready")).to_have_count(2)
        bars = page.get_by_role("list", name="Calls by node").get_by_role("listitem")
        expect(bars).to_have_count(3)
        failed = bars.filter(visible=True).and_(page.locator(".failed"))
        expect(failed).to_have_attribute("title", re.compile(r"^divmod.*, failed$"))
        for i in range(3):
            box = bars.nth(i).bounding_box()
            assert box is not None
            assert box["width"] >= 2
    expect(page.locator(".head")).to_contain_text("closed")
    expect(page.get_by_role("table", name="Events")).to_contain_text("pool.closed")
    expect(nodes.filter(has_text="ended")).to_have_count(2)
