"""JsonLogger and JsonLogWriter: read back by json.load, at any instant, after kills, resumes, and in used folders."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from skyward.training import CallbackHandler
from skyward.training.callbacks import JsonLogger, JsonLogWriter
from skyward.training.callbacks.jsonarray import JsonArray
from tests.training.producer import Producer
from tests.waiting import until


def records_in(folder: Path, name: str = "trainer_logs.json") -> list[dict[str, Any]]:
    found = json.loads((folder / name).read_text())
    assert isinstance(found, list)
    return found


def steps_in(folder: Path, name: str = "trainer_logs.json") -> list[int]:
    return [each["global_step"] for each in records_in(folder, name)]


def run_of(folder: Path, **kwargs: Any) -> Producer:
    return Producer([JsonLogger(**kwargs)], logging_dir=folder)


# Records --------------------------------------------------------------------------------------------------------------


def test_records_have_a_utc_timestamp_step_epoch_and_the_logged_values(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    before = time.time()
    run.step(loss=2.5, learning_rate=1e-3)
    (record,) = records_in(tmp_path)
    assert before <= record.pop("timestamp") <= time.time()
    assert record == {"global_step": 1, "epoch": 0.1, "loss": 2.5, "learning_rate": 1e-3}
    run.evaluate(eval_loss=2.0)
    run.end()
    assert [sorted(each)[1:] for each in records_in(tmp_path)][1:] == [
        ["eval_loss", "global_step", "timestamp"],
        ["global_step", "timestamp", "train_loss", "train_runtime"],
    ]


def test_the_name_of_the_run_is_recorded_when_it_starts(tmp_path: Path) -> None:
    run = run_of(tmp_path, experiment="a", config={"width": 8})
    run.begin()
    (record,) = records_in(tmp_path)
    assert (record["experiment"], record["config"], record["global_step"]) == ("a", {"width": 8}, 0)


def test_an_evaluation_that_is_reported_twice_is_one_record(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    run.step(loss=1.0)
    run.evaluate(eval_a_loss=1.0, as_hugging_face_does=True)
    run.evaluate(eval_b_loss=math.nan, as_hugging_face_does=True)
    run.evaluate(eval_c_loss=3.0)
    run.log({"loss": 1.0, "eval_c_loss": 3.0})
    run.step(loss=1.0)
    run.evaluate(eval_a_loss=1.0, as_hugging_face_does=True)
    kinds = [sorted(set(each) - {"timestamp", "global_step", "epoch"}) for each in records_in(tmp_path)]
    assert kinds == [["loss"], ["eval_a_loss"], ["eval_b_loss"], ["eval_c_loss"], ["loss"], ["loss"], ["eval_a_loss"]]


def test_values_unknown_to_json_become_numbers_lists_null_or_text(tmp_path: Path) -> None:
    import torch

    run = run_of(tmp_path, where=tmp_path)
    run.begin()
    run.step(
        loss=torch.tensor(1.5), norms=torch.ones(2), nan=math.nan, many=[math.inf, {"x": torch.tensor(math.nan)}], n=1
    )
    header, record = records_in(tmp_path)
    assert header["where"] == str(tmp_path)
    assert record["loss"] == 1.5
    assert record["norms"] == [1.0, 1.0]
    assert record["nan"] is None
    assert record["many"] == [None, {"x": None}]


def test_only_rank_zero_writes_and_only_with_a_folder_for_logs(tmp_path: Path) -> None:
    class Second:
        rank, world_size, local_rank = 1, 2, 1

    logger = JsonLogger()
    CallbackHandler([logger], ranks=Second()).fire(  # type: ignore[arg-type]
        "on_train_begin", args=run_of(tmp_path).args, state=run_of(tmp_path).state, control=run_of(tmp_path).control
    )
    assert list(tmp_path.iterdir()) == []
    nowhere = Producer([JsonLogger()])
    nowhere.begin()
    nowhere.step(loss=1.0)
    nowhere.end()
    assert nowhere.handler.state_dict()["JsonLogger"]["log_path"] is None


# At any instant -------------------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from skyward.training.callbacks.jsonlog import JsonLogWriter
writer = JsonLogWriter("log.json")
writer.open(sys.argv[1])
pause, step = float(sys.argv[2]), 0
while True:
    step += 1
    writer.write_record(step, None, {"loss": 1.5, "text": "x" * (step * 37 % 5000)})
    if step == 1:
        print("begun", flush=True)
    if pause:
        time.sleep(pause)
"""


