"""Validations beside the real Trainer of Lightning."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from skyward.errors import UsageError
from skyward.training import JsonLogger, LightningCallbacks
from skyward.training.sakura import SakuraLightningCallback, SakuraTrainer

# Lightning 2.6 uses functions that torch 2.13 deprecates, and takes few workers for many cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

X = torch.arange(10.0)[:, None] / 10
STEPS = 4  # of an epoch


def loader() -> Any:
    return DataLoader(TensorDataset(X), batch_size=3)


class Line(LightningModule):  # type: ignore[misc]  # it is Any to mypy here
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.a = torch.nn.Parameter(torch.zeros(1))
        self.square = torchmetrics.MeanSquaredError()
        self.seen = list[float]()

    def training_step(self, batch: Any, index: int) -> Any:
        (x,) = batch
        loss = ((self.a * x - 2 * x) ** 2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        (x,) = batch
        self.log("val_loss", ((self.a * x - 2 * x) ** 2).mean())
        self.square(self.a * x, 2 * x)
        self.log("square", self.square, on_step=True, on_epoch=True)
        self.log("a", self.a, reduce_fx="max")

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.a.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"])


def lightnings(folder: Path, **chosen: Any) -> dict[str, Any]:
    """Return options of Lightning's Trainer."""
    return {
        "default_root_dir": folder,
        "max_epochs": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in chosen.get("callbacks", [])),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        **chosen,
    }


def beside(folder: Path, model: Any = None, *, val_loader: Any = None, **chosen: Any) -> SakuraTrainer:
    made = SakuraTrainer(**lightnings(folder, **{"gate": "always", "verbose": False, **chosen}))
    made.run(model or Line(), loader(), val_loader or loader())
    return made


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    left = [each for each in threading.enumerate() if "evaluation" in each.name]
    for each in left:
        each.join(60)
    assert not [each for each in left if each.is_alive()]


class Overfits(Line):
    """Model that validates better for three epochs, then worse, because training has another optimum."""

    def validation_step(self, batch: Any, index: int) -> None:
        (x,) = batch
        self.log("val_loss", ((self.a * x - 1.2 * x) ** 2).mean())


