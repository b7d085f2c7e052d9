"""Named operations from end to end, and the name of a job in errors of its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward import hub
from skyward.cli import main
from skyward.errors import HubError, SlotLost
from tests.hub.jobs.calls import crash, wait_for
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

torch = pytest.importorskip("torch")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    from skyward.training.checkpoint import CheckpointCoordinator, components_of

    coordinator = CheckpointCoordinator(components_of(torch.nn.Linear(2, 1)), output_dir=tmp_path / "out")
    return coordinator.save_checkpoint(checkpoint_id=1)


def test_operation_runs_as_a_job_with_a_value(
    hub_process: HubProcess, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one["name"] for one in hub.operations()] == ["checkpoint.verify"]
    intact = hub.submit_operation("checkpoint.verify", {"path": checkpoint}, priority="low")
    command = ["job", "submit", "--operation", "checkpoint.verify", "--params", f'{{"path": "{checkpoint}/no"}}']
    assert main(command) == 0
    absent = hub.job(capsys.readouterr().out.strip())
    assert (intact.name, intact.result(100)) == ("checkpoint.verify", {"path": checkpoint, "problems": []})
    assert isinstance(absent.exception(100), sky.errors.CheckpointNotFound)


def test_wrong_operations_are_refused_by_hub_and_command_line(
    hub_process: HubProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HubError, match=r"params.pth: unknown for checkpoint.verify; did you mean path\?"):
        hub.submit_operation("checkpoint.verify", {"pth": "x"})
    with pytest.raises(HubError, match=r"no such operation; did you mean checkpoint.verify\?"):
        hub.submit_operation("checkpoint.verfy")
    assert main(["job", "operations", "checkpoint.verify"]) == 0
    assert '"path"' in capsys.readouterr().out
    assert main(["job", "submit", "--operation", "checkpoint.verify", "--params", "{"]) == 1
    assert "params='{': is not JSON" in capsys.readouterr().err
    assert main(["job", "submit"]) == 1
    assert "nothing to submit" in capsys.readouterr().err


def test_shell_on_a_job_is_one_on_its_pool(
    hub_process: HubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = hub.submit(wait_for(str(tmp_path / "go")))
    until(lambda: list(job.logs(follow=False)) == ["begins"], 60)
    assert job.attempts[0].pool == f"job-{job.id[:8]}"
    assert main(["job", "ssh", job.id]) == 1
    error = f"node 0 of pool 'job-{job.id[:8]}' is on this machine; open a terminal here instead"
    assert error in capsys.readouterr().err
    assert main(["job", "forward", job.id, "6006", "--node", "7"]) == 1
    assert "node=7: pool" in capsys.readouterr().err
    assert main(["job", "forward", job.id, "0"]) == 1
    assert "port=0: is not a TCP port" in capsys.readouterr().err
    (tmp_path / "go").write_text("went on")
    assert job.result(60) == "went on"
    assert main(["job", "ssh", job.id, "0", "--", "true"]) == 1
    assert "is completed and has no machines; open a shell while it runs" in capsys.readouterr().err


def test_death_of_a_process_names_the_function_of_the_job(hub_process: HubProcess) -> None:
    error = hub.submit(crash()).exception(100)
    assert isinstance(error, SlotLost)
    assert "crash" in str(error)
    assert "run_packed" not in "\n".join([str(error), *error.__notes__])
