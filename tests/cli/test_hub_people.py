"""`skyward hub token | user | project | status`, and the lists of runs, against a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyward import hub
from skyward.cli import main
from skyward.hub.store.schema import HEAD
from skyward.testing.hub import HubServer

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(autouse=True)
def name_server(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
    monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
    monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line with `--json` and return what it printed."""

    def run(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_token_is_made_used_and_revoked(command: Command, server: HubServer) -> None:
    made = command("hub", "token", "create", "ci", "--role", "viewer", "--expires-in", "30d")
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert httpx.get(f"{server.url}/v1/me", headers=headers).json()["role"] == "viewer"
    listed = {token["id"]: token for token in command("hub", "token", "list")}
    assert listed[made["id"]]["name"] == "ci"
    assert "token" not in listed[made["id"]]
    command("hub", "token", "revoke", made["id"])
    assert httpx.get(f"{server.url}/v1/me", headers=headers).status_code == 401


def test_user_gets_a_link_that_signs_in_once(command: Command, server: HubServer) -> None:
    link = command("hub", "user", "add", "ada")["link"]
    code = {"code": link.partition("#code=")[2]}
    assert httpx.post(f"{server.url}/v1/session", json=code).status_code == 200
    assert httpx.post(f"{server.url}/v1/session", json=code).status_code == 401
    assert command("hub", "user", "link", "ada")["link"] != link
    assert command("hub", "user", "add", "robot", "--service")["link"] is None
    command("hub", "user", "remove", "ada")
    assert {user["name"]: user["disabled_at"] is None for user in command("hub", "user", "list")} == {
        "ada": False,
        "owner": True,
        "robot": True,
    }


def test_project_has_members_with_roles(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("hub", "user", "add", "grace")
    command("hub", "project", "create", "vision")
    command("hub", "project", "add-member", "vision", "grace", "--role", "admin")
    assert [(row["user"], row["role"]) for row in command("hub", "project", "members", "vision")] == [
        ("grace", "admin")
    ]
    assert main(["hub", "project", "list"]) == 0
    assert "vision" in capsys.readouterr().out
    command("hub", "project", "remove-member", "vision", "grace")
    command("hub", "project", "remove", "vision")
    assert [row["name"] for row in command("hub", "project", "list")] == ["default"]


def test_project_has_limits(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("hub", "project", "create", "small")
    command("hub", "project", "limit", "small", "artifact_bytes", "2MiB")
    command("hub", "project", "limit", "small", "runs", "3")
    command("hub", "project", "limit", "small", "runs", "none")
    assert command("hub", "project", "limits", "small") == [
        {"name": "runs", "most": None, "used": 0},
        {"name": "artifact_bytes", "most": 2 * 2**20, "used": 0},
    ]
    assert main(["hub", "project", "limit", "small", "runs", "5"]) == 0
    assert capsys.readouterr().out == "small: runs has at most 5\n"
    with pytest.raises(SystemExit) as wrong:
        main(["hub", "project", "limit", "small", "runs", "many"])
    assert (wrong.value.code, "not an amount" in capsys.readouterr().err) == (2, True)
    command("hub", "project", "remove", "small")


def test_refusal_is_one_line_and_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", "project", "members", "nowhere"]) == 1
    assert "project=nowhere" in capsys.readouterr().err
    assert main(["hub", "user", "add", "Not A Name"]) == 1
    assert "use 1 to 63 lower-case letters" in capsys.readouterr().err
    assert main(["hub", "user", "remove", "../projects/default"]) == 1
    with pytest.raises(SystemExit) as wrong:
        main(["hub", "token", "create", "ci", "--expires-in", "soon"])
    assert wrong.value.code == 2


def test_status_is_equal_over_http_and_from_the_folder(command: Command, server: HubServer) -> None:
    with hub.start_run(experiment="counted") as run:
        run.log_metrics({"loss": 0.5}, step=1)
    asked = command("hub", "status")
    assert (asked["points"] >= 1, asked["runs"] >= 1, asked["unsent"]) == (True, True, 0)
    assert asked["database"] == "sqlite"
    read = command("hub", "status", "--data", str(Path(server.settings.storage.folder).parent))
    assert read == asked


def test_backup_of_a_running_hub_comes_back_in_another_folder(
    command: Command, server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(Path(server.settings.storage.folder).parent)
    file, new = str(tmp_path / "hub.backup"), str(tmp_path / "new")
    assert command("hub", "check", "--data", data) == []
    made = command("hub", "backup", file, "--data", data)
    assert command("hub", "restore", file, "--data", new) == made
    assert command("hub", "gc", "--dry-run", "--data", new)["runs"] == 0
    assert command("hub", "gc", "--older-than", "1h", "--data", new)["blobs"] == 0
    assert command("hub", "migrate", "--data", new) == {"revision": HEAD}
    assert main(["hub", "restore", file, "--data", new]) == 1
    assert "empty hub" in capsys.readouterr().err
    assert main(["hub", "gc", "--data", data]) == 1
    assert f"process {os.getpid()} has this database open" in capsys.readouterr().err


def test_status_of_a_folder_without_a_hub_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["hub", "status", "--data", str(tmp_path)]) == 1
    assert "has no hub in it" in capsys.readouterr().err


def test_runs_are_listed_shown_and_compared(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for rate in ("0.1", "0.2"):
        with hub.start_run(run_name=f"rate {rate}", experiment="listed") as run:
            run.log_params({"lr": rate, "model": "tiny"})
            run.log_metrics({"loss": float(rate)}, step=1)
            made.append(run.id)
    assert "listed" in {row["name"] for row in command("experiment", "list")}
    listed = command("run", "list", "--experiment", "listed", "--order-by", "metrics.loss ASC")
    assert [row["id"] for row in listed] == made
    assert command("run", "show", made[0])["params"] == {"lr": "0.1", "model": "tiny"}
    compared = command("run", "compare", *made, "--metrics", "loss")
    assert compared["metrics"] == {"loss": [0.1, 0.2]}
    assert compared["params"] == {"lr": ["0.1", "0.2"]}
    assert main(["run", "compare", *made]) == 0
    assert "RATE 0.1" in capsys.readouterr().out
    assert main(["run", "show", "0" * 32]) == 1
    assert "not found" in capsys.readouterr().err