class Collects(Callback):  # type: ignore[misc]
    """Callback that collects the results of Lightning's own validations."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            told = trainer.callback_metrics
            self.metrics.append({name: value.item() for name, value in told.items() if name != "train_loss"})


def logged(folder: Path) -> list[dict[str, str]]:
    """Return the validations in a log of CSVLogger, by step."""
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return sorted(
        ({k: v for k, v in row.items() if v} for row in rows if row["val_loss"]), key=lambda r: int(r["step"])
    )


@pytest.mark.parametrize(
    "chosen", [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 2}, {"limit_val_batches": 2}], ids=str
)
def test_values_names_and_log_steps_are_those_of_lightnings_own_validation(
    chosen: dict[str, Any], tmp_path: Path
) -> None:
    inline = Collects()
    theirs = lightnings(tmp_path, logger=CSVLogger(tmp_path, "theirs"), callbacks=[inline], **chosen)
    Trainer(**theirs, num_sanity_val_steps=0).fit(Line(), loader(), loader())
    ours = beside(tmp_path, logger=CSVLogger(tmp_path, "ours"), **chosen)
    assert [record.metrics for record in ours.records] == inline.metrics
    assert len({str(each) for each in inline.metrics}) == len(inline.metrics) >= 2
    got, wanted = logged(tmp_path / "ours/version_0"), logged(tmp_path / "theirs/version_0")
    per_batch = {"square_step"}
    assert got == [{k: v for k, v in row.items() if k not in per_batch} for row in wanted]


def test_rows_keep_the_usual_keys_and_gain_ours(tmp_path: Path) -> None:
    ours = beside(tmp_path, model_path=tmp_path / "best.pt")
    assert [(row["epoch"], row["step"], row["status"]) for row in ours.history] == [
        (epoch, STEPS * (epoch + 1), "ok") for epoch in range(4)
    ]
    for row in ours.history:
        assert row["worker_name"] == row["worker"] == "in-process"
        assert row["elapsed_secs"] > 0
        assert row["submitted_at"] <= row["started_at"] <= row["finished_at"]
    assert ours.best_val_loss == min(row["val_loss"] for row in ours.history)
    assert ours.trainer.callback_metrics["val_loss"].item() == pytest.approx(ours.history[-1]["val_loss"])


def test_before_the_first_result_there_is_no_best(tmp_path: Path) -> None:
    made = SakuraTrainer(**lightnings(tmp_path))
    assert made.best_val_loss is None
    assert made.history == []


def test_the_weights_in_model_path_are_the_scored_ones(tmp_path: Path) -> None:
    model = Overfits()
    ours = beside(tmp_path, model, model_path=tmp_path / "best.pt")
    losses = [row["val_loss"] for row in ours.history]
    best = losses.index(min(losses))
    assert best == 2
    assert torch.load(tmp_path / "best.pt")["a"].item() == model.seen[best]


def test_early_stopping_counts_each_result_once(tmp_path: Path) -> None:
    stops = EarlyStopping("val_loss", patience=2)
    inline = EarlyStopping("val_loss", patience=2)
    Trainer(**lightnings(tmp_path, max_epochs=9, callbacks=[inline])).fit(Overfits(), loader(), loader())
    ours = beside(tmp_path, Overfits(), max_epochs=9, callbacks=[stops])
    assert inline.stopped_epoch == 4
    # Strict: a result is reported when the next epoch ends.
    assert stops.stopped_epoch == inline.stopped_epoch + 1
    assert ours.trainer.current_epoch == inline.stopped_epoch + 2
    assert stops.best_score == inline.best_score


def test_in_step_with_training_it_stops_as_lightning_does(tmp_path: Path) -> None:
    stops, inline = EarlyStopping("val_loss", patience=2), EarlyStopping("val_loss", patience=2)
    Trainer(**lightnings(tmp_path, max_epochs=9, callbacks=[inline])).fit(Overfits(), loader(), loader())
    beside(tmp_path, Overfits(), max_epochs=9, callbacks=[stops], gate="sync")
    assert stops.stopped_epoch == inline.stopped_epoch
    assert stops.wait_count == inline.wait_count


def test_a_metric_that_nobody_reports_is_lightnings_own_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="`vall_loss` which is not available"):
        beside(tmp_path, callbacks=[EarlyStopping("vall_loss")])


def test_callbacks_that_monitor_training_are_left_alone(tmp_path: Path) -> None:
    stops = EarlyStopping("train_loss", stopping_threshold=1e9)
    ours = beside(tmp_path, callbacks=[stops])
    assert ours.trainer.current_epoch == 1


def test_model_checkpoints_hold_the_scored_weights(tmp_path: Path) -> None:
    saves = ModelCheckpoint(
        tmp_path / "best", monitor="val_loss", filename="{epoch}-{val_loss:.3f}", save_top_k=2, save_last=True
    )
    model = Overfits()
    ours = beside(tmp_path, model, callbacks=[saves])
    order = sorted(range(4), key=lambda epoch: ours.history[epoch]["val_loss"])
    assert {Path(path).name for path in saves.best_k_models} == {
        f"epoch={epoch}-val_loss={ours.history[epoch]['val_loss']:.3f}.ckpt" for epoch in order[:2]
    }
    for path in saves.best_k_models:
        epoch = int(Path(path).name[len("epoch=")])
        checkpoint = torch.load(path, weights_only=False)
        assert checkpoint["state_dict"]["a"].item() == model.seen[epoch]
        assert checkpoint["global_step"] == STEPS * (epoch + 1)
    assert int(Path(saves.best_model_path).name[len("epoch=")]) == order[0]
    assert torch.load(tmp_path / "best/last.ckpt", weights_only=False)["state_dict"]["a"].item() == model.seen[-1]
    assert sorted(each.name for each in (tmp_path / "best").iterdir()) == sorted(
        [*(Path(path).name for path in saves.best_k_models), "last.ckpt"]
    )


class Plateau(Overfits):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_a_plateau_scheduler_steps_once_for_each_result(tmp_path: Path) -> None:
    theirs = Trainer(**lightnings(tmp_path))
    theirs.fit(Plateau(), loader(), loader())
    ours = beside(tmp_path, Plateau(), gate="sync")
    wanted, got = (each.lr_scheduler_configs[0] for each in (theirs, ours.trainer))
    assert wanted.scheduler.state_dict() == got.scheduler.state_dict()
    assert wanted.scheduler.last_epoch == 4
    assert theirs.optimizers[0].param_groups[0]["lr"] == ours.trainer.optimizers[0].param_groups[0]["lr"] < 0.1
    assert got.frequency == wanted.frequency == 1
    assert beside(tmp_path, Plateau()).trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


class Late(Line):
    """Model whose validation waits until training has gone on."""

    goes_on = threading.Event()

    def on_validation_start(self) -> None:
        assert self.goes_on.wait(60)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.trainer.global_step == 2 * STEPS + 2:
            self.goes_on.set()


def test_late_results_are_logged_and_decide_nothing(tmp_path: Path) -> None:
    Late.goes_on.clear()
    saves = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=-1)
    ours = beside(
        tmp_path, Late(), drain="lazy", max_age_steps=4, callbacks=[saves], logger=CSVLogger(tmp_path, "ours")
    )
    statuses = [row["status"] for row in ours.history]
    assert (statuses[0], statuses[-1]) == ("late", "ok")
    assert len(logged(tmp_path / "ours/version_0")) == 4
    assert len(saves.best_k_models) == len(list((tmp_path / "best").iterdir())) == statuses.count("ok")


class Broken(Line):
    def validation_step(self, batch: Any, index: int) -> None:
        raise ZeroDivisionError("no rows")


def test_a_validation_that_raises_is_a_row_and_training_goes_on(tmp_path: Path) -> None:
    model, alone = Broken(), Line()
    stops = EarlyStopping("val_loss")
    ours = beside(tmp_path, model, callbacks=[stops])
    Trainer(**lightnings(tmp_path)).fit(alone, loader(), loader())
    assert [(row["status"], row["error"]) for row in ours.history] == [("failed", "ZeroDivisionError: no rows")] * 4
    assert model.a.item() == alone.a.item()
    assert "on_train_epoch_end" not in vars(stops)


def test_a_validation_that_raises_ends_training_on_request(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="no rows"):
        beside(tmp_path, Broken(), on_error="raise")


class Fails(Line):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            raise OSError("disk full")


def test_a_fit_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=-1)
    with pytest.raises(OSError, match="disk full"):
        beside(tmp_path, Fails(), callbacks=[saves])
    # Strict: the first validation's result was reported, the second's was not.
    assert len(saves.best_k_models) == 1
    assert [str(each) for each in (tmp_path / "best").iterdir()] == list(saves.best_k_models)
    assert "on_train_epoch_end" not in vars(saves)


def test_our_callbacks_get_it_with_the_evaluated_step(tmp_path: Path) -> None:
    ours = beside(tmp_path, callbacks=[LightningCallbacks([JsonLogger()], logging_steps=1)])
    records = json.loads((tmp_path / "logs/trainer_logs.json").read_text())
    told = [(each["global_step"], each["epoch"], each["eval_loss"]) for each in records if "eval_loss" in each]
    assert told == [(row["step"], row["epoch"] + 1.0, row["val_loss"]) for row in ours.history]
    assert not [each for each in records if "val_loss" in each]
    assert sum("loss" in each for each in records) == 4 * STEPS


class Plain(LightningModule):  # type: ignore[misc]
    """Classifier without a validation_step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, index: int) -> Any:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_without_a_validation_step_it_is_the_mean_cross_entropy(tmp_path: Path) -> None:
    data = TensorDataset(X, (X[:, 0] > 0.4).long())
    made = SakuraTrainer(**lightnings(tmp_path, max_epochs=1), verbose=False)
    model = Plain()
    made.run(model, DataLoader(data, batch_size=5), DataLoader(data, batch_size=3))
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(X), data.tensors[1]).item()
    assert made.best_val_loss == pytest.approx(wanted, rel=1e-5)


