"""The callback under our Trainer, Hugging Face's, Lightning's and Keras's: each run is the worker of one server."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyward.errors import UsageError
from skyward.training import DiLoCoCallback, JsonLogger, TrainerCallback
from skyward.training.diloco import DiLoCoServer, worker
from tests.training.diloco.lossy_line import LossyLine
from tests.training.diloco.runs import TOKEN, are_equal, serving, state_of, together
from tests.training.keras_process import found_by
from tests.training.trainer.regression import Line, Points, history, losses, run
from tests.waiting import until

ROOT = Path(__file__).parents[3]
H = 3
STEPS = 9


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DILOCO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)


def joining(server: DiLoCoServer | str, name: str = "a", **options: Any) -> DiLoCoCallback:
    address = server if isinstance(server, str) else server.address
    options = {"sync_every": H, "bf16_comm": False, "heartbeat_interval": 0, **options}
    return DiLoCoCallback(address, worker_id=name, **options)


def test_a_stage_of_a_pipeline_is_refused_before_training() -> None:
    """All stages would become copies of the first one."""
    trainer = SimpleNamespace(model_part=object())
    with pytest.raises(UsageError, match=r"each rank trains a stage of a pipeline.* use DDP or fully_shard"):
        DiLoCoCallback("127.0.0.1:1").on_train_begin(None, Line(), object(), trainer=trainer)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.stop()


class Counts(TrainerCallback):
    """Callback that keeps the number of synchronisations in each log of steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_log(self, logs: dict[str, Any], **kwargs: Any) -> None:
        if "diloco/sync_count" in logs:
            self.seen.append(logs["diloco/sync_count"])


# Under our Trainer ----------------------------------------------------------------------------------------------------


def ours(folder: Path, *callbacks: object, resume: bool = False, steps: int = STEPS, **chosen: Any) -> torch.nn.Module:
    """Train; the model is that of the server's first worker."""
    options = {"max_steps": steps, "logging_steps": 1, "save_steps": 5, "lr_scheduler_type": "constant", **chosen}
    return run(folder, resume or None, callbacks=callbacks, **options).model


