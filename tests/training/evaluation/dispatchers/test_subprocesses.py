from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.errors import ArgumentNotPicklable, PayloadNotLoadable, ResultNotPicklable, SlotLost, TaskTimeout
from skyward.training.evaluation.dispatchers import SubprocessDispatcher, as_dispatcher
from tests.training.evaluation.dispatchers.jobs import NoteLoading, doubled, hang, job_of, kill_me, waits_for
from tests.waiting import lines_of, until, until_text


@pytest.fixture(scope="module")
def dispatcher() -> Iterator[SubprocessDispatcher]:
    dispatcher = SubprocessDispatcher()
    yield dispatcher
    dispatcher.close(cancel=True)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_runs_in_one_separate_process_that_keeps_its_model(dispatcher: SubprocessDispatcher) -> None:
    outcomes = [dispatcher.submit(job_of(n, doubled, 1)).result(60) for n in range(3)]
    assert [outcome.value["value"] for outcome in outcomes] == [1, 3, 5]
    assert len({outcome.value["pid"] for outcome in outcomes} | {os.getpid()}) == 2
    assert [outcome.value["built"] for outcome in outcomes] == [1, 1, 1]
    for outcome in outcomes:
        assert outcome.worker == "subprocess"
        assert outcome.started_at + outcome.load_s <= outcome.finished_at
    assert dispatcher.pressure() == 0


def test_large_arrays_go_through_shared_memory_and_are_writable(dispatcher: SubprocessDispatcher) -> None:
    def evaluate(model: Any, payload: Any) -> dict[str, Any]:
        state = model[0]
        total = float(state["large"].sum() + state["small"].sum())
        state["large"][0] = -1.0
        return {"total": total, "writable": state["large"].flags.writeable}

    for n in (1.0, 2.0, 3.0):
        state = {"large": np.full(300_000, n), "small": np.full(10, n), "odd": np.full(1_000_001, 7, np.uint8)}
        value = dispatcher.submit(job_of(state, evaluate)).result(60).value
        assert value == {"total": 300_010 * n, "writable": True}
        assert state["large"][0] == n


def test_contents_are_sent_to_a_process_once(dispatcher: SubprocessDispatcher, tmp_path: Path) -> None:
    payload = NoteLoading(tmp_path / "loaded", b"x" * 1_000_000)
    job = job_of(1, lambda model, payload: {"bytes": len(payload.data)}, payload)
    for _ in range(3):
        assert dispatcher.submit(job).result(60).value == {"bytes": 1_000_000}
    assert len(lines_of(tmp_path / "loaded")) == 1


def test_contents_that_the_process_has_dropped_are_sent_again(dispatcher: SubprocessDispatcher, tmp_path: Path) -> None:
    payload = NoteLoading(tmp_path / "loaded", b"")
    job = job_of(1, lambda model, payload: {"value": 1}, payload)
    dispatcher.submit(job).result(60)
    for n in range(20):
        dispatcher.submit(job_of(1, doubled, n)).result(60)
    assert dispatcher.submit(job).result(60).value == {"value": 1}
    assert len(lines_of(tmp_path / "loaded")) == 2


def test_an_error_of_the_evaluation_is_raised_unchanged_with_its_place(dispatcher: SubprocessDispatcher) -> None:
    def fail(model: Any, payload: Any) -> dict[str, Any]:
        raise KeyError("no such label")

    with pytest.raises(KeyError, match="no such label") as raised:
        dispatcher.submit(job_of(1, fail)).result(60)
    assert "Remote traceback (subprocess)" in "".join(raised.value.__notes__)
    assert dispatcher.submit(job_of(1)).result(60).value["value"] == 3