def writing(folder: Path, pause_s: float = 0.0) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(pause_s)], stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_file_is_complete_at_every_instant_while_another_process_writes_it(tmp_path: Path) -> None:
    process = writing(tmp_path, 0.0005)
    try:
        last = reads = 0
        enough, deadline = time.monotonic() + 3, time.monotonic() + 60
        while time.monotonic() < enough or (min(last, reads) <= 20 and time.monotonic() < deadline):
            steps = steps_in(tmp_path, "log.json")
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) >= last
            last, reads = len(steps), reads + 1
    finally:
        killed(process)
    assert reads > 20
    assert last > 20


def test_the_file_is_complete_wherever_a_kill_hits(tmp_path: Path) -> None:
    chance = random.Random(5)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        process = writing(folder)
        path = folder / "log.json"
        size = path.stat().st_size
        until(lambda path=path, size=size: path.stat().st_size > size)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.02))  # any instant: not for luck, for variety
        killed(process)
        steps = steps_in(folder, "log.json")
        assert steps == list(range(1, len(steps) + 1))
        # The next run takes over, whatever stage the writer was in, and clears away what it left.
        writer = JsonLogWriter("log.json")
        writer.open(folder, global_step=len(steps) - 1)
        writer.write_record(len(steps), None, {"loss": 1.0})
        writer.close()
        assert steps_in(folder, "log.json") == steps
        assert [each for each in os.listdir(folder) if each.startswith(".")] == []


def test_a_reader_that_holds_the_file_open_keeps_its_version(tmp_path: Path) -> None:
    writer = JsonLogWriter("log.json")
    writer.open(tmp_path)
    writer.write_record(1, None, {"loss": 1.0})
    path = tmp_path / "log.json"
    with path.open() as first:
        for step in range(2, 100):
            writer.write_record(step, None, {"loss": 1.0, "text": "x" * 500})
        with path.open() as second:
            for step in range(100, 200):
                writer.write_record(step, None, {"loss": 1.0})
            assert len(json.load(first)) == 1
            assert len(json.load(second)) == 99
    assert len(os.listdir(tmp_path)) <= 5  # one file for each reader, and two
    assert len(records_in(tmp_path, "log.json")) == 199
    writer.close()
    assert os.listdir(tmp_path) == ["log.json"]


