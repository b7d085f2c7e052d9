"""The pages of jobs, machines and their use, in a browser, on a hub that has jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skyward import hub as hub_client
from tests.hub.jobs.hub_process import HubProcess
from tests.hub.ui.conftest import Worked
from tests.hub.ui.worked import record
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_queue_shows_the_order_the_reasons_and_the_promised_devices(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/jobs")
    waiting = page.get_by_role("table", name="Waiting").get_by_role("row")
    gang = waiting.filter(has_text="large gang")
    expect(gang).to_contain_text("waits for 8 A100 on 2 nodes: ")
    expect(gang).to_contain_text("· reserved")
    expect(gang.get_by_role("cell").first).to_have_text("1")
    expect(waiting.filter(has_text="next model")).to_contain_text("no machines of this hub can run it")
    held = waiting.filter(has_text="later")
    expect(held).to_contain_text("is held; release it")
    expect(held.get_by_role("cell").first).to_have_text("–")
    lab = page.get_by_role("list", name="Devices of lab").get_by_role("listitem")
    expect(lab.filter(has_text="large gang")).to_have_count(2)
    expect(lab.filter(has_text="large gang").first).to_have_attribute("title", re.compile("reserved, 4 devices on 2"))
    running = page.get_by_role("table", name="With machines").get_by_role("row")
    # The machines of "finetune" go to a job of higher priority: its reason names that job, by a link.
    running.filter(has_text="finetune").get_by_role("link", name=re.compile("^[0-9a-f]{8}$")).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("ablation")


def test_the_queue_is_filtered_and_hears_of_a_new_job_by_itself(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/jobs?text=next+model")
    waiting = page.get_by_role("table", name="Waiting").get_by_role("row")
    expect(waiting).to_have_count(2)
    expect(waiting.nth(1)).to_contain_text("next model")
    page.get_by_label("Priority").select_option("low")
    expect(page.get_by_text("No job waits.")).to_be_visible()
    page.goto(f"{worked.address}/jobs?text=newcomer")
    expect(page.get_by_text("No job waits.")).to_be_visible()
    worked.workers.submit("newcomer", devices=8, accelerator="H100")
    expect(waiting.filter(has_text="newcomer")).to_contain_text("waits for 8 H100")
    page.get_by_role("button", name="Over").click()
    page.get_by_label("Search names and reasons").fill("broken")
    over = page.get_by_role("table", name="Over").get_by_role("row")
    expect(over.nth(1)).to_contain_text("RuntimeError: loss is not finite")


def test_a_job_shows_its_attempts_money_and_output_of_each_rank_as_it_comes(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/jobs/{worked.ids['pretrain']}")
    main = page.get_by_role("main")
    expect(main).to_contain_text("1.75 USD of 40.00 USD")
    expect(main).to_contain_text(re.compile(r"Still to come, at most1[12]\.\d\d USD"))  # 3 hours of a node for 4 USD
    attempts = page.get_by_role("list", name="Attempts").get_by_role("listitem")
    expect(attempts.and_(page.get_by_label(re.compile("^lost: ")))).to_have_count(1)
    expect(attempts.and_(page.get_by_label(re.compile("^runs: ")))).to_have_count(1)
    expect(attempts.and_(page.get_by_label(re.compile("^saved ")))).to_have_count(1)
    words = page.get_by_role("table", name="Attempts in words").get_by_role("row")
    expect(words.nth(2)).to_contain_text("NodeLost: node 0 does not answer")
    output = page.get_by_label("Output", exact=True)
    expect(output).to_contain_text("[1] step 10, loss 2.30")
    worked.workers.print(worked.ids["pretrain"], "[0] step 20, loss 1.87 ✓\n[1] step 20, loss 1.88\n")
    expect(output).to_contain_text("[0] step 20, loss 1.87 ✓")
    page.get_by_label("Rank").select_option("1")
    expect(output).to_have_text("step 10, loss 2.30\nstep 20, loss 1.88")
    page.get_by_role("button", name="Save", exact=True).click()
    until(lambda: worked.workers.beat(worked.ids["pretrain"]) == "save")
    worked.workers.save(worked.ids["pretrain"])
    expect(attempts.and_(page.get_by_label(re.compile("^saved ")))).to_have_count(2)


def test_the_buttons_of_a_job_hold_release_cancel_retry_and_delete_it(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    job = worked.workers.submit("steered", devices=8, accelerator="H100")
    page.goto(f"{worked.address}/jobs/{job}")
    steer = page.get_by_role("group", name="Steer the job")
    dialog = page.get_by_role("dialog")
    steer.get_by_role("button", name="Hold").click()
    expect(page.get_by_test_id("why")).to_contain_text("It is held")
    steer.get_by_role("button", name="Release").click()
    expect(page.get_by_test_id("why")).to_contain_text("waits for 8 H100")
    steer.get_by_role("button", name="Cancel job").click()
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    assert worked.workers.status(job) == "queued"
    steer.get_by_role("button", name="Cancel job").click()
    dialog.get_by_role("button", name="Cancel job").click()
    expect(page.locator(".head")).to_contain_text("cancelled")
    steer.get_by_role("button", name="Retry").click()
    dialog.get_by_role("button", name="Retry").click()
    expect(page.locator(".head")).to_contain_text("queued")
    worked.workers.post(f"/v1/jobs/{job}/cancel")
    steer.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page).to_have_url(f"{worked.address}/jobs?view=over")
    assert worked.workers.client.get(f"/v1/jobs/{job}").status_code == 404
    page.goto(f"{worked.address}/jobs/{job}")
    expect(page.get_by_role("heading", name="There is no such job")).to_be_visible()


def test_capacity_counts_devices_and_money_and_drains(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/capacity")
    row = page.get_by_role("row").filter(has=page.get_by_text("cloud", exact=True))
    expect(row).to_contain_text("2.50 USD")
    expect(row.get_by_role("img")).to_have_attribute("title", "1 used, 2 free, 0 of them stranded")
    expect(row.get_by_role("link", name=worked.ids["sample"][:8])).to_be_visible()
    row.get_by_role("button", name="Drain cloud").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(row).to_contain_text("drained")
    assert {one["name"]: one["is_draining"] for one in worked.workers.get("/v1/capacity")["sets"]}["cloud"]
    row.get_by_role("button", name="Open cloud").click()
    expect(row).to_contain_text("open")


def test_usage_by_project_and_month_is_a_table_and_a_file(worked: Worked, page: Page) -> None:
    from playwright.sync_api import expect

    page.goto(f"{worked.address}/usage")
    rows = page.get_by_role("table", name="By project and month").get_by_role("row")
    expect(rows.filter(has_text="A100")).to_contain_text("default")
    expect(rows.filter(has_text="A100")).to_contain_text(re.compile(r"1\.75"))
    expect(page.get_by_role("img", name="Device-hours of default")).to_be_visible()
    quotas = page.get_by_role("table", name="Quotas").get_by_role("row")
    expect(quotas.filter(has_text="project default")).to_contain_text(re.compile(r"A100: \d+ of 16"))
    expect(quotas.filter(has_text="project default")).to_contain_text("of 500.00")
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    head, *lines = Path(saved.value.path()).read_text().splitlines()
    assert head == "project,month,kind,device_hours,cost_usd,attempts"
    (line,) = [line for line in lines if ",A100," in line]
    assert line.startswith("default,")
    assert line.split(",")[4] == "1.75"


@pytest.fixture
def real_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """A hub in a process, with a launcher that starts runners."""
    with HubProcess(tmp_path / "hub") as process:
        monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))
        hub_client.connect(process.url, token=process.token)
        yield process
        hub_client.disconnect()


@pytest.mark.timeout(240)
def test_a_real_job_is_followed_from_the_queue_to_its_value(real_hub: HubProcess, tmp_path: Path, page: Page) -> None:
    from playwright.sync_api import expect

    with real_hub.client() as owner:
        user = owner.get("/v1/me").json()["user"]
        link = owner.post(f"/v1/users/{user}/link").json()["link"]
    page.goto(link)
    page.wait_for_url("**/experiments")
    job = hub_client.submit(record(str(tmp_path / "go")), name="real")
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("table", name="With machines").get_by_role("link", name="real").click(timeout=60_000)
    expect(page.get_by_label("Output", exact=True)).to_contain_text("begins", timeout=90_000)
    expect(page.locator(".head")).to_contain_text("running")
    (tmp_path / "go").write_text("42")
    expect(page.locator(".head")).to_contain_text("completed", timeout=60_000)
    expect(page.get_by_label("Output", exact=True)).to_contain_text("ends")
    expect(page.get_by_role("main")).to_contain_text(f'hub.job("{job.id}").result()')
    assert job.result(60) == "42"
    page.get_by_role("table", name="Runs").get_by_role("link", name="of the job").click()
    expect(page.locator(".head")).to_contain_text("completed")
    real_hub.until_clean()
