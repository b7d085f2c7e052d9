"""Cases of two ranks under the Trainers of Hugging Face and of Lightning. `tests/training/conftest.py` runs them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
import torchmetrics
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments  # noqa: F401  # loads what is lazy, once for both ranks

from skyward.training import RankFailed
from skyward.training.sakura import SakuraHFCallback, SakuraLightningCallback
from tests.training.checkpoint.crew import Case
from tests.waiting import until

WORLD = 2
X = torch.arange(24.0)[:, None] / 10
ROWS = [{"x": x, "labels": 2 * x + 1} for x in X]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.last(torch.tanh(self.first(x))) - labels) ** 2).mean()}


def score(model: Any, rows: Any) -> dict[str, float]:
    with torch.no_grad():
        return {"loss": sum(model(**row)["loss"].item() for row in rows) / len(rows)}


def broken(model: Any, rows: Any) -> dict[str, float]:
    raise ZeroDivisionError("no rows")


class Falls:
    def __init__(self, *scores: float) -> None:
        self._scores = list(scores)

    def __call__(self, model: Any, rows: Any) -> dict[str, float]:
        return {"loss": self._scores.pop(0)}


class Inline(transformers.TrainerCallback):  # type: ignore[misc]  # it is Any to mypy here
    """Callback that scores a copy of the weights at the end of each epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if hasattr(next(model.parameters()), "to_local"):
            weights = get_model_state_dict(model, options=FULL)
        else:
            weights = copy.deepcopy(model.state_dict())
        if state.is_world_process_zero:
            fresh = Net()
            fresh.load_state_dict(weights)
            self.losses.append(score(fresh, ROWS[:4])["loss"])


class ShardedTrainer(Trainer):  # type: ignore[misc]
    """Trainer of a model that is sharded already.

    accelerate shards only on accelerators, and would wrap the model in DDP here.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model


def hf(folder: Path, model: Any, *callbacks: Any, kind: Any = Trainer, **chosen: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        max_grad_norm=0.0,
        learning_rate=0.01,
        **{"num_train_epochs": 3, "save_strategy": "no", **chosen},
    )
    made = kind(model, args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=list(callbacks))
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return made


def beside(**chosen: Any) -> Any:
    given = {"model_factory": Net, "eval_fn": score, "eval_payload": ROWS[:4], "gate": "always", "verbose": False}
    return SakuraHFCallback(**{**given, **chosen})


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def hf_ddp(ranks: Any, folder: Path) -> Any:
    ours, inline = beside(), Inline()
    made = hf(folder, net(), inline, ours)
    logged = [[entry["step"], entry["eval_loss"]] for entry in made.state.log_history if "eval_loss" in entry]
    return [logged, inline.losses, [row["loss"] for row in ours.history]]


def hf_fsdp2(ranks: Any, folder: Path) -> Any:
    model = net()
    fully_shard(model.first)
    fully_shard(model)
    ours, inline = beside(), Inline()
    made = hf(folder, model, inline, ours, kind=ShardedTrainer)
    logged = [[entry["step"], entry["eval_loss"]] for entry in made.state.log_history if "eval_loss" in entry]
    return [logged, inline.losses, [row["loss"] for row in ours.history]]


def hf_fsdp2_skips(ranks: Any, folder: Path) -> Any:
    """Skip evaluations while the first one waits. No rank waits for one that gathers."""
    goes_on = threading.Event()

    def waits(model: Any, rows: Any) -> Any:
        goes_on.wait(60)
        return score(model, rows)

    def has_ended() -> bool:
        # The callback shows users only what has ended, and not whether more is to come.
        return not ours._evaluations.evaluator.pending

    class LetsGo(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 13:
                goes_on.set()
            if state.global_step == 17 and ranks.rank == 0:  # the next one is that of step 18
                until(has_ended)

    model = net()
    fully_shard(model)
    ours = beside(eval_fn=waits, max_pending=1)
    hf(folder, model, ours, LetsGo(), kind=ShardedTrainer)
    return [[row["step"], row["status"]] for row in sorted(ours.history, key=lambda row: row["step"])]


def hf_stops_early(ranks: Any, folder: Path) -> Any:
    ours = beside(eval_fn=Falls(0.5, 0.2, 0.4, 0.9, 0.9, 0.9), cadence="trainer", gate="sync")
    stops = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    strategy = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    made = hf(folder, net(), ours, stops, num_train_epochs=6, **strategy)
    return [made.state.global_step, made.state.best_metric, Path(made.state.best_model_checkpoint).name]


def hf_raises_what_failed_beside_on_all(ranks: Any, folder: Path) -> Any:
    ours = beside(eval_fn=broken, on_error="raise")
    try:
        hf(folder, net(), ours)
    except (ZeroDivisionError, RankFailed) as error:
        ours.close()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.square = torchmetrics.MeanSquaredError()
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        return self.net(batch[0], 2 * batch[0] + 1)["loss"]

    def validation_step(self, batch: Any) -> None:
        x = batch[0]
        self.log("val_loss", self.net(x, 2 * x + 1)["loss"], sync_dist=True)
        self.square(x, 2 * x)
        self.log("square", self.square)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ShardedModule(Module):
    def configure_model(self) -> None:
        fully_shard(self.net.first)
        fully_shard(self.net)


class ShardedStrategy(DDPStrategy):  # type: ignore[misc]
    """Strategy of a module that shards itself: Lightning's own strategies for it want accelerators."""

    def configure_ddp(self) -> None:
        """Wrap nothing."""


