"""The pages of sweeps, in a browser, on studies of Optuna that a hub keeps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import optuna
import pytest

from skyward import hub as hub_client
from tests.hub.ui.conftest import Worked

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def study(worked: Worked) -> optuna.Study:
    """A sweep of 24 trials, of which the rate matters, the layers hardly, and the name not at all."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = hub_client.optuna_storage(worked.address)
    sampler = optuna.samplers.RandomSampler(seed=1)
    study = optuna.create_study(storage=storage, study_name="digits", sampler=sampler, direction="maximize")
    storage.set_study_system_attr(storage.get_study_id_from_name("digits"), "study:metric_names", ["accuracy"])
    study.optimize(objective, n_trials=24)
    return study


def objective(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
    layers = trial.suggest_int("layers", 1, 8)
    trial.suggest_categorical("optimizer", ["adam", "sgd", None])
    trial.report(rate, 1)
    if trial.number % 6 == 5:
        raise optuna.TrialPruned
    return 1.0 - abs(rate - 0.1) + 0.001 * layers


def test_a_sweep_shows_its_best_trial_history_slices_and_importance(
    worked: Worked, study: optuna.Study, page: Page
) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/sweeps")
    row = page.get_by_role("row").filter(has_text="digits")
    expect(row).to_contain_text("maximize accuracy")
    row.get_by_role("link", name="digits").click()
    best = page.get_by_role("region", name="Best trial")
    expect(best.get_by_role("heading")).to_have_text(f"Best: trial {study.best_trial.number}")
    expect(best).to_contain_text(study.best_params["optimizer"] or "null")
    for name in ("History of accuracy", "Parallel coordinates", "accuracy by rate", "accuracy by optimizer"):
        plot = page.get_by_role("img", name=name, exact=True)
        expect(plot).to_have_attribute("data-drawn", "true")
    importance = page.get_by_label("Importance", exact=True)
    expect(importance.locator("dt").first).to_have_text("rate")
    rows = page.get_by_role("table", name="Trials").get_by_role("row")
    expect(rows).to_have_count(len(study.trials) + 1)
    expect(rows.nth(1).get_by_role("cell").first).to_have_text(str(study.best_trial.number))
    expect(rows.filter(has_text="pruned")).to_have_count(4)


def test_a_trial_that_ends_is_on_the_page_without_a_reload(worked: Worked, study: optuna.Study, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/sweeps")
    page.get_by_role("link", name="digits").click()
    rows = page.get_by_role("table", name="Trials").get_by_role("row")
    expect(rows).to_have_count(len(study.trials) + 1)
    study.enqueue_trial({"rate": 0.1, "layers": 8, "optimizer": "sgd"})
    study.optimize(objective, n_trials=1)
    best = page.get_by_role("region", name="Best trial")
    expect(best.get_by_role("heading")).to_have_text(f"Best: trial {study.trials[-1].number}")
    expect(rows.nth(1)).to_contain_text("1.008")


def test_a_sweep_of_two_objectives_shows_the_trials_that_no_other_one_beats(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    storage = hub_client.optuna_storage(worked.address)
    study = optuna.create_study(storage=storage, study_name="two", directions=["minimize", "maximize"])
    for x in (0.0, 0.5, 1.0):
        study.add_trial(
            optuna.trial.create_trial(
                params={"x": x},
                distributions={"x": optuna.distributions.FloatDistribution(0, 1)},
                values=[x, -abs(x - 0.5)],
            )
        )
    page.goto(f"{worked.address}/sweeps")
    page.get_by_role("link", name="two", exact=True).click()
    expect(page.get_by_role("main")).to_contain_text("2 trials that no other one beats")
    expect(page.get_by_role("main")).to_contain_text("Not available: It takes 4 completed trials to tell")
    page.get_by_role("button", name="value 2").click()
    expect(page).to_have_url(re.compile("objective=1"))
    expect(page.get_by_role("img", name="History of value 2")).to_be_visible()


def test_a_sweep_of_skyward_shows_its_state_and_configuration_and_is_stopped(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    config = {"search_space": {"rate": [0.1, 0.2]}, "strategy": "grid", "objective": {"metric": "loss"}}
    sweep = worked.workers.post("/v1/hpo", {"name": "grid", "key": "grid", "config": config})["id"]
    job = worked.workers.submit("search", devices=8, accelerator="H100", sweep=sweep)
    run = worked.workers.post("/v1/runs", {"experiment": "search", "name": "first"})["id"]
    distribution = '{"name": "CategoricalDistribution", "attributes": {"choices": [0.1, 0.2]}}'
    trial = {"params": {"rate": {"value": 1, "distribution": distribution}}, "values": [0.25]}
    attributes = {"run": f'"{run}"', "stopped_by": '"patience"'}
    body = {"key": "first", "state": "completed", "user_attrs": attributes, **trial}
    worked.workers.post(f"/v1/sweeps/{sweep}/trials", body)
    page.goto(f"{worked.address}/sweeps")
    expect(page.get_by_role("row").filter(has_text="minimize loss")).to_contain_text("queued")
    page.get_by_role("link", name="grid", exact=True).click()
    main = page.get_by_role("main")
    expect(main.get_by_role("link", name=job[:8])).to_have_attribute("href", f"/jobs/{job}")
    expect(main.get_by_role("definition").filter(has_text="grid")).to_be_visible()
    row = page.get_by_role("table", name="Trials").get_by_role("row").nth(1)
    expect(row.get_by_role("link", name="0", exact=True)).to_have_attribute("href", f"/runs/{run}")
    expect(row.get_by_title("patience")).to_have_text("completed")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".head")).to_contain_text("stopped")
    assert worked.workers.status(job) == "cancelled"
    page.goto(f"{worked.address}/jobs/{job}")
    page.get_by_role("link", name=f"sweep {sweep}").click()
    expect(page).to_have_url(f"{worked.address}/sweeps/{sweep}")