def test_a_forked_process_that_ends_changes_nothing(tmp_path: Path) -> None:
    """A DataLoader's worker is an example: the inherited file is not its own."""
    code = (
        "import multiprocessing, sys; from skyward.training import JsonLogWriter\n"
        "writer = JsonLogWriter('log.json'); writer.open(sys.argv[1]); writer.write_record(1, None, {})\n"
        "worker = multiprocessing.get_context('fork').Process(target=sys.exit); worker.start(); worker.join()\n"
        "writer.write_record(2, None, {})\n"
        "import os, signal, time\n"
        "worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)); worker.start()\n"
        "print(worker.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.wait()
    process.stdout.close()
    assert steps_in(tmp_path, "log.json") == [1, 2]
    # The next run has the file, although a worker of the killed one lives on for a while.
    writer = JsonLogWriter("log.json")
    writer.open(tmp_path, global_step=2)
    os.kill(worker, signal.SIGKILL)
    writer.write_record(3, None, {})
    assert writer.log_path == tmp_path / "log.json"
    writer.close()
    assert steps_in(tmp_path, "log.json") == [1, 2, 3]


def test_a_record_costs_the_same_in_a_long_file(tmp_path: Path) -> None:
    array = JsonArray(tmp_path / "log.json")
    record = {"global_step": 1, "loss": 2.5, "learning_rate": 3e-4, "grad_norm": 1.25, "tokens": 123456}

    def seconds_for(count: int) -> float:
        begun = time.process_time()
        for _ in range(count):
            array.append(record)
        return time.process_time() - begun

    seconds_for(200)
    short = min(seconds_for(500) for _ in range(3))
    seconds_for(30_000)
    long = min(seconds_for(500) for _ in range(3))
    assert long < 4 * short  # a rewrite would be 60 times as long
    array.close()
    assert len(records_in(tmp_path, "log.json")) == 33_200


def test_a_full_disk_loses_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file's size limit makes a write fail half way, like a full disk."""
    import resource

    writer = JsonLogWriter("log.json")
    writer.open(tmp_path)
    writer.write_record(1, None, {"text": "a"})
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        writer.write_record(2, None, {"text": "b" * 9000})
        writer.write_record(3, None, {"text": "c"})
        assert steps_in(tmp_path, "log.json") == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    writer.write_record(4, None, {"text": "d"})
    assert steps_in(tmp_path, "log.json") == [1, 2, 3, 4]
    writer.close()
    assert steps_in(tmp_path, "log.json") == [1, 2, 3, 4]
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1


def test_a_file_system_without_links_has_one_file_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # the edge: no such file system can be mounted here
    writer = JsonLogWriter("log.json")
    writer.open(tmp_path)
    for step in range(1, 200):
        writer.write_record(step, None, {"loss": 1.0})
        assert steps_in(tmp_path, "log.json")[-1] == step
    assert os.listdir(tmp_path) == ["log.json"]
    writer.close()
    assert len(steps_in(tmp_path, "log.json")) == 199
    assert "no hard links" in caplog.text


# Resume ---------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_cuts_at_the_checkpoints_step_not_at_the_last_records(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    for step in range(1, 6):
        if step % 2:
            run.step()
        else:
            run.step(loss=float(step))
    checkpoint = run.save()  # at step 5; the last record is of step 4
    for _ in range(3):
        run.step(loss=-1.0)
    del run  # no train_end: it was killed

    run = run_of(tmp_path)
    run.resume(checkpoint)
    run.begin()
    for step in range(6, 11):
        run.step(loss=float(step))
    run.end()
    kept = [(each["global_step"], each.get("loss")) for each in records_in(tmp_path)]
    assert kept == [(2, 2), (4, 4), (6, 6), (7, 7), (8, 8), (9, 9), (10, 10), (10, None)]
    assert sorted(os.listdir(tmp_path)) == ["run_info.json", "trainer_logs.json"]


def test_the_log_of_a_killed_and_resumed_run_is_that_of_a_whole_run(tmp_path: Path) -> None:
    def steps(run: Producer, last: int, save_at: int | None = None) -> Any:
        checkpoint = None
        while run.state.global_step < last:
            step = run.state.global_step + 1
            run.step(loss=1 / step)
            if step % 3 == 0:
                run.evaluate(eval_loss=2 / step, as_hugging_face_does=step % 2 == 0)
            if step == save_at:
                checkpoint = run.save()
        return checkpoint

    def told(folder: Path) -> list[Any]:
        return [{key: each[key] for key in each if key != "timestamp"} for each in records_in(folder)]

    whole = run_of(tmp_path / "whole", name="a")
    whole.begin()
    steps(whole, 7)
    for saved_at in range(1, 8):
        for killed_at in range(saved_at, 8):
            folder = tmp_path / f"{saved_at}-{killed_at}"
            first = run_of(folder, name="a")
            first.begin()
            checkpoint = steps(first, killed_at, saved_at)
            del first
            again = run_of(folder, name="a")
            again.resume(checkpoint)
            again.begin()
            steps(again, 7)
            assert told(folder) == told(tmp_path / "whole"), (saved_at, killed_at)
            again.handler.close()


def test_records_of_the_checkpoints_own_step_are_there_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    run.step(loss=1.0)
    run.step(loss=2.0)
    checkpoint = run.save()
    run.evaluate(eval_loss=2.0)  # after the checkpoint, at its step
    run.end()  # a graceful stop: its summary is not this run's end

    run = run_of(tmp_path)
    run.resume(checkpoint)
    run.begin()
    run.evaluate(eval_loss=2.0)  # a producer that makes up for what may not have been done
    run.step(loss=3.0)
    run.end()
    assert [
        (each["global_step"], *sorted(set(each) - {"timestamp", "epoch"})[:1]) for each in records_in(tmp_path)
    ] == [
        (1, "global_step"),
        (2, "global_step"),
        (2, "eval_loss"),
        (3, "global_step"),
        (3, "global_step"),
    ]


def test_a_second_run_in_a_folder_takes_the_name_and_the_first_one_can_still_be_resumed(tmp_path: Path) -> None:
    first = run_of(tmp_path, name="first")
    first.begin()
    first.step(loss=1.0)
    checkpoint = first.save()
    first.step(loss=-1.0)
    first.end()

    second = run_of(tmp_path, name="second")
    second.begin()
    second.step(loss=20.0)
    second.end()
    assert records_in(tmp_path)[0]["name"] == "second"
    assert records_in(tmp_path, "trainer_logs-1.json")[0]["name"] == "first"

    again = run_of(tmp_path, name="first")
    again.resume(checkpoint)
    again.begin()
    again.step(loss=2.0)
    again.end()
    assert [each.get("loss") for each in records_in(tmp_path)] == [None, 1.0, 2.0, None]
    others = [
        records_in(tmp_path, each)[0]["name"] for each in os.listdir(tmp_path) if each.startswith("trainer_logs-")
    ]
    assert others == ["second"]


def test_a_checkpoint_made_after_the_end_knows_the_file(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a")
    run.begin()
    run.step(loss=1.0)
    run.end()
    checkpoint = run.save()
    run = run_of(tmp_path / "b")
    run.resume(checkpoint)
    run.begin()
    run.step(loss=2.0)
    run.end()
    assert steps_in(tmp_path / "a") == [1, 2, 2]


def test_a_run_that_had_logged_nothing_takes_no_record_from_another(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    checkpoint = run.save()
    run.end()
    other = run_of(tmp_path, name="other")
    other.begin()
    other.end()
    again = run_of(tmp_path)
    again.resume(checkpoint)
    again.begin()
    again.step(loss=1.0)
    again.end()
    assert any(records_in(tmp_path, log.name)[0].get("name") == "other" for log in tmp_path.glob("trainer_logs*"))
    assert steps_in(tmp_path) == [1, 1]


def test_a_damaged_file_is_kept_as_bak_and_its_readable_part_is_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path)
    run.begin()
    for _ in range(4):
        run.step(loss=1.0)
    checkpoint = run.save()
    run.handler.close()
    path = tmp_path / "trainer_logs.json"
    path.write_bytes(path.read_bytes()[:-40])  # a loss of power

    run = run_of(tmp_path)
    run.resume(checkpoint)
    run.begin()
    run.step(loss=2.0)
    run.end()
    assert steps_in(tmp_path) == [1, 2, 3, 5, 5]
    assert (tmp_path / "trainer_logs.json.bak").exists()
    assert "damaged" in caplog.text


def test_a_missing_file_is_warned_about_and_started_again_in_the_new_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "old")
    run.begin()
    run.step(loss=1.0)
    checkpoint = run.save()
    run.end()
    (tmp_path / "old/trainer_logs.json").unlink()
    run = run_of(tmp_path / "new")
    run.resume(checkpoint)
    run.begin()
    run.step(loss=2.0)
    assert steps_in(tmp_path / "new") == [2]
    assert "is missing; starting a new one" in caplog.text
    run.handler.close()


def test_a_run_continues_in_its_original_folder_and_finds_it_after_a_move(tmp_path: Path) -> None:
    run = run_of(tmp_path / "old")
    run.begin()
    run.step(loss=1.0)
    checkpoint = run.save()
    run.handler.close()
    resumed = run_of(tmp_path / "other")
    resumed.resume(checkpoint)
    resumed.begin()
    resumed.step(loss=2.0)
    resumed.handler.close()
    assert steps_in(tmp_path / "old") == [1, 2]
    assert not (tmp_path / "other").exists()

    (tmp_path / "old").rename(tmp_path / "moved")
    moved = run_of(tmp_path / "moved")
    moved.resume(checkpoint)
    moved.begin()
    moved.step(loss=3.0)
    moved.handler.close()
    assert [each["loss"] for each in records_in(tmp_path / "moved")] == [1.0, 3.0]


def test_a_checkpoint_without_our_state_continues_in_a_copy_if_records_are_dropped(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.begin()
    run.step(loss=1.0)
    run.handler.close()
    run = run_of(tmp_path)
    run.state.global_step = 1
    run.begin()
    for _ in range(2):
        run.step(loss=1.0)
    run.handler.close()
    assert sorted(os.listdir(tmp_path)) == ["run_info.json", "trainer_logs.json"]
    run = run_of(tmp_path)
    run.state.global_step = 2
    run.begin()
    run.step(loss=2.0)
    run.handler.close()
    assert steps_in(tmp_path) == [1, 2, 3]
    assert steps_in(tmp_path, "trainer_logs-1.json") == [1, 2, 3]


def test_a_file_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    process = writing(tmp_path, 0.001)
    try:
        writer = JsonLogWriter("log.json")
        writer.open(tmp_path)
        writer.write_record(1, None, {"mine": True})
        assert writer.log_path == tmp_path / "log-1.json"
        writer.close()
    finally:
        killed(process)
    assert all("mine" not in each for each in records_in(tmp_path, "log.json"))
    assert records_in(tmp_path, "log-1.json")[0]["mine"]


def test_no_thread_and_no_handler_of_a_logger_is_left(tmp_path: Path) -> None:
    threads, handlers = set(threading.enumerate()), list(logging.getLogger().handlers)
    for _ in range(3):
        run = run_of(tmp_path)
        run.begin()
        run.step(loss=1.0)
        run.end()
    until(lambda: set(threading.enumerate()) <= threads)
    assert logging.getLogger().handlers == handlers


def test_the_runs_arguments_versions_and_machine_are_written_beside_its_log(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    vars(run.args)["hub_token"] = "hf_secret"
    run.begin()
    run.step(loss=1.0)
    info = json.loads((tmp_path / "run_info.json").read_text())
    assert (info["arguments"]["logging_dir"], info["arguments"]["hub_token"]) == (str(tmp_path), "***")
    assert info["versions"]["python"] == platform.python_version()
    assert info["machine"]["ranks"] == "1"


def test_a_run_continues_if_its_facts_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run_info.json").mkdir()
    run = run_of(tmp_path)
    run.begin()
    run.step(loss=1.0)
    assert steps_in(tmp_path) == [1]
    assert "cannot write the facts about this run" in caplog.text
