"""The pages on a real hub: sign-in, runs, live points, commands.

A test asks for `page` last, so that the browser leaves before the server stops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from skyward.testing.hub import HubServer
from tests.few_modules import LEAN

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_signed_in_browser_follows_a_run(hub: HubServer, owner: httpx.Client, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{hub.url}/runs")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    user = owner.get("/v1/me").json()["user"]
    page.goto(owner.post(f"/v1/users/{user}/link").json()["link"])
    expect(page).to_have_url(f"{hub.url}/experiments")

    made = owner.post("/v1/runs", json={"experiment": "pretraining", "name": "first", "params": {"lr": 0.1}}).json()
    metrics = [{"key": "loss", "value": 1 / (step + 1), "step": step} for step in range(10)]
    assert owner.post(f"/v1/runs/{made['id']}/metrics", json={"metrics": metrics}).is_success
    page.goto(f"{hub.url}/runs?filter=params.lr+=+'0.1'")
    page.get_by_role("link", name="first", exact=True).click()
    card = page.get_by_role("article", name="loss", exact=True)
    expect(card).to_have_attribute("data-points", "10")
    sent = time.monotonic()
    point = {"key": "loss", "value": 0.0625, "step": 10}
    assert owner.post(f"/v1/runs/{made['id']}/metrics", json={"metrics": [point]}).is_success
    expect(card.locator(".last")).to_have_text("0.0625")
    print(f"on the page after {time.monotonic() - sent:.2f} s")

    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_test_id("command")).to_have_text("save: waiting")
    assert [one["action"] for one in owner.get(f"/v1/runs/{made['id']}/commands").json()["commands"]] == ["save"]


@pytest.mark.timeout(200)  # a process that imports torch
def test_the_buttons_of_a_run_save_and_stop_a_training(
    hub: HubServer, owner: httpx.Client, tmp_path: Path, signed_in: Page
) -> None:
    from playwright.sync_api import expect

    address = {"SKYWARD_HUB_URL": hub.url, "SKYWARD_HUB_TOKEN": hub.token, "SKYWARD_HUB_SPOOL": str(tmp_path / "spool")}
    command = [sys.executable, "-m", "tests.hub.client.training", "steered", str(tmp_path / "output")]
    environment = {**os.environ, **address, "PYTHONPATH": str(LEAN)}
    training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    page = signed_in
    try:
        page.goto(f"{hub.url}/runs")
        page.get_by_role("link", name="steered", exact=True).click(timeout=120_000)
        expect(page.get_by_role("article", name="loss", exact=True).first).to_be_visible(timeout=60_000)
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Save").click()
        shown = page.get_by_test_id("command")
        expect(shown).to_contain_text("save: saved at step", timeout=30_000)
        (saved,) = (tmp_path / "output").glob("checkpoint-*")
        page.get_by_role("link", name="Checkpoints").click()
        expect(page.get_by_role("row").last).to_contain_text(saved.name)
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        expect(shown).to_contain_text("stop: stopping at step", timeout=30_000)
        assert training.wait(60) == 0
        expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)  # the page shows that it is over
        expect(page.locator(".head")).to_contain_text("completed")
    finally:
        training.kill()
        training.wait()


def test_each_page_shows_a_new_hub_without_a_problem(open_hub: HubServer, page: Page) -> None:
    from playwright.sync_api import expect

    for path in (
        "/experiments",
        "/runs",
        "/jobs",
        "/sweeps",
        "/capacity",
        "/usage",
        "/pools",
        "/projects",
        "/members",
        "/users",
        "/tokens",
        "/audit",
    ):
        page.goto(open_hub.url + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("note")).to_contain_text("--no-auth")
        expect(page.locator("main .card > *, main .empty").first).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_an_owner_makes_a_user_who_signs_in_by_the_link_and_is_disabled(
    hub: HubServer, owner: httpx.Client, signed_in: Page
) -> None:
    from playwright.sync_api import expect

    page = signed_in
    page.get_by_role("link", name="Users").click()
    page.get_by_role("button", name="New user").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("grace")
    dialog.get_by_role("button", name="Create").click()
    link = page.get_by_role("region", name="New user").locator("pre").inner_text()
    code = link.partition("#code=")[2]
    with httpx.Client(base_url=hub.url, headers={"Origin": hub.url}) as grace:
        assert grace.post("/v1/session", json={"code": code}).is_success
        assert grace.post("/v1/session", json={"code": code}).status_code == 401
    page.get_by_role("button", name="Disable grace").click()
    page.get_by_role("dialog").get_by_role("button", name="Disable").click()
    expect(page.get_by_role("row", name="grace")).to_contain_text("Disabled")
    users = {user["name"]: user["disabled_at"] for user in owner.get("/v1/users").json()["users"]}
    assert users["grace"] is not None


def test_a_token_is_made_with_a_role_shown_once_and_revoked(
    hub: HubServer, owner: httpx.Client, signed_in: Page
) -> None:
    from playwright.sync_api import expect

    page = signed_in
    page.get_by_role("link", name="Tokens").click()
    page.get_by_role("button", name="New token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("laptop")
    dialog.get_by_label("May do at most").select_option("viewer")
    dialog.get_by_role("button", name="Create").click()
    lines = page.locator(".paste pre").inner_text()
    token = next(line.partition("=")[2] for line in lines.splitlines() if "SKYWARD_HUB_TOKEN" in line)
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{hub.url}/v1/me", headers=headers).json()["role"] == "viewer"
    page.get_by_role("button", name="Revoke laptop").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("row", name="laptop")).to_have_count(0)
    assert httpx.get(f"{hub.url}/v1/me", headers=headers).status_code == 401


def test_a_run_shows_where_it_comes_from_and_what_it_cost(hub: HubServer, owner: httpx.Client, signed_in: Page) -> None:
    from playwright.sync_api import expect

    parent = owner.post("/v1/runs", json={"experiment": "lineage", "name": "base"}).json()["id"]
    tags = {"skyward.fork.run": parent, "skyward.fork.step": "40", "mlflow.parentRunId": parent}
    child = owner.post("/v1/runs", json={"experiment": "lineage", "name": "fork", "tags": tags}).json()["id"]
    metrics = [{"key": f"system/rank{rank}/cpu_percent", "value": 50.0} for rank in range(2)]
    metrics.append({"key": "cost_usd", "value": 1.25})
    assert owner.post(f"/v1/runs/{child}/metrics", json={"metrics": metrics}).is_success
    page = signed_in
    page.goto(f"{hub.url}/runs/{child}?tab=lineage")
    expect(page.get_by_role("definition").filter(has_text="base")).to_contain_text("at step 40")
    page.get_by_role("link", name="Cost").click()
    expect(page.get_by_role("main")).to_contain_text("1.25")
    page.goto(f"{hub.url}/runs/{parent}?tab=lineage")
    expect(page.get_by_role("link", name="fork", exact=True)).to_be_visible()


def test_a_run_shows_its_output_load_checkpoints_and_evaluations(
    hub: HubServer, owner: httpx.Client, signed_in: Page
) -> None:
    from playwright.sync_api import expect

    run = owner.post("/v1/runs", json={"experiment": "parts", "name": "all"}).json()["id"]
    facts = {"path": "/checkpoints/checkpoint-40", "step": 40, "digest": "0123456789abcdef", "bytes": 2048}
    files = {"output/train.log": "epoch 1 of 3\n", "checkpoints/checkpoint-40.json": json.dumps(facts)}
    for key, text in files.items():
        owner.post(f"/v1/runs/{run}/artifacts", params={"key": key}, content=text).raise_for_status()
    names = ("eval/accuracy", "system/rank0/cpu_percent")
    metrics = [{"key": name, "value": 0.75, "step": 40} for name in names]
    owner.post(f"/v1/runs/{run}/metrics", json={"metrics": metrics}).raise_for_status()
    page = signed_in
    page.goto(f"{hub.url}/runs/{run}?tab=output")
    expect(page.locator("pre.output")).to_have_text("epoch 1 of 3")
    page.get_by_role("link", name="System").click()
    expect(page.get_by_role("article", name="cpu_percent")).to_have_attribute("data-points", "1")
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.get_by_role("row").last).to_contain_text("0123456789ab")
    page.get_by_role("link", name="Evaluations").click()
    expect(page.get_by_role("row").last).to_contain_text("0.75")


@pytest.mark.parametrize("path", ["/nothing", "/runs/1/nothing", "/ui/nothing"])
def test_an_address_without_a_page_says_where_to_go(hub: HubServer, signed_in: Page, path: str) -> None:
    from playwright.sync_api import expect

    page = signed_in
    answer = page.goto(hub.url + path)
    assert answer is not None
    assert answer.status == 404
    expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
    page.get_by_role("link", name="Go to the experiments").click()
    expect(page.get_by_role("heading", name="Experiments", exact=True)).to_be_visible()


def test_a_program_that_asks_for_no_route_gets_no_page(hub: HubServer, owner: httpx.Client) -> None:
    accepts_all = {"accept": "text/html, */*"}
    for path, headers in (("/nothing", {}), ("/v1/nothing", accepts_all), ("/api/2.0/nothing", accepts_all)):
        answer = owner.get(path, headers=headers)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"
    assert owner.get("/ui/nothing").text == "no such file\n"