class InlineLightning(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(next(pl_module.parameters()), "to_local"):
            weights = get_model_state_dict(pl_module, options=FULL)
        else:
            weights = copy.deepcopy(pl_module.state_dict())
        if trainer.is_global_zero:
            fresh = Module()
            fresh.load_state_dict(weights)
            with torch.no_grad():
                self.losses.append(fresh.net(X[:4], 2 * X[:4] + 1)["loss"].item())


def val_loader() -> Any:
    return DataLoader(TensorDataset(X[:4]), batch_size=4)


def lightning(folder: Path, module: Any, *callbacks: Any, strategy: Any = "ddp", **chosen: Any) -> Any:
    made = LightningTrainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        strategy=strategy,
        devices=WORLD,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{"max_epochs": 3, **chosen},
    )
    made.fit(module, DataLoader(TensorDataset(X), batch_size=2), val_loader())
    return made


def validations(**chosen: Any) -> Any:
    given = {"val_loader_factory": val_loader, "model_factory": Module, "gate": "always", "verbose": False}
    return SakuraLightningCallback(**{**given, **chosen})


def lightning_ddp(ranks: Any, folder: Path) -> Any:
    ours, inline = validations(), InlineLightning()
    saves = ModelCheckpoint(folder / "best", monitor="val_loss", filename="{step}")
    made = lightning(folder, Module(), inline, saves, ours)
    best = torch.load(saves.best_model_path, weights_only=False)["global_step"]
    told = [float(made.callback_metrics[name]) for name in ("val_loss", "square")]
    return [[row["val_loss"] for row in ours.history], inline.losses, told, best]


def lightning_fsdp2(ranks: Any, folder: Path) -> Any:
    ours, inline = validations(), InlineLightning()
    lightning(folder, ShardedModule(), inline, ours, strategy=ShardedStrategy())
    return [[row["val_loss"] for row in ours.history], inline.losses]


def lightning_stops_early(ranks: Any, folder: Path) -> Any:
    ours = validations(gate="sync")
    made = lightning(folder, Module(), EarlyStopping("val_loss", stopping_threshold=1e9), ours)
    return made.global_step


CASES: list[Case] = [
    hf_ddp,
    hf_fsdp2,
    hf_fsdp2_skips,
    hf_stops_early,
    hf_raises_what_failed_beside_on_all,
    lightning_ddp,
    lightning_fsdp2,
    lightning_stops_early,
]
