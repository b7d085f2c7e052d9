"""The environment of a task: the sentences of docs/rules.md, one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import InteractiveInput, TaskExited
from tests.waiting import until


@sky.compute
def surroundings() -> dict[str, Any]:
    return {
        "folder": os.getcwd(),
        "scratch": tempfile.gettempdir(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "variable": os.environ.get("SKYWARD_TEST_INHERITED"),
        "threads": os.environ["OMP_NUM_THREADS"],
        "open files": len(os.listdir("/proc/self/fd")),
        "out of memory score": int(Path("/proc/self/oom_score_adj").read_text()),
        "process": os.getpid(),
        "session": os.getsid(0),
    }


@sky.compute
def read_stdin_of_a_subprocess() -> str:
    return subprocess.run(["cat"], capture_output=True, text=True, check=True).stdout


@sky.compute
def terminate_a_subprocess() -> int:
    sleeper = subprocess.Popen(["sleep", "60"])
    sleeper.terminate()
    return sleeper.wait(timeout=60)


@sky.compute
def ask(how: str) -> Any:
    if how == "input":
        return input("your name? ")
    if how == "stdin":
        return sys.stdin.read()
    return breakpoint()  # it must fail, in words


@sky.compute
def leave_a_variable() -> None:
    os.environ["SKYWARD_TEST_INHERITED"] = "changed by a task"


@sky.compute
def ignores_interrupts(trace: Path) -> None:
    trace.touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            trace.write_text("interrupted")


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_TEST_INHERITED", "from the client")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with sky.ComputePool(provider=sky.Local(), nodes=2, cancel_grace_s=4) as pool:
            yield pool


def test_a_task_sees_the_folder_path_and_environment_of_the_client(pool: sky.ComputePool) -> None:
    seen = surroundings() >> pool
    assert seen["folder"] == os.getcwd()
    assert seen["scratch"] == tempfile.gettempdir()
    assert set(filter(None, sys.path)) <= set(seen["path"])
    assert seen["variable"] == "from the client"
    assert seen["arguments"] == [""]


def test_a_variable_of_the_image_is_added() -> None:
    image = sky.Image(env={"SKYWARD_TEST_INHERITED": "from the image"})
    with sky.ComputePool(provider=sky.Local(), image=image) as pool:
        assert (surroundings() >> pool)["variable"] == "from the image"


def test_numeric_libraries_divide_the_cores_among_the_slots(pool: sky.ComputePool) -> None:
    assert (surroundings() >> pool)["threads"] == str(max(1, (os.cpu_count() or 1) // pool.total_slots))


def test_a_task_holds_no_descriptor_of_the_client(pool: sky.ComputePool) -> None:
    before = (surroundings() >> pool)["open files"]
    with contextlib.ExitStack() as held:
        for _ in range(50):
            held.enter_context(tempfile.TemporaryFile())
        with sky.ComputePool(provider=sky.Local()) as another:
            assert (surroundings() >> another)["open files"] <= before


def test_each_slot_leads_a_session_and_dies_before_its_agent_when_memory_runs_out(pool: sky.ComputePool) -> None:
    seen = surroundings() >> pool
    assert seen["session"] == seen["process"]
    assert seen["out of memory score"] == 800


def test_standard_input_is_empty_for_subprocesses(pool: sky.ComputePool) -> None:
    assert read_stdin_of_a_subprocess() >> pool == ""


def test_a_task_can_terminate_its_own_subprocess(pool: sky.ComputePool) -> None:
    assert terminate_a_subprocess() >> pool == -signal.SIGTERM


@pytest.mark.parametrize("how", ["input", "stdin", "breakpoint"])
def test_a_request_for_a_terminal_fails_with_a_clear_error(pool: sky.ComputePool, how: str) -> None:
    with pytest.raises(InteractiveInput, match="a task has no terminal"):
        ask(how) >> pool


def test_changes_by_a_task_stay_in_its_process(pool: sky.ComputePool) -> None:
    leave_a_variable() @ pool
    assert {seen["variable"] for seen in surroundings() @ pool} == {"changed by a task"}
    assert os.environ.get("SKYWARD_TEST_INHERITED") == "from the client"


def test_a_cancelled_task_that_ignores_its_interrupt_is_killed_and_the_pool_goes_on(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    future = ignores_interrupts(trace) > pool
    until(trace.exists)
    assert future.cancel()
    both = surroundings() @ pool
    assert trace.read_text() == "interrupted"
    assert len(both) == 2


def test_sys_exit_is_an_error_with_its_code(pool: sky.ComputePool) -> None:
    with pytest.raises(TaskExited) as caught:
        sky.compute(sys.exit)(3) >> pool
    assert caught.value.code == 3
