"""The comparison of runs, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.hub.ui.canned import run_id
from tests.hub.ui.conftest import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUERY = "&".join(f"run={run_id(i)}" for i in range(4))


def test_differences_of_parameters_come_first(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/compare?{QUERY}&part=table")
    table = page.get_by_role("table", name="Parameters")
    expect(table.get_by_role("cell", name="optimizer")).to_be_visible()
    expect(table.get_by_role("cell", name="dataset")).to_have_count(0)
    page.get_by_label("Only differences").click()
    expect(table.get_by_role("row").last).to_contain_text("dataset")


def test_curves_follow_the_axis_smoothing_and_scale_of_the_address(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/compare?{QUERY}&metric=loss")
    card = page.get_by_role("article", name="loss", exact=True)
    expect(card.locator("[data-drawn]")).to_be_visible()
    page.get_by_role("button", name="Time", exact=True).click()
    page.get_by_label("Log scale").click()
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(f"{site.address}/compare?{QUERY}&metric=loss&axis=relative&log=y&smooth=0.9")
    expect(card.locator("canvas")).to_be_visible()
    page.get_by_role("button", name="calm-heron-1").click()
    expect(page.get_by_role("button", name="calm-heron-1")).to_have_attribute("aria-pressed", "false")


def test_a_chart_is_saved_as_csv_and_png(page: Page, site: Site, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/compare?{QUERY}&metric=loss")
    card = page.get_by_role("article", name="loss", exact=True)
    expect(card.locator("[data-drawn]")).to_be_visible()
    card.hover()
    with page.expect_download() as download:
        card.get_by_label("Save loss as CSV").click()
    download.value.save_as(tmp_path / "loss.csv")
    head, first, *_ = (tmp_path / "loss.csv").read_text().splitlines()
    assert head == "run,metric,step,timestamp,value"
    assert first.startswith("brave-otter-0,loss,0,")
    with page.expect_download() as download:
        card.get_by_label("Save loss as PNG").click()
    download.value.save_as(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_parallel_coordinates_and_scatter_are_drawn(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/compare?{QUERY}&part=parallel")
    expect(page.get_by_role("img", name="Parallel coordinates")).to_have_attribute("data-drawn", "true")
    page.goto(f"{site.address}/compare?{QUERY}&part=scatter&x=params.learning_rate&y=metrics.loss")
    expect(page.get_by_role("img", name="loss by learning_rate")).to_have_attribute("data-drawn", "true")
