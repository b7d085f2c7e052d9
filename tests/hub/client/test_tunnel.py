"""Runs of tasks whose nodes know no hub: they reach that of the pool's program through the program."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer
from tests.channels import Relayed
from tests.few_modules import lean_frameworks
from tests.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as made:
        hub.connect(made.url, made.token)
        yield made


def log_steps(steps: int, folder: Path) -> str:
    with hub.start_run(run_name="far") as run:
        run.log_params({"lr": 0.1})
        for step in range(steps):
            run.log_metrics({"loss": float(step)}, step=step)
            if step % 50 == 0:
                time.sleep(0.01)
        (folder / "weights").write_bytes(bytes(3 << 20))
        run.log_artifact("weights.bin", folder / "weights")
        assert run.flush(60)
    return run.id


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_run_of_a_node_without_a_hub_goes_through_the_program(
    server: HubServer, tmp_path: Path, executor: Any
) -> None:
    hub.set_experiment("through")
    with sky.ComputePool(sky.Local(), executor=executor, logs=False) as pool:
        run_id = sky.compute(log_steps)(100, tmp_path) >> pool
    (run,) = hub.runs()
    assert (run.id, run.name, run.status, run.params) == (run_id, "far", "completed", {"lr": "0.1"})
    assert list(run.history("loss").values) == [float(step) for step in range(100)]
    assert list(run.history("loss", start=3, end=5).values) == [3.0, 4.0, 5.0]
    assert "through" in [row["name"] for row in hub.experiments()]
    assert run.download("weights.bin", tmp_path / "copy").stat().st_size == 3 << 20


def test_links_that_break_cost_no_point_and_double_none(server: HubServer, tmp_path: Path) -> None:
    provider = Relayed(folder=str(tmp_path / "relays"))
    with sky.ComputePool(provider, logs=False) as pool:
        future = sky.compute(log_steps)(2000, tmp_path) > pool
        pause_s = 0.2
        while not future.done():
            provider.break_links(0)
            time.sleep(pause_s)
            pause_s *= 1.1  # on a busy machine, a link needs time to carry anything
        run_id = future.result(60)
    assert list(hub.run(run_id).history("loss").values) == [float(step) for step in range(2000)]


def test_commands_of_the_hub_stop_a_training_in_a_task(server: HubServer, tmp_path: Path) -> None:
    def train_until_stopped(folder: Path) -> int:
        from .training import train  # imports torch, which no other task needs

        class Slow(sky.training.TrainerCallback):
            def on_step_begin(self, **_: Any) -> None:
                time.sleep(0.02)

        made = train(folder, [hub.HubLogger(run_name="stopped"), Slow()], max_steps=3000, num_train_epochs=2000)
        return int(made.state.global_step)

    with lean_frameworks(), sky.ComputePool(sky.Local(), logs=False) as pool:
        future = sky.compute(train_until_stopped)(tmp_path / "out") > pool
        until(lambda: future.done() or [run for run in hub.runs() if run.metrics], within_s=60)
        (run,) = hub.runs()
        request = urllib.request.Request(
            f"{server.url}/v1/runs/{run.id}/commands",
            json.dumps({"action": "stop"}).encode(),
            {**server.headers, "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).close()
        assert 0 < future.result(60) < 3000


def test_a_gang_logs_one_run_through_the_program_and_each_rank_its_load(server: HubServer, tmp_path: Path) -> None:
    def train_as_rank(folder: Path) -> str | None:
        from skyward.training import DDPTrainer, DDPTrainingArguments
        from tests.training.frameworks import same_records

        args = DDPTrainingArguments(
            output_dir=folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, save_steps=2
        )
        logger = hub.HubLogger(run_name="gang", experiment="gangs")
        DDPTrainer(same_records.Line(), args, train_dataset=same_records.rows(), callbacks=[logger]).train()
        return logger.run_id

    gang = sky.compute(sky.integrations.torch(backend="gloo")(train_as_rank))
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
        ids = gang(tmp_path / "out") @ pool
    (run,) = hub.runs()
    assert ids == [run.id, run.id]
    assert (run.name, run.status) == ("gang", "completed")
    assert list(run.history("loss").steps) == [1, 2, 3, 4]
    for rank in range(2):
        assert run.history(f"system/rank{rank}/memory_gb").values[-1] > 0
    assert run.artifacts() == [f"checkpoints/checkpoint-{step}.json" for step in (2, 4)]


def test_without_a_hub_of_the_program_a_run_is_a_folder_at_once(tmp_path: Path) -> None:
    def log() -> tuple[str, bool]:
        began = time.monotonic()
        with hub.start_run() as run:
            run.log_metrics({"loss": 1.0})
        assert time.monotonic() - began < 30.0
        return run.id, run.address is None

    with sky.ComputePool(sky.Local(), logs=False) as pool:
        assert (sky.compute(log)() >> pool)[1]


def test_a_hub_that_a_node_does_not_reach_is_reached_through_the_program(server: HubServer, tmp_path: Path) -> None:
    image = sky.Image(env={"SKYWARD_HUB_URL": "http://127.0.0.1:9", "SKYWARD_HUB_TOKEN": "x"})
    with sky.ComputePool(sky.Local(), image=image, logs=False) as pool:
        run_id = sky.compute(log_steps)(10, tmp_path) >> pool
    assert hub.run(run_id).status == "completed"


def test_a_task_can_do_nothing_but_log(server: HubServer) -> None:
    def read() -> str:
        try:
            hub.runs()
        except sky.errors.HubError as error:
            return str(error)
        return ""

    with sky.ComputePool(sky.Local(), logs=False) as pool:
        assert "is not possible from a task" in sky.compute(read)() >> pool
