"""The table of runs, in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hub.ui.conftest import Site
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page


def rows_of(page: Page) -> int:
    return page.locator(".grid-row").count()


def test_a_table_of_100_000_runs_has_only_the_rows_in_sight_in_the_document(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    expect(page.get_by_role("link", name="brave-otter-0", exact=True)).to_be_visible()
    assert rows_of(page) < 60


def test_the_table_scrolls_to_run_5_000_and_back_with_pages_fetched_as_needed(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    grid = page.get_by_role("grid", name="Runs")
    expect(page.get_by_role("link", name="brave-otter-0", exact=True)).to_be_visible()
    grid.focus()

    def reached() -> bool:
        grid.press("End")
        return int(page.get_by_test_id("tally").inner_text().split()[0].replace(",", "")) >= 5_000

    until(reached, 60)
    assert rows_of(page) < 60
    grid.press("Home")
    expect(page.get_by_role("link", name="brave-otter-0", exact=True)).to_be_visible()


def test_the_view_is_in_the_address(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(
        f"{site.address}/runs?columns=metrics.loss,params.optimizer&order=metrics.loss+ASC&group=params.optimizer"
    )
    expect(page.get_by_role("columnheader", name="loss")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator(".grid-row.group").first).to_contain_text("adamw")
    assert any("order_by=params.%60optimizer%60+ASC" in asked for asked in site.canned.asked)
    page.get_by_role("columnheader", name="loss").get_by_role("button").click()
    expect(page).to_have_url(
        f"{site.address}/runs?columns=metrics.loss%2Cparams.optimizer&group=params.optimizer&order=metrics.loss+DESC"
    )


def test_columns_are_chosen_by_name(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    page.get_by_title("Choose columns").click()
    page.get_by_label("Search columns").fill("grad")
    box = page.get_by_label("grad_norm")
    was_chosen = box.is_checked()
    box.click()
    expect(page.get_by_role("columnheader", name="grad_norm")).to_have_count(0 if was_chosen else 1)


def test_a_filter_that_cannot_be_read_says_why_beside_the_box(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    expect(page.get_by_role("link", name="brave-otter-0", exact=True)).to_be_visible()
    page.keyboard.press("/")
    box = page.get_by_label("Filter", exact=True)
    expect(box).to_be_focused()
    box.fill("nonsense")
    box.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no comparison Write for example metrics.loss < 0.1.")
    expect(box).to_have_attribute("aria-invalid", "true")
    box.fill("metrics.loss < 0.1")
    box.press("Enter")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page).to_have_url(f"{site.address}/runs?filter=metrics.loss+%3C+0.1")


def test_runs_are_selected_and_compared_by_keyboard(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    grid = page.get_by_role("grid", name="Runs")
    expect(page.get_by_role("link", name="calm-heron-1", exact=True)).to_be_visible()
    grid.focus()
    for key in ("ArrowDown", "Space", "ArrowDown", "Space"):
        grid.press(key)
    expect(page.get_by_text("2 runs selected")).to_be_visible()
    page.get_by_role("toolbar", name="Selected runs").get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare 2 runs")).to_be_visible()


def test_an_empty_hub_shows_the_lines_to_paste(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    site.canned.runs = 0
    page.goto(f"{site.address}/")
    expect(page.get_by_role("heading", name="No experiments yet")).to_be_visible()
    expect(page.get_by_text(f"MLFLOW_TRACKING_URI={site.address}")).to_be_visible()
    page.goto(f"{site.address}/runs")
    expect(page.get_by_text(f'hub.connect("{site.address}"')).to_be_visible()


def view_of(page: Page) -> dict[str, object]:
    """Everything of the table that a user chose, as the page shows it."""
    from playwright.sync_api import expect

    expect(page.locator(".grid-row.group").first).to_be_visible()
    heads = page.get_by_role("columnheader")
    return {
        "filter": page.get_by_label("Filter", exact=True).input_value(),
        "columns": heads.evaluate_all("heads => heads.map((head) => head.title)"),
        "order": heads.evaluate_all("heads => heads.map((head) => head.ariaSort)"),
        "group": page.get_by_title("Group by").input_value(),
        "runs": page.locator(".grid-row a").all_inner_texts()[:5],
    }


def test_a_view_comes_back_whole_from_its_link(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{site.address}/experiments/1")
    box = page.get_by_label("Filter", exact=True)
    box.fill("metrics.`eval/loss` < 0.9 and params.optimizer != 'a+b & c#d'")
    box.press("Enter")
    page.get_by_title("Choose columns").click()
    for name in ("tokens_per_s", "eval/f1", "dropout"):
        page.get_by_label("Search columns").fill(name)
        page.get_by_role("checkbox", name=name, exact=True).click()
    page.keyboard.press("Escape")
    page.get_by_title("Group by").select_option("params.optimizer")
    head = page.get_by_role("columnheader", name="eval/loss")
    for order in ("descending", "ascending"):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", order)
    expect(page.locator(".grid-row.group").first).to_contain_text("adamw")
    chosen = view_of(page)
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status")).to_contain_text("is copied")
    link = page.evaluate("navigator.clipboard.readText()")
    other = page.context.new_page()
    other.goto(link)
    assert view_of(other) == chosen
