"""`skyward train`, on runs of this process and of others."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.calls.control import Client, RunStatus
from skyward.cli import main
from skyward.training.control import TrainerControlCallback, find, runs
from skyward.training.control.watch import screen, watch
from tests.training.control.run import Run, run_in_thread
from tests.waiting import until

KILLED = """
import os, signal
from skyward.training.control import TrainerControlCallback
from tests.training.control.run import Run
Run([TrainerControlCallback(job_id="killed", port=0)], pause=lambda: os.kill(os.getpid(), signal.SIGKILL)).train()
"""


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward" / "jobs"


@pytest.fixture
def run() -> Iterator[Run]:
    running = Run([TrainerControlCallback(job_id="job", port=0)], pause=lambda: time.sleep(0.001))
    with run_in_thread(running):
        yield running


def said(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> str:
    assert main(["train", *line]) == status
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_runs_are_listed_and_one_is_shown_with_its_place(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: run.state.global_step >= 10)
    header, line = said(capsys, "list").splitlines()
    assert header.split() == ["JOB", "STATE", "STEP", "EPOCH", "LOSS", "AGE", "PROCESS"]
    assert line.split()[:2] == ["job", "running"]
    assert line.split()[-1] == str(os.getpid())
    assert json.loads(said(capsys, "list", "--json"))[0]["job_id"] == "job"
    assert said(capsys, "status", "job").startswith("job: running, step ")
    assert json.loads(said(capsys, "status", "job", "--json"))["global_step"] >= 10


def test_a_run_is_saved_and_stopped(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "save", "job").startswith("job: a checkpoint is saved, at step ")
    assert said(capsys, "save-stop", "job").startswith("job: it is saved and has ended, at step ")
    assert [what for _, what in run.events] == ["save", "save", "ended"]
    until(lambda: runs() == [])  # a run that has ended answers until it has closed its socket
    assert said(capsys, "list") == "no training listens\n"
    assert "job_id='job': no run of this name listens here" in said(capsys, "stop", "job", status=1)


def test_stop_with_wait_0_returns_at_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it is asked" in said(capsys, "stop", "job", "--wait", "0")
    until(lambda: runs() == [])


def test_abort_asks_for_confirmation(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "give --yes where nobody can be asked" in said(capsys, "abort", "job", status=1)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\ny\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert "abort job?" in said(capsys, "abort", "job", status=1)
    assert find("job").status().status == "running"
    assert "it has ended without a checkpoint" in said(capsys, "abort", "job")
    assert run.events[-1][1] == "aborted"


def test_leftovers_of_killed_runs_are_removed_and_live_runs_stay(
    run: Run, jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=60)
    assert (jobs / "killed").exists()
    assert "killed" not in said(capsys, "list")
    assert said(capsys, "cleanup", "job") == "nothing is left of killed trainings\n"
    assert said(capsys, "cleanup", "killed") == "removed killed\n"
    assert said(capsys, "cleanup") == "nothing is left of killed trainings\n"
    assert sorted(path.name for path in jobs.iterdir()) == [".lock", "job"]


def test_mistakes_are_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert "job_id='../x': not a job id" in said(capsys, "status", "../x", status=1)
    assert "job_id='x': no run of this name listens here; start one" in said(capsys, "watch", "x", status=1)
    assert "usage: skyward train" in said(capsys)


# watch --------------------------------------------------------------------------------------------------------------


def test_watch_writes_lines_without_a_terminal_until_the_run_ends(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: run.state.global_step > 20)
    real = Client.status

    def status(client: Client) -> RunStatus:
        found = real(client)
        run.max_steps = min(run.max_steps, found.global_step + 100)  # it is watched now: it may end
        return found

    monkeypatch.setattr(Client, "status", status)
    *lines, last = said(capsys, "watch", "job", "--every", "0.05").splitlines()
    steps = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert steps == list(range(10, steps[-1] + 1, 10))
    assert "loss 0.1  tok_per_sec 1,000" in lines[0]
    assert last.startswith("job has ended")
    assert "\x1b" not in "".join(lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_watch_draws_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    until(lambda: run.state.global_step >= 100)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            run.max_steps = 0
        time.sleep(0.02)

    out = Terminal()
    assert watch(find("job"), out=out, every_s=0.01, sleep=sleep).startswith("job has ended")
    shown = out.getvalue()
    for part in ("job", "running", "step ", "loss ", "tok_per_sec", "rank", "memory", "┤", "━", "ended", "⠉"):
        assert part in shown, part
    assert all(len(line) < 400 for line in shown.splitlines())


def test_the_screen_fits_and_shows_every_rank() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    now = time.time()
    ranks: list[dict[str, Any]] = [
        {"rank": n, "host": "gpu-1", "pid": 100 + n, "global_step": 7, "at": now - 5, "memory_bytes": 3 << 30}
        for n in range(4)
    ]
    status = RunStatus(
        job_id="job",
        status="running",
        timestamp=now,
        global_step=7,
        max_steps=100,
        epoch=0.5,
        step_at=now - 300,
        logs={"loss": "nan", "lr": 1e-4, "peak_mem_allocated": [1 << 30] * 4, "note": "x"},
        ranks=ranks,
        world_size=4,
    )
    records = [{"global_step": n, "loss": 1 / (n + 1)} for n in range(50_000)] + [{"global_step": 9, "eval_loss": 0.5}]
    text = ""
    for width in (30, 80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(screen(status, records, width=width))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
    for part in ("no step for 5 m", "step 7 of 100  epoch 0.50", "gpu-1", "103", "3.00 GiB", "● eval_loss 0.5"):
        assert part in text, (part, text)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(RunStatus(job_id="job", status="running", timestamp=now), [], width=80))
    assert "no loss was logged yet" in console.export_text()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_has_whole_steps_two_colours_a_rate_and_the_time_left(width: int) -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    def record(step: int, **values: float) -> dict[str, Any]:
        return {"global_step": step, "timestamp": 1000.0 + step / 10, **values}

    records = [record(step, loss=2.0 - step / 1000) for step in range(5, 1285, 5)]
    records += [record(step, eval_loss=2.1 - step / 1000) for step in range(256, 1281, 256)]
    records.sort(key=lambda r: r["global_step"])
    logs = {"loss": 0.72, "eval_loss": 0.82, "peak_rss": 290_275_328}
    running = RunStatus(
        job_id="job", status="running", timestamp=1128.0, global_step=1280, max_steps=2560, epoch=1.0, logs=logs
    )

    def shown(status: RunStatus, **how: Any) -> str:
        console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="standard", **how)
        console.print(screen(status, records, width=width))
        file: Any = console.file
        return str(file.getvalue())

    text = shown(running)
    assert "\x1b[36m" in text  # the loss
    assert "\x1b[35m●" in text  # the evaluations
    bare = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "step 1,280 of 2,560  epoch 1.00  ━" in bare
    assert "50%" in bare
    assert "10 steps/s · 2 m 08 s so far · 2 m 08 s left" in bare
    assert "peak_rss 277 MiB" in bare
    axis = next(line for line in bare.splitlines() if "1,000" in line)
    assert re.fullmatch(r"│ +(?:[\d,]+ +)+step +│", axis)
    assert "e0" not in axis
    ended = re.sub(r"\x1b\[[\d;]*m", "", shown(dataclasses.replace(running, status="ended")))
    assert "job  ended" in ended
    assert "ended after 2 m 08 s" in ended
    assert " left" not in ended
    assert not re.search(r"\x1b\[[\d;]*3\dm", shown(running, no_color=True))


def test_watch_names_the_extra_that_a_terminal_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(sky.errors.MissingDependency, match=r"skyward\[training\]"):
        watch(find("job"), out=Terminal())


def test_watch_of_a_killed_run_ends() -> None:
    code = KILLED.replace("lambda: os.kill(os.getpid(), signal.SIGKILL)", "lambda: __import__('time').sleep(0.01)")
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until(runs)

        def sleep(_: float) -> None:
            process.kill()
            process.wait()

        out = io.StringIO()
        assert watch(find("killed"), out=out, sleep=sleep).startswith("killed has ended; it was last seen")
