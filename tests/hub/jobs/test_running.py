"""Jobs from end to end: submitted from this process, run by a runner on this machine, and asked for their value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import skyward as sky
from skyward import hub
from skyward.errors import HubError, JobFailed, UsageError
from tests.hub.jobs.calls import OwnError, add, fail, node, runs_of, save_when_told, wait_for, write_here
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("hub_process")


def test_value_output_and_attempt_of_a_job_are_there_for_any_process() -> None:
    submitted = hub.submit(add(1, 2), name="sum")
    assert submitted.result(100) == 3
    job = hub.job(submitted.id)
    assert (job.name, job.status, job.result(), asyncio.run(value_of(job))) == ("sum", "completed", 3, 3)
    assert list(job.logs()) == ["adding 1 and 2"]
    assert list(job.logs(start=7, follow=False)) == ["1 and 2"]
    (attempt,) = job.attempts
    assert (attempt.machines, attempt.end, attempt.output_bytes) == ("local", "completed", 15)
    assert not job.cancel()
    assert [found.id for found in hub.jobs("completed")][:1] == [job.id]
    assert job.id not in [found.id for state in ("queued", "running", "failed") for found in hub.jobs(state)]


async def value_of(job: hub.Job[int]) -> int:
    return await job


def test_output_names_the_files_that_a_call_leaves_in_its_working_folder() -> None:
    job = hub.submit(write_here("result.txt", "four"))
    assert job.result(100) == 4
    (line,) = job.logs()
    assert line.startswith("[skyward] 1 file (4 bytes) in the working folder ends with this attempt: result.txt; write")


def test_exception_of_the_function_comes_back_with_its_class_and_traceback() -> None:
    job = hub.submit(fail("too hot"))
    error = job.exception(100)
    assert isinstance(error, OwnError)
    assert "calls.py" in error.__notes__[0]
    assert f"job {job.id}, attempt 1" in error.__notes__[0]
    assert job.why_waiting == "OwnError: too hot"
    with pytest.raises(OwnError, match="too hot"):
        job.result()
    job.retry()
    assert isinstance(job.exception(100), OwnError)
    assert len(job.attempts) == 2
    job.delete()
    with pytest.raises(HubError, match="no such job"):
        hub.job(job.id)


def test_job_on_all_nodes_has_a_value_for_each_and_runs_functions_of_the_main_module() -> None:
    assert hub.submit(node(), nodes=2, on="all").result(100) == [0, 1]

    @sky.compute
    def make_square() -> Callable[[int], int]:
        return lambda number: number * number

    assert hub.submit(make_square()).result(100)(3) == 9


def test_running_job_is_cancelled_and_a_held_one_begins_when_it_is_released(
    tmp_path: Path, hub_process: HubProcess
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: bool(runs_of(file)), 90)
    until(lambda: job.status == "running")  # its runner says so while the call begins
    with pytest.raises(TimeoutError, match="is running after 0.1 s"):
        job.result(0.1)
    assert job.cancel()
    with pytest.raises(CancelledError):
        job.result(60)
    held = hub.submit(add(3, 4), hold=True)
    assert (held.status, held.why_waiting) == ("queued", "is held; release it")
    held.release()
    assert held.result(100) == 7
    hub_process.until_clean()


def test_job_beyond_its_time_or_beyond_all_machines_says_so(tmp_path: Path) -> None:
    late = hub.submit(wait_for(str(tmp_path / "never")), max_duration_s=1.0)
    with pytest.raises(JobFailed, match="max_duration_s: its time is over") as caught:
        late.result(100)
    assert (caught.value.state, caught.value.job) == ("timed_out", late.id)
    huge = hub.submit(add(1, 1), accelerator="H100")
    until(lambda: huge.why_waiting == "waits for 1 H100: no machines of this hub can run it", 90)
    assert huge.cancel()
    assert huge.status == "cancelled"


def test_wrong_options_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(UsageError, match="on='each': unknown"):
        hub.submit(add(1, 2), on="each")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nodes=0"):
        hub.submit(add(1, 2), nodes=0)
    with pytest.raises(UsageError, match="logs: not an option of a job"):
        hub.submit(add(1, 2), logs=False)


_SAVES = """
import os, torch
from skyward.training.checkpoint import CheckpointCoordinator, components_of
components = components_of(torch.nn.Linear(2, 1))
coordinator = CheckpointCoordinator(components, output_dir=os.environ["SKYWARD_CHECKPOINT_DIR"])
coordinator.save_checkpoint(checkpoint_id=7)
"""


def test_saves_of_calls_and_commands_are_on_the_history_of_their_jobs(hub_process: HubProcess, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "file.1").touch()
    call = hub.submit(save_when_told(str(tmp_path / "file")), checkpoint_interval_s=600)
    command = hub.submit_command({"command": ["python", "-c", _SAVES]})
    assert (call.result(100), command.result(100)) == (1, 0)
    for job, steps in ((call, [1, 2]), (command, [7])):
        with hub_process.client() as client:
            events = client.get(f"/v1/jobs/{job.id}/history").json()["events"]
        saves = [event["save"] for event in events if event["kind"] == "saved"]
        folder = hub_process.data / "launcher" / "checkpoints" / job.id
        assert [(save["step"], save["path"]) for save in saves] == [(n, f"{folder}/checkpoint-{n}") for n in steps]
        assert all(save["bytes"] > 100 and save["seconds"] > 0 for save in saves)