def test_objects_that_cannot_travel_are_named(dispatcher: SubprocessDispatcher) -> None:
    with pytest.raises(ArgumentNotPicklable, match="payload: cannot be sent"):
        dispatcher.submit(job_of(1, doubled, threading.Lock())).result(60)
    with pytest.raises(ResultNotPicklable, match="eval_fn: the result cannot be sent back"):
        dispatcher.submit(job_of(1, lambda model, payload: {"lock": threading.Lock()})).result(60)
    with pytest.raises(PayloadNotLoadable, match=r"payload: cannot be loaded where evaluations run \(RuntimeError: no"):
        dispatcher.submit(job_of(1, doubled, NoteLoading(None, b""))).result(60)


def test_a_process_that_dies_is_reported_and_replaced(dispatcher: SubprocessDispatcher) -> None:
    with pytest.raises(SlotLost, match="ended by SIGKILL during an evaluation") as raised:
        dispatcher.submit(job_of(1, kill_me)).result(60)
    assert raised.value.signal == signal.SIGKILL
    pid = dispatcher.submit(job_of(1)).result(60).value["pid"]
    os.kill(pid, signal.SIGKILL)  # while it is idle: nobody notices
    assert dispatcher.submit(job_of(2)).result(60).value["value"] == 5


def test_an_evaluation_that_never_returns_is_killed_at_its_timeout(
    dispatcher: SubprocessDispatcher, tmp_path: Path
) -> None:
    before = dispatcher.submit(job_of(1)).result(60).value["pid"]
    slow = dispatcher.submit(job_of(1, hang, 1000, timeout_s=0.1))
    following = dispatcher.submit(job_of(2))
    with pytest.raises(TaskTimeout, match=r"timeout_s of 0.1 s \(its process was killed"):
        slow.result(60)
    assert following.result(60).value["value"] == 5
    until(lambda: _is_gone(before))


def test_cancelling_kills_the_evaluation_with_all_its_processes(
    dispatcher: SubprocessDispatcher, tmp_path: Path
) -> None:
    def start_another(model: Any, payload: str) -> dict[str, Any]:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        Path(payload).write_text(f"{os.getpid()} {child.pid}")
        child.wait()
        return {}

    future = dispatcher.submit(job_of(1, start_another, str(tmp_path / "pids")))
    pids = [int(pid) for pid in until_text(tmp_path / "pids").split()]
    assert future.cancel()
    until(lambda: all(_is_gone(pid) for pid in pids))
    assert dispatcher.submit(job_of(2)).result(60).value["value"] == 5


def test_closing_leaves_no_process_thread_or_descriptor(tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    dispatcher = SubprocessDispatcher(slots=2)
    try:
        futures = [dispatcher.submit(job_of(n, waits_for, str(tmp_path))) for n in range(2)]
        pids = [int(until_text(tmp_path / f"begun-{n}")) for n in range(2)]
        assert len(set(pids)) == 2
        (tmp_path / "end-0").touch()
        assert futures[0].result(60).worker.startswith("subprocess ")
    finally:
        dispatcher.close(cancel=True)
    assert futures[1].cancelled()
    assert set(threading.enumerate()) <= threads
    assert all(_is_gone(pid) for pid in pids)
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_the_process_ends_with_the_training_process(tmp_path: Path) -> None:
    """Training may end in any way, and a running evaluation does not hinder the end."""
    import subprocess
    import sys

    code = """
import sys
from skyward.training.evaluation.dispatchers import SubprocessDispatcher
from tests.training.evaluation.dispatchers.jobs import job_of, waits_for
SubprocessDispatcher().submit(job_of(0, waits_for, sys.argv[1]))
import threading; threading.Event().wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    pid = int(until_text(tmp_path / "begun-0"))
    parent.kill()
    parent.wait()
    until(lambda: _is_gone(pid))


def test_the_dispatcher_is_chosen_by_its_name() -> None:
    dispatcher = as_dispatcher("subprocess")
    assert isinstance(dispatcher, SubprocessDispatcher)
    assert not dispatcher.shares_memory
    dispatcher.close()