def test_a_run_without_a_server_is_that_without_the_callback(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    callback = DiLoCoCallback(sync_every=2)
    assert not callback.active
    assert history(run(tmp_path / "with", callbacks=[callback], **options)) == history(run(tmp_path / "no", **options))
    assert callback.state_dict() == {}


def test_runs_exchange_their_progress_and_loggers_see_it(tmp_path: Path) -> None:
    """Two runs on different points, with two micro-batches in a step."""
    models: dict[str, torch.nn.Module] = {}

    def train(name: str, size: int) -> None:
        callbacks = [JsonLogger(), joining(server, name)]
        models[name] = ours(tmp_path / name, *callbacks, data=Points(size), gradient_accumulation_steps=2)

    with serving(num_workers=2) as server:
        together(partial(train, "a", 20), partial(train, "b", 12))
        assert server.status()["round"] == STEPS / H
        assert server.status()["workers"] == []
        assert all(part["loss"] > 0 for facts in server.history() for part in facts["workers"].values())
    assert are_equal(state_of(models["a"]), state_of(models["b"]))
    records = json.loads((tmp_path / "a" / "logs" / "trainer_logs.json").read_text())
    counts = [record["diloco/sync_count"] for record in records if "loss" in record]
    assert counts == [step // H for step in range(1, STEPS + 1)]
    assert records[-2]["diloco/last_send_mb"] > 0


def test_a_run_that_fails_leaves_the_server(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, **kwargs: Any) -> None:
            assert len(server.status()["workers"]) == 1
            raise OSError("the disk is gone")

    with serving() as server:
        with pytest.raises(OSError, match="the disk is gone"):
            ours(tmp_path, joining(server), Fails())
        assert server.status()["workers"] == []


KILLED_AT = 7


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_parameters(tmp_path: Path) -> None:
    """The checkpoint is of step 5, and its round was over when the run was killed at step 7. Another worker waits."""
    code = """
import os, signal, sys
from pathlib import Path
from skyward.training import TrainerCallback
from tests.training.diloco.test_callback import KILLED_AT, joining, ours

class Dies(TrainerCallback):
    def on_step_end(self, state, **kwargs):
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

ours(Path(sys.argv[1]), joining(sys.argv[2]), Dies())
"""
    ends: list[dict[str, torch.Tensor]] = []

    def train_and_die(folder: Path, server: DiLoCoServer) -> None:
        command = [sys.executable, "-c", code, str(folder), server.address]
        assert subprocess.run(command, cwd=ROOT, timeout=200, check=False).returncode == -signal.SIGKILL
        ends.append(state_of(ours(folder, joining(server), resume=True)))

    def train_through(folder: Path, server: DiLoCoServer) -> None:
        ends.append(state_of(ours(folder, joining(server))))

    for name, train in (("killed", train_and_die), ("whole", train_through)):
        with serving(Line(), num_workers=2) as server:
            other = partial(ours, tmp_path / f"{name}-other", joining(server, "b"), data=Points(12))
            together(partial(train, tmp_path / name, server), other)
            assert server.status()["round"] == STEPS / H
    assert are_equal(*ends)


KILLED_IN_FLIGHT = """
import sys
from pathlib import Path
from tests.training.diloco.test_callback import STREAMING, joining, ours

ours(Path(sys.argv[1]), joining(sys.argv[2], **STREAMING), save_steps=4)
"""
STREAMING: dict[str, Any] = {"sync_every": 6, "num_fragments": 2, "fragment_sync_delay": 2, "quantization_bits": 8}


def test_a_streaming_run_that_is_killed_while_it_sends_ends_with_the_same_losses(tmp_path: Path) -> None:
    """The first fragment is sent after step 3, the checkpoint is of step 4, and step 5 waits for the answer."""
    last_losses: list[float] = []
    ends, gate = [], threading.Event()

    def train_and_die(folder: Path, server: DiLoCoServer) -> None:
        port = int(server.address.rpartition(":")[2])
        with LossyLine(port, request="PUT /updates", cuts=[90], gate=gate) as line:
            command = [sys.executable, "-c", KILLED_IN_FLIGHT, str(folder), line.address]
            with subprocess.Popen(command, cwd=ROOT) as process:
                until(lambda: (folder / "checkpoint-4").exists() and "PUT /updates" in line.begun, within_s=200)
                process.kill()
            gate.set()  # the server gets a part of the delta
            finish(folder, server, resume=True)

    def finish(folder: Path, server: DiLoCoServer, *, resume: bool = False) -> None:
        options = {"max_steps": 11, "logging_steps": 1, "save_steps": 4, "lr_scheduler_type": "constant"}
        trainer = run(folder, resume or None, callbacks=[joining(server, **STREAMING)], **options)
        last_losses.append(losses(trainer)[-1])
        ends.append(state_of(trainer.model))

    for name, train in (("killed", train_and_die), ("whole", finish)):
        with serving(Line(), num_workers=2, quantization_bits=8) as server:
            other = partial(ours, tmp_path / f"{name}-b", joining(server, "b", **STREAMING), data=Points(12), steps=11)
            together(partial(train, tmp_path / name, server), other)
            assert server.status()["round"] == 3
    assert are_equal(*ends)
    assert last_losses[0] == last_losses[1]


# Under others ---------------------------------------------------------------------------------------------------------


def huggingfaces(folder: Path, *callbacks: object, resume: bool = False) -> dict[str, torch.Tensor]:
    from skyward.training import HFCallbacks
    from tests.training.frameworks.hf.test_callbacks import trainer

    options: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "constant",
    }
    made = trainer(folder, HFCallbacks(callbacks), gradient_accumulation_steps=2, **options)
    made.train(resume_from_checkpoint=resume or None)
    return state_of(made.model)


def lightnings(folder: Path, *callbacks: object, resume: bool = False) -> dict[str, torch.Tensor]:
    import lightning.pytorch as lightning

    from skyward.training import LightningCallbacks
    from tests.training.frameworks.lightning.test_callbacks import Line as Module

    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        callbacks=[LightningCallbacks(callbacks, logging_steps=1)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Module()
    # Equal rows, because a loader begins again when Lightning resumes within an epoch.
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.full((10, 1), 0.3)))
    trainer.fit(module, loader, ckpt_path=folder / "checkpoint-4.ckpt" if resume else None)
    return state_of(module)


LIGHTNING = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "`isinstance.treespec:FutureWarning",
        ".*does not have many workers",
        "The number of training batches",
        "You're resuming from a checkpoint that ended before the epoch ended",
        "You defined a `validation_step` but have no `val_dataloader`",
    )
]


