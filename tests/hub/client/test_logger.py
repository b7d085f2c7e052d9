"""`HubLogger` in real trainings: ours, killed and resumed, and under Hugging Face, Lightning and Keras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward import hub
from skyward.errors import UsageError
from skyward.hub import HubLogger
from skyward.training import HFCallbacks, LightningCallbacks, TrainerCallback
from skyward.training.checkpoint.manifest import MANIFEST
from tests.few_modules import LEAN
from tests.training.checkpoint.crew import WARM, warm_process
from tests.training.frameworks import same_records

from .small_hub import TOKEN, SmallHub, small_hub
from .training import train, train_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),  # Lightning uses what torch gives up
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with small_hub() as made:
        monkeypatch.setenv("SKYWARD_HUB_URL", made.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", TOKEN)
        yield made


def only_run(server: SmallHub) -> str:
    (run_id,) = server.records
    return run_id


def end_of(server: SmallHub, run_id: str) -> tuple[str, str | None]:
    record = server.of(run_id, "s")[-1]
    return record[1], record[3]


def test_a_training_is_recorded_as_a_run(server: SmallHub, tmp_path: Path) -> None:
    logger = HubLogger(run_name="tiny", experiment="digits", tags={"team": "vision"})
    made = train(tmp_path, [logger], metric_for_best_model="loss", load_best_model_at_end=False)
    run_id = only_run(server)
    assert logger.run_id == run_id
    first = server.of(run_id, "run")[0][1]
    assert (first["name"], first["experiment"], first["tags"]["team"]) == ("tiny", "digits", "vision")

    params = server.merged(run_id, "p")
    assert params["learning_rate"] == "0.1"
    assert params["max_steps"] == "12"
    assert params["model"] == "Line"
    assert [step for step, _ in server.points(run_id, "loss")] == [2, 4, 6, 8, 10, 12]
    losses = [record["loss"] for record in made.state.log_history if "loss" in record]
    assert [loss for _, loss in server.points(run_id, "loss")] == pytest.approx(losses)
    assert [step for step, _ in server.points(run_id, "eval_loss")] == [4, 8, 12]
    assert [step for step, _ in server.points(run_id, "train_runtime")] == [12]

    checkpoints = {record[1]: json.loads(server.blobs[record[3]]) for record in server.of(run_id, "a")}
    assert set(checkpoints) == {f"checkpoints/checkpoint-{step}.json" for step in (3, 6, 9, 12)}
    last = checkpoints["checkpoints/checkpoint-12.json"]
    manifest = json.loads((tmp_path / "checkpoint-12" / MANIFEST).read_text())
    assert last["digest"] == manifest["digest"]
    assert last["bytes"] > 0
    assert json.loads(server.merged(run_id, "t")["skyward.checkpoint"]) == last
    assert float(server.merged(run_id, "t")["skyward.best.metric"]) == pytest.approx(made.state.best_metric)
    assert server.merged(run_id, "t")["skyward.best.step"] == "12"
    assert server.points(run_id, "system/rank0/memory_gb")[-1][0] == 12
    assert server.points(run_id, "system/rank0/memory_gb")[-1][1] > 0
    assert end_of(server, run_id) == ("completed", None)


@pytest.mark.timeout(300)  # two processes that import torch, one after the other
def test_a_training_that_was_killed_and_resumed_is_one_run(server: SmallHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hub.client.training"]
    environment = {**os.environ, "PYTHONPATH": str(LEAN)}
    process = subprocess.Popen([*command, "first", str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert b"ready\n" in iter(process.stdout.readline, b"")
    process.kill()
    process.wait()
    process.stdout.close()
    run_id = only_run(server)
    assert [step for step, _ in server.points(run_id, "loss")] == [2, 4, 6, 8, 10]
    subprocess.run([*command, "second", str(tmp_path)], check=True, timeout=200, env=environment)

    assert only_run(server) == run_id
    kinds = [record[0] for record in server.of(run_id)]
    at = kinds.index("cut")
    assert server.of(run_id)[at] == ["cut", 9]
    before, after = server.of(run_id)[:at], server.of(run_id)[at:]

    def steps(records: list[list[Any]], key: str) -> list[int]:
        return [record[1] for record in records if record[0] == "m" and key in record[3]]

    assert steps(before, "loss") == [2, 4, 6, 8, 10]
    assert steps(after, "loss") == [10, 12]
    assert [record for record in after if record[0] == "p"] == []
    assert server.merged(run_id, "t")["skyward.resumed_at_step"] == "9"
    assert end_of(server, run_id) == ("completed", None)


def with_hf(folder: Path, callbacks: list[Any]) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(folder), learning_rate=0.1, report_to=[], **same_records.ARGUMENTS)
    given: Any = {"train_dataset": same_records.rows(), "eval_dataset": same_records.rows()}
    Trainer(same_records.Line(), args, callbacks=[HFCallbacks(callbacks)], **given).train()


def with_lightning(folder: Path, callbacks: list[Any]) -> None:
    made = same_records.lightning_trainer(folder, LightningCallbacks(callbacks, logging_steps=1), epochs=2)
    made.fit(same_records.lightning_module(0.1), same_records.loader(), same_records.loader())


@pytest.mark.parametrize(("name", "act"), [("hf", with_hf), ("lightning", with_lightning)])
def test_other_frameworks_are_recorded_too(server: SmallHub, tmp_path: Path, name: str, act: Any) -> None:
    act(tmp_path, [HubLogger(run_name=name)])
    run_id = only_run(server)
    assert [step for step, _ in server.points(run_id, "loss")] == list(range(1, 11))
    keys = {key for record in server.of(run_id, "m") for key in record[3]}
    (evaluated,) = keys & {"eval_loss", "val_loss", "eval_val_loss"}
    assert [step for step, _ in server.points(run_id, evaluated)] == [5, 10]
    assert server.merged(run_id, "p")["model"]
    assert end_of(server, run_id) == ("completed", None)


def test_keras_is_recorded_too(server: SmallHub, tmp_path: Path) -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(LEAN)}
    command = [sys.executable, "-m", "tests.hub.client.training", "keras", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=100)
    run_id = only_run(server)
    assert [step for step, _ in server.points(run_id, "loss")] == list(range(1, 11))
    assert [step for step, _ in server.points(run_id, "eval_loss")] == [5, 10]
    assert end_of(server, run_id) == ("completed", None)


class Raises(TrainerCallback):
    def on_step_end(self, state: Any, **_: Any) -> None:
        if state.global_step == 5:
            raise RuntimeError("a bad batch")


def test_a_training_that_raises_is_a_failed_run(server: SmallHub, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bad batch"):
        train(tmp_path, [HubLogger(), Raises()])
    assert end_of(server, only_run(server)) == ("failed", "RuntimeError: a bad batch")


def test_an_open_run_of_the_user_is_logged_to_and_stays_open(server: SmallHub, tmp_path: Path) -> None:
    with hub.start_run(run_name="mine") as run:
        run.log_params({"learning_rate": "mine"})
        train(tmp_path, [HubLogger(system_metrics_every_s=None)])
        assert run.state == "running"
        run.log_metrics({"after": 1.0}, step=12)
    assert only_run(server) == run.id
    assert server.merged(run.id, "p")["learning_rate"] == "mine"
    assert server.merged(run.id, "p")["max_steps"] == "12"
    assert server.points(run.id, "after") == [(12, 1.0)]


class WaitsFor(TrainerCallback):
    """Give a command at step 5 and wait until it has arrived."""

    def __init__(self, server: SmallHub, logger: HubLogger, *actions: str) -> None:
        self.server, self.logger, self.actions = server, logger, actions

    def on_step_begin(self, state: Any, **_: Any) -> None:
        from tests.waiting import until

        if state.global_step == 5 and self.actions:
            assert self.logger.run_id is not None
            for number, action in enumerate(self.actions, start=1):
                self.server.command(self.logger.run_id, number, action)
            self.actions = ()
            # The sender handles an answer before its next batch, so the second one from now proves it.
            before = self.server.batches
            until(lambda: self.server.batches >= before + 2)


@pytest.mark.parametrize(
    ("action", "ended_at", "saved", "result", "state"),
    [
        ("save", 12, [3, 6, 9, 12], "saved at step 6", "completed"),
        ("stop", 6, [3, 6], "stopping at step 6", "completed"),
        ("abort", 6, [3], "aborting at step 6", "cancelled"),
    ],
)
def test_commands_of_the_hub_act_at_the_end_of_a_step(
    server: SmallHub, tmp_path: Path, action: str, ended_at: int, saved: list[int], result: str, state: str
) -> None:
    logger = HubLogger()
    made = train(tmp_path, [logger, WaitsFor(server, logger, action)])
    run_id = only_run(server)
    assert made.state.global_step == ended_at
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == saved
    assert server.of(run_id, "ack") == [["ack", 1, result]]
    assert end_of(server, run_id)[0] == state


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="system_metrics_every_s=0: must be above 0"):
        HubLogger(system_metrics_every_s=0)


# Two ranks ------------------------------------------------------------------------------------------------------------


def test_rank_0_logs_and_each_rank_reports_its_load(server: SmallHub, tmp_path: Path) -> None:
    answers = WARM.Queue()
    meeting = f"file://{tmp_path}/meeting"
    ranks = [warm_process(train_rank, rank, meeting, tmp_path / "out", answers) for rank in range(2)]
    for process in ranks:
        process.start()
    told = dict(answers.get(timeout=100) for _ in range(2))
    for process in ranks:
        process.join(60)
    run_id = only_run(server)
    assert told == {0: run_id, 1: run_id}
    assert [step for step, _ in server.points(run_id, "loss")] == [1, 2, 3, 4]
    for rank in range(2):
        assert server.points(run_id, f"system/rank{rank}/memory_gb")[-1][1] > 0
    assert [record[1] for record in server.of(run_id, "s")] == ["completed"]
    assert len({client for client, _ in server.records[run_id]}) == 2
