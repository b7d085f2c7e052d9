"""The pages of sweeps, in a browser, on studies of Optuna that a hub keeps."""

from __future__ import annotations

import json
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


def start_sweep(worked: Worked, name: str) -> int:
    space = {"rate": {"type": "uniform", "min": 0, "max": 1}}
    config = {"search_space": space, "strategy": "random", "objective": {"metric": "loss"}}
    return int(worked.workers.post("/v1/hpo", {"name": name, "key": name, "config": config})["id"])


def add_trial(worked: Worked, sweep: int, number: int, **attributes: str) -> int:
    user = {name: json.dumps(text) for name, text in attributes.items()}
    body = {"key": str(number), "state": "running", "user_attrs": user}
    return int(worked.workers.post(f"/v1/sweeps/{sweep}/trials", body)["id"])


def end_trial(worked: Worked, trial: int, **end: object) -> None:
    answer = worked.workers.client.patch(f"/v1/trials/{trial}", json={"key": f"end {trial}", **end})
    answer.raise_for_status()


def test_the_job_of_a_sweep_shows_its_trials_with_their_jobs_as_they_go_on(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    workers = worked.workers
    workers.declare({"name": "small", "provider": {"type": "local"}, "nodes": 1, "accelerator": "T4"})
    sweep = start_sweep(worked, "over-jobs")
    driver = workers.submit("over-jobs", nodes=0, accelerator="T4", sweep=sweep, trials={"accelerator": "T4"})
    workers.run(driver)
    path = f"/v1/jobs/{driver}/attempts/1/trials"
    trials = [add_trial(worked, sweep, number, run="0" * 32) for number in range(2)]
    jobs = [workers.post(path, {"number": number, "task": {}})["id"] for number in range(2)]
    workers.run(jobs[0])
    page.goto(f"{worked.address}/jobs/{driver}")
    rows = page.get_by_role("table", name="Trials").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("waits for 1 T4: 0 free")
    expect(rows.nth(2)).to_contain_text("running")
    workers.save(jobs[0])
    expect(rows.nth(2).get_by_role("cell").nth(5)).to_have_text(re.compile("just now|ago"))
    end_trial(worked, trials[0], state="completed", values=[0.25])
    workers.end(jobs[0], "completed", cost_usd=0.5)
    expect(rows.nth(2)).to_contain_text(re.compile("completed0.25"))
    expect(rows.nth(2)).to_contain_text("0.5000 USD")
    expect(rows.nth(2).get_by_role("link", name="0", exact=True)).to_have_attribute("href", f"/runs/{'0' * 32}")
    rows.nth(2).get_by_role("link", name="over-jobs-0").click()
    expect(page).to_have_url(f"{worked.address}/jobs/{jobs[0]}")
    expect(page.get_by_role("heading", level=1)).to_have_text("over-jobs-0")
    expect(page.get_by_role("table", name="Trials")).to_have_count(0)
    workers.post(f"/v1/jobs/{driver}/cancel")
    workers.end(driver, "stopped")


def test_the_job_of_a_sweep_shows_the_saves_of_trials_that_are_its_calls(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    sweep = start_sweep(worked, "in-pool")
    job = worked.workers.submit("in-pool", devices=None, nodes=1, sweep=sweep)
    worked.workers.run(job)
    trials = [add_trial(worked, sweep, number) for number in range(2)]
    note = {"number": 1, "path": "/data/trial-00001/checkpoint-20", "step": 20}
    worked.workers.beat(job, saves=[note])
    end_trial(worked, trials[0], state="failed", user_attrs={"error": '"ValueError: rate is too high"'})
    page.goto(f"{worked.address}/jobs/{job}")
    rows = page.get_by_role("table", name="Trials").get_by_role("row")
    expect(rows.nth(1)).to_contain_text(re.compile("^1runningstep 20, "))
    expect(rows.nth(1).get_by_title("/data/trial-00001/checkpoint-20")).to_be_visible()
    expect(rows.nth(2)).to_contain_text("failedValueError: rate is too high")
    end_trial(worked, trials[1], state="completed", values=[0.125])
    expect(rows.nth(1)).to_contain_text("completed0.125")
    worked.workers.end(job, "completed")