@pytest.mark.parametrize("train", [huggingfaces, pytest.param(lightnings, marks=LIGHTNING)])
def test_the_trainers_of_others_train_and_resume(train: Any, tmp_path: Path) -> None:
    """One run is stopped at step 4, in a round, and resumed. It ends like the other one."""
    with serving() as server:
        whole = train(tmp_path / "whole", counts := Counts(), joining(server))
        assert server.status()["round"] == STEPS / H
    assert counts.seen == [step // H for step in range(1, STEPS + 1)]
    with serving() as server:
        train(tmp_path / "stopped", joining(server), StopAt(4))
        assert server.status()["round"] == 1
        resumed = train(tmp_path / "stopped", joining(server), resume=True)
        assert server.status()["round"] == STEPS / H
    assert are_equal(resumed, whole)


def test_keras_trains_and_resumes_with_its_torch_backend_only(tmp_path: Path) -> None:
    found, _ = found_by(Path(__file__).with_name("keras_scenario.py"), "torch")
    assert found["round"] == 4
    assert found["counts"][-1] == 4
    assert found["resumed"] == found["whole"]
    assert sorted(found["read"][-24:]) == list(range(24))  # Keras reads a batch for its shapes before training begins


def test_a_model_of_another_framework_is_refused() -> None:
    with pytest.raises(UsageError, match="not a torch module; train with torch, or with KERAS_BACKEND=torch"):
        joining("127.0.0.1:1").on_train_begin(state=None, model=object(), optimizer=object())


@pytest.mark.filterwarnings("ignore:FSDP")
def test_shards_that_cannot_be_gathered_are_refused() -> None:
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    store = distributed.HashStore()  # type: ignore[attr-defined]  # it is not in their list of exports
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        old = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(UsageError, match=r"FullyShardedDataParallel hides whole parameters; use fully_shard"):
            joining("127.0.0.1:1").on_train_begin(state=None, model=old, optimizer=object())
        with pytest.raises(
            UsageError, match=r"'weight' is sharded over ranks; pass a model that is whole here, or use"
        ):
            fully_shard(model := torch.nn.Linear(2, 2))
            worker.DiLoCoWorker(model, None, "127.0.0.1:1")
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["engine", "optimizer", "partitioned"])
def test_a_model_that_deepspeed_trains_is_refused(way: str) -> None:
    """The names are those of DeepSpeed, which needs a compiler on the machine, so no test has it."""
    model: Any = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "engine":
        kind = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
        engine = kind()
        engine.module = model
        model = engine
    elif way == "optimizer":
        kind = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
        optimizer.optimizer = kind()  # as in Accelerate's wrapper
    else:
        model.weight.ds_id = 0
    with pytest.raises(UsageError, match=r"model: DeepSpeed trains master copies .*; use DDP or fully_shard"):
        joining("127.0.0.1:1").on_train_begin(state=None, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match=r"model: DeepSpeed trains"):
        worker.DiLoCoWorker(model, optimizer, "127.0.0.1:1")


# Options --------------------------------------------------------------------------------------------------------------


def test_arguments_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"SERVER": "127.0.0.1:9", "SYNC_EVERY": "7", "BF16_COMM": "False", "HEARTBEAT_INTERVAL": "2.5"}
    for name, text in environment.items():
        monkeypatch.setenv(f"DILOCO_{name}", text)
    given = DiLoCoCallback()
    assert given.active
    assert given.server_addr == "127.0.0.1:9"
    expected = {"sync_every": 7, "bf16_comm": False, "heartbeat_interval": 2.5, "dylu": False, "worker_id": None}
    assert expected.items() <= given.worker_options.items()
    assert DiLoCoCallback(heartbeat_interval=0).worker_options["heartbeat_interval"] == 0
    assert DiLoCoCallback(bf16_comm=True).worker_options["bf16_comm"]
    monkeypatch.setenv("DILOCO_DYLU", "maybe")
    with pytest.raises(UsageError, match="DILOCO_DYLU='maybe': cannot be read; set it to true or false"):
        DiLoCoCallback()
    assert not DiLoCoCallback(dylu=False).worker_options["dylu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_fragments": 0}, "num_fragments=0: must be a whole number >= 1"),
        ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1: must be a whole number >= 0"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha=1.5: must be between 0 and 1"),
        ({"quantization_bits": 3}, "quantization_bits=3: must be 8, 4, or 0 for none; set quantization_bits=8"),
        ({"sync_every": 0}, "sync_every=0: must be a whole number >= 1"),
        ({"timeout": math.inf}, "timeout=inf: must be a finite number of seconds"),
        ({"max_sync_retries": -1}, "max_sync_retries=-1: must be a whole number >= 0"),
        ({"dylu": True, "heartbeat_interval": 0}, "dylu=True: needs heartbeats"),
    ],
)
def test_illegal_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DiLoCoCallback("127.0.0.1:1", **options)


def test_a_run_waits_for_a_server_that_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.01)
    with serving() as server:
        port = int(server.address.rpartition(":")[2])
    address = f"127.0.0.1:{port}"
    with pytest.raises(UsageError, match=r"does not answer.*; start `skyward diloco serve`"):
        ours(tmp_path / "never", joining(address, max_sync_retries=1))
    caplog.clear()

    def serve() -> None:
        until(lambda: "worker a retries in" in caplog.text)
        with serving(port=port) as server:
            until(lambda: server.status()["round"] == 1)
            until(lambda: not server.status()["workers"])

    together(serve, partial(ours, tmp_path, joining(address, max_sync_retries=1000), steps=H))
