"""A run is watched, saved, stopped and aborted from outside, and its answers to commands are correct."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.errors import ControlFailed, UsageError
from skyward.training.control import TrainerControlCallback, find, runs, sweep
from skyward.training.control.client import SocketTransport, client_of
from skyward.training.control.commands import ControlledRun, plain
from tests.training.control.run import Run, run_in_thread
from tests.waiting import until


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward" / "jobs"


def step() -> None:
    time.sleep(0.001)


def a_run(**options: Any) -> Run:
    return Run([TrainerControlCallback(job_id="job")], pause=step, **options)


def a_run_with_http(**options: Any) -> Run:
    return Run([TrainerControlCallback(job_id="job", port=0)], pause=step, **options)


# Commands -----------------------------------------------------------------------------------------------------------


def test_status_shows_how_far_the_run_is() -> None:
    run = a_run(max_steps=10_000_000)
    with run_in_thread(run):
        client = find("job")
        until(lambda: client.status().global_step >= 20)
        status = client.status()
        assert (status.job_id, status.status, status.max_steps) == ("job", "running", 10_000_000)
        assert status.epoch is not None
        assert status.epoch == pytest.approx(status.global_step / 100, abs=0.02)
        assert status.logs["tok_per_sec"] == 1000.0
        assert abs(status.timestamp - time.time()) < 5
        assert abs(status.step_at - time.time()) < 5
        (rank,) = status.ranks
        assert rank["pid"] == os.getpid()
        assert rank["memory_bytes"] > 1 << 20


def test_a_save_is_executed_once_the_checkpoint_is_written_and_the_run_goes_on() -> None:
    run = a_run(log_every=10**9)  # nothing is ever logged
    with run_in_thread(run):
        client = find("job")
        state = client.save(wait_s=10)
        assert state.state == "executed"
        assert run.events == [(state.step, "save")]
        before = client.status().global_step
        until(lambda: client.status().global_step > before)
        assert client.command(state.request_id) == state


def test_a_stop_saves_and_is_executed_when_the_run_has_ended() -> None:
    run = a_run()
    with run_in_thread(run):
        state = find("job").stop(wait_s=10)
        assert state.state == "executed"
        assert run.events == [(state.step, "save"), (state.step, "ended")]
    with pytest.raises(ControlFailed, match="job_id='job': no run of this name listens here; start one"):
        find("job")


@pytest.mark.parametrize(
    ("command", "args", "does"),
    [
        ("stop", {"save_strategy": "no"}, ["ended"]),
        ("save_and_stop", {"save_strategy": "no"}, ["save", "ended"]),
        ("save_and_stop", {"load_best_model_at_end": True, "eval_strategy": "steps"}, ["evaluate", "save", "ended"]),
        ("save_and_stop", {"load_best_model_at_end": True, "eval_strategy": "no"}, ["save", "ended"]),
        ("stop", {"load_best_model_at_end": True, "eval_strategy": "epoch"}, ["evaluate", "save", "ended"]),
        ("abort", {"load_best_model_at_end": True, "eval_strategy": "steps"}, ["aborted"]),
    ],
)
def test_a_command_sets_the_flags_of_the_run(command: str, args: dict[str, Any], does: list[str]) -> None:
    run = a_run(args=SimpleNamespace(**args))
    with run_in_thread(run):
        assert getattr(find("job"), command)(wait_s=10).state == "executed"
    assert [what for _, what in run.events] == does
    assert len({step for step, _ in run.events}) == 1


def test_an_abort_overrules_requested_saves_and_due_ones() -> None:
    gate = threading.Event()
    run = a_run(save_every=1)
    run.pause = lambda: gate.wait(60)
    with run_in_thread(run):
        client = find("job")
        save, abort = client.save(), client.abort()
        assert (save.state, abort.state) == ("waiting", "waiting")
        gate.set()
        with contextlib.suppress(ControlFailed):  # the run may have ended before this request
            assert client.command(abort.request_id, wait_s=10).state in ("executed", "unknown")
    assert run.events == [(1, "aborted")]


def test_a_command_that_comes_twice_is_one_command() -> None:
    run = a_run()

    def send(command: str) -> tuple[int, dict[str, Any]]:
        body = {"command": command, "request_id": "again"}
        return transport.ask("POST", "/jobs/job/control", body, timeout_s=10)

    with run_in_thread(run):
        transport = SocketTransport(path=runs()[0].socket or "")
        until(lambda: send("save_checkpoint")[1]["state"] == "executed")
        status, answer = send("abort")
        assert (status, "request_id" in answer["error"]) == (400, True)
    assert [what for _, what in run.events] == ["save", "ended"]


def test_history_gives_each_record_once_and_survives_nan() -> None:
    run = a_run(logs={"loss": float("nan"), "grad": float("-inf")})
    with run_in_thread(run):
        client = find("job")
        until(lambda: client.status().global_step >= 30)
        records, following = client.history()
        assert len(records) == following
        assert any(record.get("grad") == "-inf" for record in records)
        until(lambda: client.history(following)[0])
        steps = [record["global_step"] for record in records + client.history(following)[0]]
        assert steps == sorted(steps)


def test_a_long_history_comes_in_parts_and_an_old_one_is_forgotten() -> None:
    controlled = ControlledRun("job")
    for number in range(25_000):
        controlled.global_step = number
        controlled.logged({"loss": 0.5, "text": "x" * 100})
    found: list[dict[str, Any]] = []
    following, parts = 0, 0
    while True:
        records, following = controlled.history(following)
        if not records:
            break
        parts += 1
        assert len(json.dumps(records)) < 256 * 1024
        found += records
    assert [record["global_step"] for record in found] == list(range(5_000, 25_000))
    assert parts > 5


def test_values_of_logs_become_json() -> None:
    import numpy as np

    class Odd:
        def __repr__(self) -> str:
            return "odd"

    value = {"a": np.float32(0.5), "b": [1, float("inf")], "c": Odd(), "d": "x" * 1000, 5: np.arange(3)}
    assert json.dumps(plain(value), allow_nan=False)
    assert plain(value)["a"] == 0.5
    assert plain(value)["b"] == [1, "inf"]
    assert plain(value)["c"] == "odd"


# Files --------------------------------------------------------------------------------------------------------------


def test_files_are_private_and_are_removed_with_the_run(jobs: Path) -> None:
    os.umask(before := os.umask(0o777))
    os.umask(0)  # whatever the umask is
    try:
        with run_in_thread(a_run_with_http()):
            folder = jobs / "job"
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {path.name for path in folder.iterdir()} == {"auth_token", "endpoint.json", "owner.json"}
            assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
            token = (folder / "auth_token").read_text()
            assert len(token) == 64
            assert token not in (folder / "endpoint.json").read_text()
            said = json.loads((folder / "endpoint.json").read_text())
            assert (said["job_id"], said["host"], said["pid"]) == ("job", "127.0.0.1", os.getpid())
            assert said["output_dir"] == "o"
            (endpoint,) = runs()
            assert (endpoint.job_id, endpoint.has_auth) == ("job", True)
            assert endpoint.socket is not None
            local = Path(endpoint.socket)
            assert stat.S_IMODE(local.stat().st_mode) == 0o600
            assert stat.S_IMODE(local.parent.stat().st_mode) == 0o700
        assert not folder.exists()
        assert not local.exists()
    finally:
        os.umask(before)


def test_the_token_is_never_readable_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[tuple[str, int, int]] = []
    real = os.open

    def seen(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if ".new" in str(path):
            modes.append((os.path.basename(path), flags, mode))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", seen)
    with run_in_thread(a_run_with_http()):
        assert {name.partition(".")[0] for name, _, _ in modes} == {"auth_token", "endpoint", "owner"}
        assert all(flags & os.O_EXCL and flags & os.O_CREAT and mode == 0o600 for _, flags, mode in modes)


def test_a_job_id_belongs_to_one_run_at_a_time_and_a_dead_run_frees_it(jobs: Path) -> None:
    with run_in_thread(a_run()):
        with pytest.raises(UsageError, match=f"job_id='job': the run of process {os.getpid()} has this id"):
            Run([TrainerControlCallback(job_id="job", port=0)], max_steps=1).train()
        assert find("job").status().status == "running"


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "../x", "a b", "ä", "-x", "x\n", "x" * 129, 5])
def test_a_job_id_with_a_path_is_refused(job_id: Any) -> None:
    with pytest.raises(UsageError, match="job_id"):
        TrainerControlCallback(job_id=job_id)
    with pytest.raises(UsageError, match="job_id"):
        find(job_id)


def test_an_id_is_made_if_none_is_given() -> None:
    one, other = (TrainerControlCallback(port=0) for _ in range(2))
    with run_in_thread(Run([one], pause=step)), run_in_thread(Run([other], pause=step)):
        assert one.job_id is not None
        assert one.job_id.startswith("job_2")
        assert sorted(each.job_id for each in runs()) == sorted((one.job_id, str(other.job_id)))


RUN = """
import sys, time
from skyward.training.control import TrainerControlCallback
from tests.training.control.run import Run
Run([TrainerControlCallback(job_id=sys.argv[1], port=0)], pause=lambda: time.sleep(0.01)).train()
"""


@contextmanager
def started(job_id: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-W", "error", "-c", RUN, job_id]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_files_of_a_killed_run_are_ignored_and_swept(jobs: Path) -> None:
    with started("killed") as process:
        until(lambda: [each.job_id for each in runs()] == ["killed"])
        assert sweep() == []
        assert find("killed").status().status == "running"
        process.kill()
        process.wait()
        local = Path(json.loads((jobs / "killed" / "endpoint.json").read_text())["socket"])
        assert local.exists()
        assert runs() == []
        with pytest.raises(ControlFailed, match="job_id='killed': no run of this name"):
            find("killed")
    with run_in_thread(a_run()):  # the next one sweeps
        assert sorted(path.name for path in jobs.iterdir()) == [".lock", "job"]
        assert not local.exists()


def test_another_process_stops_a_run() -> None:
    with started("stopped") as process:
        until(runs)
        assert find("stopped").save_and_stop(wait_s=20).state == "executed"
        assert process.wait(60) == 0
    assert runs() == []


def test_a_run_that_is_stuck_in_a_step_still_answers_but_acknowledges_nothing() -> None:
    gate = threading.Event()
    run = a_run()
    run.pause = lambda: gate.wait(60)
    with run_in_thread(run):
        client = find("job")
        save = client.save(wait_s=0.2)
        assert save.state == "waiting"
        assert client.status().global_step == 0
        gate.set()
        assert client.command(save.request_id, wait_s=10).state == "executed"


def test_a_command_to_a_killed_run_fails() -> None:
    with started("gone") as process:
        until(runs)
        client = find("gone")
        assert client.status().status == "running"
        process.kill()
        process.wait()
        with pytest.raises(ControlFailed, match="nothing listens") as caught:
            client.stop()
        assert caught.value.is_gone


# Starting -----------------------------------------------------------------------------------------------------------


def test_a_taken_port_is_an_error_of_the_run_and_leaves_nothing(jobs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port={port}: cannot listen on 127.0.0.1: Address already in use"):
            Run([TrainerControlCallback(job_id="job", port=port)], max_steps=1).train()
        assert not (jobs / "job").exists()


def test_a_port_is_found_by_binding_it() -> None:
    controls = [TrainerControlCallback(job_id=f"job{n}", enable_http=True) for n in range(3)]
    with (
        run_in_thread(Run([controls[0]], pause=step)),
        run_in_thread(Run([controls[1]], pause=step)),
        run_in_thread(Run([controls[2]], pause=step)),
    ):
        ports = [control.port or 0 for control in controls]
        assert len(set(ports)) == 3
        assert all(8900 <= port < 9000 for port in ports)
        assert [find(f"job{n}").status().job_id for n in range(3)] == ["job0", "job1", "job2"]


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_of_another_machine_is_an_error_of_the_run(host: str) -> None:
    with pytest.raises(UsageError, match="host|cannot listen"):
        Run([TrainerControlCallback(host=host)], max_steps=1).train()


@pytest.mark.parametrize("port", [-1, 65536, "8900", True, 1.5])
def test_an_impossible_port_is_refused(port: Any) -> None:
    with pytest.raises(UsageError, match="port"):
        TrainerControlCallback(port=port)


@pytest.mark.parametrize("token", ["", "a b", "ä", "a\n", 5])
def test_a_token_that_no_header_can_hold_is_refused(token: Any) -> None:
    with pytest.raises(UsageError, match="auth_token"):
        TrainerControlCallback(auth_token=token)
    with pytest.raises(UsageError, match="disable_auth"):
        TrainerControlCallback(auth_token="a", disable_auth=True)


def test_an_unsafe_setting_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with run_in_thread(a_run()):
            pass
        assert caplog.text == ""
        control = TrainerControlCallback(job_id="open", port=0, host="0.0.0.0", disable_auth=True)
        with run_in_thread(Run([control], pause=step)):
            assert find("open").status().status == "running"
    assert "control listens on 0.0.0.0, which other machines may reach" in caplog.text
    assert "requires no token" in caplog.text


def test_a_run_that_fails_and_is_dropped_stops_listening(jobs: Path) -> None:
    def fail() -> None:
        raise RuntimeError("loss is nan")

    with pytest.raises(RuntimeError, match="loss is nan"):
        Run([TrainerControlCallback(job_id="job", port=0)], pause=fail).train()
    assert not (jobs / "job").exists()


@pytest.mark.parametrize("options", [{}, {"enable_http": False}, {"enable_http": False, "port": 0}])
def test_no_port_is_opened_by_default(jobs: Path, options: dict[str, Any]) -> None:
    control = TrainerControlCallback(job_id="job", **options)
    with run_in_thread(Run([control], pause=step)):
        (endpoint,) = runs()
        assert (control.port, endpoint.port, endpoint.host) == (None, None, None)
        assert sorted(path.name for path in (jobs / "job").iterdir()) == ["endpoint.json", "owner.json"]
        assert find("job").status().status == "running"


@pytest.mark.parametrize("options", [{"enable_http": True}, {"port": 0}, {"host": "127.0.0.1"}, {"auth_token": "x"}])
def test_a_run_answers_at_a_port_on_request_and_at_its_socket(options: dict[str, Any]) -> None:
    control = TrainerControlCallback(job_id="job", **options)
    with run_in_thread(Run([control], pause=step)):
        (endpoint,) = runs()
        assert endpoint.port == control.port
        by_port = client_of(replace(endpoint, socket=None))
        assert by_port.status().job_id == find("job").status().job_id == "job"


def test_a_run_on_another_machine_that_listens_only_there_is_reported() -> None:
    with run_in_thread(a_run()):
        (endpoint,) = runs()
        elsewhere = replace(endpoint, owner=replace(endpoint.owner, host="elsewhere"), hostname="gpu1")
        with pytest.raises(ControlFailed, match=r"it runs on gpu1 .*enable_http=True"):
            client_of(elsewhere)


def test_the_endpoint_of_a_run_of_the_previous_version_is_read(jobs: Path) -> None:
    """The previous version had no socket, and a token at each port."""
    with run_in_thread(a_run_with_http()):
        file = jobs / "job" / "endpoint.json"
        before = {name: value for name, value in json.loads(file.read_text()).items() if name != "socket"}
        file.write_text(json.dumps(before))
        assert find("job").status().status == "running"
