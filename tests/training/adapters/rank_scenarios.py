"""Run by test_ranks.py: two ranks on gloo, forked from one process that has imported the frameworks, go through every
scenario. Prints what each rank says, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments  # noqa: F401  # loads what is lazy, once for both ranks

from skyward.training import DefaultMetrics, DivergenceDetector, RankFailed, TrainerCallback
from skyward.training.adapters.hf import HFCallbacks
from skyward.training.adapters.lightning import LightningCallbacks
from tests.training.adapters.recording import Asks, Recorder

WORLD = 2


class Breaks(TrainerCallback):
    """On one rank only, while the other goes on."""

    def on_log(self, state: Any, ranks: Any, **_: Any) -> None:
        if ranks.rank == 1 and state.global_step == 2:
            raise OSError("disk full")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.a * x - labels) ** 2).mean()}


class LogsAlone(Trainer):  # type: ignore[misc]  # it is Any to mypy here
    """A user's trainer that logs within a step, on rank 0 only."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_world_process_zero():
            self.log({"mine": 1.0})
        return super().compute_loss(*args, **kwargs)


def hf(folder: str, *callbacks: Any, kind: Any = Trainer, **chosen: Any) -> Any:
    given: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 1, "save_strategy": "steps", **chosen}
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        **given,
    )
    data = [{"x": torch.tensor([i / 10]), "labels": torch.tensor([i / 5])} for i in range(24)]
    made = kind(Line(), args, train_dataset=data, callbacks=[HFCallbacks(callbacks)])
    made.remove_callback(transformers.PrinterCallback)
    try:
        made.train()
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return made.state.global_step


class Module(LightningModule):  # type: ignore[misc]  # it is Any to mypy here
    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    def training_step(self, batch: Any) -> Any:
        return self.line(batch[0], 2 * batch[0])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def lightning(folder: str, *callbacks: Any, **chosen: Any) -> Any:
    made = LightningTrainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD,
        callbacks=[LightningCallbacks(callbacks, logging_steps=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )
    try:
        made.fit(Module(), DataLoader(TensorDataset(torch.arange(24.0)[:, None] / 10), batch_size=2))
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return made.global_step


def files(folder: str) -> list[str]:
    return sorted(each.name for each in Path(folder).glob("checkpoint-*"))


def hf_stops_where_one_rank_asks(folder: str) -> Any:
    return [hf(folder, Asks("on_step_end", 3, "stop", rank=1)), files(folder)]


def hf_stops_within_a_step_at_its_end(folder: str) -> Any:
    asks = Asks("on_substep_end", 1, "should_training_stop", rank=1)
    return [hf(folder, asks, gradient_accumulation_steps=2), files(folder)]


def hf_aborts_where_one_rank_asks(folder: str) -> Any:
    return [hf(folder, Asks("on_log", 3, "abort", rank=1), save_steps=2), files(folder)]


def hf_raises_on_all(folder: str) -> Any:
    return hf(folder, Breaks())


def hf_logs_of_one_rank_hold_up_nobody(folder: str) -> Any:
    ours = Recorder(only=("on_log",))
    steps = hf(folder, DefaultMetrics(), DivergenceDetector(), ours, kind=LogsAlone, max_steps=2, save_strategy="no")
    return [steps, sum(1 for told in ours.of("on_log") if "mine" in told["logs"])]


def lightning_stops_where_one_rank_asks(folder: str) -> Any:
    return [lightning(folder, Asks("on_step_end", 3, "stop", rank=1)), files(folder)]


def lightning_aborts_where_one_rank_asks(folder: str) -> Any:
    return [lightning(folder, Asks("on_log", 3, "abort", rank=1)), files(folder)]


def lightning_raises_on_all(folder: str) -> Any:
    return lightning(folder, Breaks())


def lightning_logs_the_mean_of_all_ranks(folder: str) -> Any:
    ours = Recorder(only=("on_log", "on_train_metrics"))
    lightning(folder, DefaultMetrics(), ours, use_distributed_sampler=True)
    logged = [told["logs"].get("loss") for told in ours.of("on_log")][:3]
    return [logged, [float(told["metrics"]["loss"]) for told in ours.of("on_train_metrics")][:3]]


SCENARIOS: list[Callable[[str], Any]] = [
    hf_stops_where_one_rank_asks,
    hf_stops_within_a_step_at_its_end,
    hf_aborts_where_one_rank_asks,
    hf_raises_on_all,
    hf_logs_of_one_rank_hold_up_nobody,
    lightning_stops_where_one_rank_asks,
    lightning_aborts_where_one_rank_asks,
    lightning_raises_on_all,
    lightning_logs_the_mean_of_all_ranks,
]


def rank_main(rank: int, folder: str, said: Any) -> None:
    warnings.simplefilter("ignore")  # of frameworks; those of ours are errors in the other tests
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    # Lightning takes what torchrun would have set as its environment; the group itself meets at a file.
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    try:
        for scenario in SCENARIOS:
            said.put((scenario.__name__, rank, scenario(f"{folder}/{scenario.__name__}")))
            torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank would wait


def main() -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        said = context.Queue()
        ranks = [context.Process(target=rank_main, args=(rank, folder, said), daemon=True) for rank in range(WORLD)]
        for each in ranks:
            each.start()
        found = [said.get(timeout=60) for _ in range(WORLD * len(SCENARIOS))]
        for each in ranks:
            each.join(20)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
