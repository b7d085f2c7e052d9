"""`skyward hub up`, as a user starts and stops it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyward.cli import main


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "skyward", "hub", "up", "--data", str(folder), "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> int:
    process.send_signal(number)
    with process:
        return process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hub_remembers_runs_and_its_token_over_a_restart(tmp_path: Path, number: signal.Signals) -> None:
    process, first = start(tmp_path)
    headers = {"Authorization": f"Bearer {first['environment']['SKYWARD_HUB_TOKEN']}"}
    run = httpx.post(f"{first['url']}/v1/runs", json={"name": "kept"}, headers=headers).raise_for_status().json()
    assert stop(process, number) == 0
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert not any(path.stat().st_mode & 0o077 for path in tmp_path.iterdir())  # no other user reads what is here
    process, second = start(tmp_path)
    assert second["token"] == first["token"]
    assert second["link"] != first["link"]
    answer = httpx.get(f"{second['url']}/v1/runs/{run['id']}", headers=headers)
    assert answer.raise_for_status().json()["name"] == "kept"
    assert stop(process) == 0


def test_second_hub_on_a_folder_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    command = [sys.executable, "-m", "skyward", "hub", "up", "--data", str(tmp_path), "--port", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert str(process.pid) in second.stderr
    assert stop(process) == 0


def test_launcher_of_an_unknown_provider_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["hub", "launcher", "--provider", "local", "--provider", "asw", "--url", "http://nowhere"]) == 1
    assert "provider='asw': unknown; use one of 'aws', 'local'" in capsys.readouterr().err


def test_hub_names_a_folder_that_it_cannot_make() -> None:
    command = [sys.executable, "-m", "skyward", "hub", "up", "--data", "/proc/nowhere", "--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("skyward: data='/proc/nowhere': cannot be written (No such file or directory); ")


def test_hub_without_authentication_lets_local_programs_in(tmp_path: Path) -> None:
    process, info = start(tmp_path, "--no-auth")
    assert info["token"] is None
    assert httpx.get(f"{info['url']}/v1/me").json()["authentication"] is False
    assert stop(process) == 0


def test_hub_shows_a_folder_of_runs_made_without_a_server(tmp_path: Path) -> None:
    script = (
        "from skyward import hub\nwith hub.start_run(run_name='offline') as run: run.log_metrics({'loss': 0.5}, step=1)"
    )
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SKYWARD_HUB_")}
    environment["SKYWARD_HUB_SPOOL"] = str(tmp_path / "runs")
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=True)
    for name in ("first", "second"):  # a folder can be shown by more than one hub
        process, info = start(tmp_path / name, "--runs", str(tmp_path / "runs"))
        headers = {"Authorization": f"Bearer {info['token']}"}
        runs = httpx.get(f"{info['url']}/v1/runs", headers=headers).raise_for_status().json()["runs"]
        assert [(run["name"], run["status"], run["metrics"][0]["value"]) for run in runs] == [
            ("offline", "completed", 0.5)
        ]
        assert stop(process) == 0


def test_hub_refuses_a_folder_without_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyward", "hub", "up", "--data", str(tmp_path / "hub"), "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "has no run in it" in done.stderr
