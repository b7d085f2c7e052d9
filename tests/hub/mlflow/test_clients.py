"""Unchanged clients of two MLflows log to a hub and read from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import httpx
import pytest

from skyward.testing.hub import HubServer

from .programs import NEW, OLD, ROOT, Scripts, run_program

pytestmark = pytest.mark.timeout(600)  # a test runs up to three programs, and a busy machine imports MLflow in a minute

SCRIPTS = Path(__file__).with_name("scripts")


def variables(server: HubServer) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": server.url, "MLFLOW_TRACKING_TOKEN": server.token}


@pytest.mark.parametrize("version", [OLD, NEW])
def test_fluent_api_autologging_and_commands_work_unchanged(
    version: str, scripts: Scripts, hub_server: HubServer, tmp_path: Path
) -> None:
    printed = scripts.run(version, SCRIPTS / "fluent.py", tmp_path, variables(hub_server))
    _, run, experiments, runs = (part.strip() for part in printed.split("=== "))
    run = run.removeprefix("run ")
    with httpx.Client(base_url=hub_server.url, headers=hub_server.headers) as client:
        asked = client.get("/api/2.0/mlflow/runs/get", params={"run_id": run}).json()["run"]
    assert asked["info"]["status"] == "FINISHED"
    assert "clients" in experiments
    assert run in runs


@pytest.mark.parametrize("version", [OLD, NEW])
def test_registry_works_behind_the_hubs_own_scheme(version: str, hub_server: HubServer, tmp_path: Path) -> None:
    project = f"registry-{version.partition('.')[0]}"
    with httpx.Client(base_url=hub_server.url, headers=hub_server.headers) as client:
        client.post("/v1/projects", json={"name": project}).raise_for_status()
        chosen = {
            "MLFLOW_TRACKING_URI": hub_server.url.replace("http", "skyward", 1),
            "SKYWARD_HUB_TOKEN": hub_server.token,
            "SKYWARD_HUB_PROJECT": project,
            "SKYWARD_HUB_SPOOL": str(tmp_path / "spool"),
        }
        script = [str(SCRIPTS / "registry.py"), sysconfig.get_path("purelib"), str(ROOT)]
        run_program(version, ["python", *script], tmp_path, chosen)
        asked = client.get("/v1/models", params={"project": project}).raise_for_status().json()
    assert [model["name"] for model in asked["models"]] == ["iris"]


def test_trainer_of_hugging_face_and_logger_of_lightning_work_unchanged(
    scripts: Scripts, hub_server: HubServer, tmp_path: Path
) -> None:
    packages = sysconfig.get_path("purelib")
    scripts.run(NEW, SCRIPTS / "frameworks.py", tmp_path, variables(hub_server), packages)


@pytest.mark.parametrize("version", [OLD, NEW])
def test_parts_of_mlflow_that_are_not_the_hubs_are_refused_at_once(
    version: str, scripts: Scripts, hub_server: HubServer, tmp_path: Path
) -> None:
    """A client repeats some statuses for four minutes, which is longer than a script may take."""
    printed = scripts.run(version, SCRIPTS / "foreign.py", tmp_path, variables(hub_server))
    answers = dict(line.split(": ", 1) for line in printed.split("=== ")[1:])
    assert set(answers) >= {"register_prompt", "traces"}
    assert [name for name, text in answers.items() if "MLflow's own server" not in text] == []
