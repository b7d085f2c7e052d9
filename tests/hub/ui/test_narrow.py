"""Pages on a phone: everything is within reach at a width of 400 pixels, however long the names are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hub.ui.canned import LONG_NAMES, run_id
from tests.hub.ui.conftest import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH = 400
TWO = f"run={run_id(0)}&run={run_id(1)}"
RUN = f"/runs/{run_id(0)}"

# A path, and a locator of the part that arrives last.
PAGES = (
    ("/experiments", "tbody tr"),
    ("/runs", ".grid-row a"),
    (f"/runs?group=params.{LONG_NAMES.param}", ".grid-row.group"),
    (RUN, "[data-drawn]"),
    (f"{RUN}?tab=overview", "main .card tbody tr"),
    (f"{RUN}?tab=artifacts", ".files li"),
    (f"{RUN}?tab=lineage", ".runs-below a"),
    (f"{RUN}?tab=cost", "main .card dd"),
    (f"/compare?{TWO}", "[data-drawn]"),
    (f"/compare?{TWO}&part=table", "tbody tr"),
    (f"/compare?{TWO}&part=parallel", "[data-drawn]"),
    (f"/compare?{TWO}&part=scatter", "[data-drawn]"),
    ("/pools", "tbody tr"),
    ("/pools/p1", "tbody tr"),
    ("/projects", "tbody tr"),
    ("/members", "tbody tr"),
    ("/users", "tbody tr"),
    ("/tokens", "tbody tr"),
    ("/audit", "tbody tr"),
    ("/sign-in", "input"),
)

OUT_OF_REACH = """(main, width) => {
  const isWithinReach = (element, right) => {
    for (let at = element; at; at = at.parentElement) {
      const {overflowX, textOverflow} = getComputedStyle(at);
      if (overflowX === "auto" || overflowX === "scroll" || textOverflow === "ellipsis") return true;
      if (overflowX !== "visible" && right > at.getBoundingClientRect().right + 1) return false;
    }
    return right <= width;
  };
  const cut = [];
  for (const element of main.querySelectorAll("*")) {
    const text = [...element.childNodes].find((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !element.checkVisibility() || element.closest(".hidden-text, option")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const {right} = range.getBoundingClientRect();
    if (!isWithinReach(element, right)) cut.push(`${Math.round(right)} ${element.outerHTML.slice(0, 160)}`);
  }
  return cut;
}"""
"""Texts that are cut off and that neither a scrolling part nor an ellipsis shows."""


def test_pages_are_readable_at_400_pixels(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    site.canned.names = LONG_NAMES
    site.canned.steps = 2_000
    site.canned.artifacts["figures/loss.txt"] = site.canned.artifacts[LONG_NAMES.file] = b"text"
    page.set_viewport_size({"width": WIDTH, "height": 800})
    for path, last in PAGES:
        page.goto(site.address + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator(last).first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert page.locator("html").evaluate("element => element.scrollWidth") <= WIDTH, path
        assert page.locator("body").evaluate(OUT_OF_REACH, WIDTH) == [], path


def test_the_link_of_the_page_is_in_sight_in_the_row_of_pages(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.set_viewport_size({"width": WIDTH, "height": 800})
    page.goto(f"{site.address}/audit")
    expect(page.get_by_role("link", name="Audit")).to_be_in_viewport(ratio=0.9)