class Needs(Line):
    def __init__(self, size: int) -> None:
        LightningModule.__init__(self)
        self.a = torch.nn.Parameter(torch.zeros(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_loader=None: no validation data"):
        SakuraTrainer(**lightnings(tmp_path)).run(Line(), loader())
    with pytest.raises(UsageError, match="model_factory=None: Needs needs arguments that it has not saved"):
        beside(tmp_path, Needs(3))
    with pytest.raises(UsageError, match="mode='up': must be 'min' or 'max'"):
        beside(tmp_path, mode="up")


def test_arguments_of_run_take_precedence_and_it_returns_the_model(tmp_path: Path) -> None:
    asked = list[str]()

    def make_model() -> Line:
        asked.append("model")
        return Line()

    def make_loader() -> Any:
        asked.append("loader")
        return loader()

    made = SakuraTrainer(**lightnings(tmp_path), val_loader_factory=loader, verbose=False)
    model = Line()
    paths: dict[str, Any] = {
        "model_factory": make_model,
        "val_loader_factory": make_loader,
        "model_path": tmp_path / "best.pt",
    }
    assert made.run(model, loader(), **paths, max_epochs=2) is model
    assert made.trainer.max_epochs == 2
    assert asked == ["model", "loader", "loader"]
    assert (tmp_path / "best.pt").exists()


def test_a_users_own_trainer_works(tmp_path: Path, capsys: Any) -> None:
    ours = SakuraLightningCallback(val_loader_factory=loader, gate="always")
    Trainer(**lightnings(tmp_path, callbacks=[ours], limit_val_batches=0)).fit(Line(), loader(), loader())
    assert [row["epoch"] for row in ours.history] == [0, 1, 2, 3]
    assert ours.pending == 0
    assert "validation of step 4, epoch 0: val_loss 0." in capsys.readouterr().out
