"""The pages of pools, in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hub.ui.conftest import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
