"""Draw the pictures of the hub's pages into docs/pictures: `make pictures`. `worked.fill` fills their hub."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import optuna
from playwright.sync_api import sync_playwright

from skyward import hub
from skyward.testing.hub import HubServer
from tests.browser import find_browser
from tests.hub.ui.worked import Workers, fill

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 860


def main() -> None:
    """Draw all of them."""
    browser_path = find_browser()
    if browser_path is None:
        raise SystemExit("no browser here: install chromium or google-chrome")
    with (
        tempfile.TemporaryDirectory() as folder,
        HubServer(Path(folder) / "hub", with_auth=False) as server,
        Workers(server.url) as workers,
        sync_playwright() as playwright,
    ):
        ids = fill(workers)
        sweep = search(server.url)
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        for name, path, last in (
            ("jobs", "/jobs", "tbody tr"),
            ("job", f"/jobs/{ids['pretrain']}", "pre.output"),
            ("sweep", f"/sweeps/{sweep}", ".importance dd"),
        ):
            page.goto(server.url + path)
            page.locator(last).first.wait_for()
            page.locator(".banner").evaluate("banner => banner.remove()")  # of a hub without authentication
            page.screenshot(path=PICTURES / f"hub-{name}.png")
            print(f"docs/pictures/hub-{name}.png", file=sys.stderr)
        browser.close()


def search(url: str) -> int:
    """Make a sweep of 40 trials and return its number."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=2)
    storage = hub.optuna_storage(url)
    study = optuna.create_study(storage=storage, study_name="digits", sampler=sampler, direction="maximize")
    number = storage.get_study_id_from_name("digits")
    storage.set_study_system_attr(number, "study:metric_names", ["accuracy"])
    study.optimize(accuracy, n_trials=40)
    return number


def accuracy(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    layers = trial.suggest_int("layers", 1, 6)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    trial.suggest_categorical("optimizer", ["adamw", "sgd", "lion"])
    far = float(abs(rate**0.1 - 0.003**0.1))
    return 0.98 - 1.2 * far - 0.01 * abs(layers - 4) - 0.05 * dropout


if __name__ == "__main__":
    main()
