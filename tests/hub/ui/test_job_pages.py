"""The pages of jobs, machines and sweeps for everybody: on a phone, by name, and with contrast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna
import pytest

from skyward import hub as hub_client
from tests.hub.ui.conftest import Worked
from tests.hub.ui.test_accessibility import NAMELESS, faint_texts
from tests.hub.ui.test_narrow import OUT_OF_REACH, WIDTH

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = "a-name-without-a-place-for-a-break-" * 5


@pytest.fixture(scope="module")
def paths(worked: Worked) -> list[tuple[str, str]]:
    """Paths, each with a locator of the part that arrives last. Names are as long as a hub takes them."""
    job = worked.workers.submit(LONG, devices=8, accelerator="H100", labels=[LONG], code_folder=LONG)
    study = optuna.create_study(storage=hub_client.optuna_storage(worked.address), study_name=LONG)
    distribution = optuna.distributions.CategoricalDistribution([LONG, "b"])
    for i in range(6):
        choice = distribution.choices[i % 2]
        trial = optuna.trial.create_trial(params={LONG: choice}, distributions={LONG: distribution}, value=float(i))
        study.add_trial(trial)
    sweep = worked.workers.get("/v1/sweeps")["sweeps"][-1]["id"]
    return [
        ("/jobs", "tbody tr"),
        ("/jobs?view=over", "tbody tr"),
        (f"/jobs/{worked.ids['pretrain']}", "pre.output"),
        (f"/jobs/{worked.ids['broken']}", "pre.output"),
        (f"/jobs/{job}", ".facts dd"),
        ("/capacity", "tbody tr"),
        ("/usage", "tbody tr"),
        ("/sweeps", "tbody tr"),
        (f"/sweeps/{sweep}", "[data-drawn]"),
    ]


def test_controls_have_names_and_text_has_contrast(worked: Worked, paths: list[tuple[str, str]], page: Page) -> None:
    from playwright.sync_api import expect

    for path, last in paths:
        page.goto(worked.address + path)
        expect(page.locator(last).first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert page.locator("button, a[href], input, select, textarea, summary").evaluate_all(NAMELESS) == [], path
        assert faint_texts(page) == [], path


def test_pages_are_readable_at_400_pixels(worked: Worked, paths: list[tuple[str, str]], page: Page) -> None:
    from playwright.sync_api import expect

    page.set_viewport_size({"width": WIDTH, "height": 800})
    for path, last in paths:
        page.goto(worked.address + path)
        expect(page.locator(last).first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert page.locator("html").evaluate("element => element.scrollWidth") <= WIDTH, path
        assert page.locator("body").evaluate(OUT_OF_REACH, WIDTH) == [], path
