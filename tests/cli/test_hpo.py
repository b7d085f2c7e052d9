"""`skyward hpo` against a hub in this process, which has no launcher: its sweeps wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from skyward.cli import main
from skyward.testing.hub import HubServer

Command = Callable[..., str]

PROGRAM = """
def objective(trial):
    return trial["lr"]
"""
CONFIG = """
function: sweep_objective.py:objective
search_space:
  lr: {type: log_uniform, min: 1e-5, max: 1e-1}
  optimizer: {type: choice, values: [adam, sgd]}
strategy: random
objective: {metric: loss, direction: maximize}
max_trials: 5
job: {nodes: 2, max_duration_s: 60}
"""
FLOAT = '{"name": "FloatDistribution", "attributes": {"low": 0, "high": 1, "log": false, "step": null}}'
CHOICE = '{"name": "CategoricalDistribution", "attributes": {"choices": ["adam", "sgd"]}}'


@pytest.fixture
def hub_of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
        yield server


@pytest.fixture
def command(hub_of_tests: HubServer, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, status: int = 0) -> str:
        assert main(arguments) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_sweep_is_started_listed_shown_and_stopped(
    command: Command, hub_of_tests: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "sweep_objective.py").write_text(PROGRAM)
    (folder / "digits.yaml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert command("hpo", "start", "--config", "digits.yaml") == "digits\n"
    assert command("hpo", "start", "--config", "digits.yaml") == "digits\n"  # it goes on, with the same job
    (row,) = json.loads(command("hpo", "list", "--json"))
    (job,) = json.loads(command("job", "list", "--json"))
    assert (row["status"], row["job"], row["directions"], row["metrics"]) == (
        "queued",
        job["id"],
        ["maximize"],
        ["loss"],
    )
    assert (job["spec"]["sweep"], job["spec"]["nodes"], job["priority"]) == (row["id"], 2, "low")
    assert job["spec"]["is_preemptible"]
    with httpx.Client(base_url=hub_of_tests.url, headers=hub_of_tests.headers) as client:
        for number, (value, choice) in enumerate([(0.25, 0), (0.75, 1)]):
            body = {
                "key": f"trial-{number}",
                "state": "completed",
                "values": [value],
                "params": {
                    "lr": {"value": value, "distribution": FLOAT},
                    "optimizer": {"value": choice, "distribution": CHOICE},
                },
            }
            client.post(f"/v1/sweeps/{row['id']}/trials", json=body).raise_for_status()
    assert "best      0.75 (trial 1)" in command("hpo", "show", "digits")
    assert command("hpo", "results", "digits", "--top", "1").splitlines()[1].split() == [
        "1",
        "completed",
        "0.75",
        "lr=0.75",
        "optimizer=sgd",
    ]
    assert [trial["number"] for trial in json.loads(command("hpo", "results", str(row["id"]), "--json"))] == [1, 0]
    command("hpo", "stop", "digits")
    assert "stopped" in command("hpo", "list")
    assert json.loads(command("job", "list", "--json"))[0]["status"] == "cancelled"


def test_wrong_files_are_refused_in_words(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    assert "cannot be read" in command("hpo", "start", "--config", str(file), status=1)
    file.write_text("[1]")
    assert "is no object" in command("hpo", "start", "--config", str(file), status=1)
    file.write_text("search_space: {}")
    assert "write such as train.py:objective" in command("hpo", "start", "--config", str(file), status=1)
    assert "no such sweep" in command("hpo", "show", "nothing", status=1)
