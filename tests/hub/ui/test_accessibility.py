"""Everybody can use the pages: each control has a name, the keyboard reaches them, and text has contrast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hub.ui.canned import run_id
from tests.hub.ui.conftest import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUNS = "&".join(f"run={run_id(i)}" for i in range(3))
PATHS = (
    *("/experiments", "/runs", f"/runs/{run_id(0)}", f"/runs/{run_id(0)}?tab=overview"),
    *(f"/compare?{RUNS}", f"/compare?{RUNS}&part=scatter", "/projects", "/members", "/users", "/tokens"),
    *("/audit", "/pools", "/pools/p1", "/sign-in"),
)
LEAST_CONTRAST = 4.5
"""Source: WCAG 2.2, success criterion 1.4.3, level AA."""

NAMELESS = """controls => controls.filter((control) => {
  const labels = [...(control.labels ?? [])].map((label) => label.innerText).join("");
  const name = control.getAttribute("aria-label") || labels || control.innerText || control.title;
  return control.checkVisibility() && !name.trim();
}).map((control) => control.outerHTML.slice(0, 200))"""

FAINT = """(main, least) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const numbers = (color) => {
    if (!known.has(color)) known.set(color, drawn(color));
    return known.get(color);
  };
  const drawn = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [red, green, blue] = numbers(color).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (numbers(color)[3] === 255) return color;
    }
    return "white";
  };
  const faint = [];
  for (const element of main.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || !element.checkVisibility() || element.closest(":disabled, .hidden-text, .deleted, svg")) continue;
    const [high, low] = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < least) faint.push(`${contrast.toFixed(2)} ${element.outerHTML.slice(0, 120)}`);
  }
  return faint;
}"""

DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Ends when the parts of a page whose colors are not in its style sheets have followed the theme, too."""


def faint_texts(page: Page) -> list[str]:
    """Return the texts of an open page that have too little contrast in one of its themes."""
    found = []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_function("theme => document.documentElement.dataset.theme === theme", arg=theme)
        page.evaluate(DRAWN)
        found += page.locator("body").evaluate(FAINT, LEAST_CONTRAST)
    return found


def test_controls_have_names_and_text_has_contrast(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    for path in PATHS:
        page.goto(site.address + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert page.locator("button, a[href], input, select, textarea, summary").evaluate_all(NAMELESS) == [], path
        assert faint_texts(page) == [], path


def test_the_keyboard_opens_a_run_and_selects_runs_to_compare(page: Page, site: Site) -> None:
    from playwright.sync_api import expect

    page.goto(f"{site.address}/runs")
    expect(page.get_by_role("row", name="brave-otter-0")).to_be_visible()
    page.get_by_role("grid", name="Runs").focus()
    for key in ("ArrowDown", "Space", "ArrowDown", "Space"):
        page.keyboard.press(key)
    expect(page.get_by_text("2 runs selected")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.address}/runs/{run_id(1)}")
