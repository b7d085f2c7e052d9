"""`skyward job` and `skyward capacity` against a hub in this process, which has no launcher: its jobs wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.cli import main
from skyward.testing.hub import HubServer

Command = Callable[..., str]

PROGRAM = """
import skyward as sky


@sky.compute
def double(number: int) -> int:
    return 2 * number
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)

        def run(*arguments: str, status: int = 0) -> str:
            assert main(arguments) == status
            captured = capsys.readouterr()
            return captured.err if status else captured.out

        yield run


def test_job_is_submitted_shown_held_and_cancelled(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "doubling_job.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    job = command("job", "submit", "doubling_job.py:double", "--args", "[21]", "--nodes", "2", "--hold").strip()
    (row,) = json.loads(command("job", "list", "--json"))
    assert (row["id"], row["name"], row["status"], row["spec"]["nodes"]) == (job, "double", "queued", 2)
    assert command("job", "why", job) == "queued: is held; release it\n"
    command("job", "release", job)
    assert json.loads(command("job", "show", job, "--json"))["is_held"] is False
    assert "queued" in command("job", "show", job)
    command("job", "cancel", job)
    assert "is over already; see" in command("job", "cancel", job, status=1)
    assert command("job", "logs", job) == ""
    assert job in command("job", "list", "--status", "cancelled")
    command("job", "delete", job)
    assert "no such job" in command("job", "show", job, status=1)
    assert "write train.py:main" in command("job", "submit", "doubling_job.py", status=1)
    assert "is not JSON" in command("job", "submit", "doubling_job.py:double", "--args", "21,", status=1)


def test_machines_are_declared_drained_and_removed(command: Command) -> None:
    provider = json.dumps({"type": "ssh", "hosts": ["a", "b"]})
    shape = ["--nodes", "2", "--accelerator", "A100", "--devices", "8", "--label", "fast"]
    command("capacity", "add", "lab", "--provider", provider, *shape)
    command("capacity", "drain", "lab")
    (row,) = json.loads(command("capacity", "list", "--json"))
    assert (row["name"], row["is_draining"], row["machines"]["provider"]["hosts"]) == ("lab", True, ["a", "b"])
    assert row["machines"]["labels"] == ["fast"]
    assert command("capacity", "list").splitlines()[1].split() == [
        "lab",
        "ssh",
        "fixed",
        "2",
        "0",
        "0",
        "8",
        "A100",
        "draining",
    ]
    command("capacity", "undrain", "lab")
    command("capacity", "remove", "lab")
    assert "no such machine set" in command("capacity", "drain", "lab", status=1)


def test_quotas_are_set_shown_and_removed(command: Command) -> None:
    assert command("capacity", "quotas") == "no quotas: jobs have no limits\n"
    command("capacity", "quota", "default", "--weight", "2", "--devices", "A100=16", "--usd-per-month", "5000")
    (row,) = json.loads(command("capacity", "quotas", "--json"))
    assert (row["holder"], row["name"], row["jobs"]) == ("project", "default", 0)
    assert (row["quota"]["weight"], row["quota"]["devices"], row["quota"]["may_borrow"]) == (2.0, {"A100": 16}, True)
    shown = command("capacity", "quotas").splitlines()[1]
    assert " ".join(shown.split()) == "project default 2 0 of 16 A100 0 0 0.00 0.00 of 5000.0"
    assert "user=nobody: not found" in command("capacity", "quota", "nobody", "--user", "--jobs", "1", status=1)
    with pytest.raises(SystemExit, match="2"):
        command("capacity", "quota", "default", "--devices", "A100")
    command("capacity", "quota", "default", "--remove")
    assert command("capacity", "quotas", "--json") == "[]\n"
