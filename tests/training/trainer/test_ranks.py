"""Two gloo ranks: the same losses as one process, the same stop on both, and a resume to the bit. One pool for all."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import skyward as sky
from skyward.errors import UsageError
from skyward.pool.pool import ComputePool
from skyward.training import DDPTrainer, DDPTrainingArguments, RankFailed
from tests.few_modules import lean_frameworks
from tests.training.trainer import regression
from tests.training.trainer.regression import Line, Points, Stream, callback, history, losses, run, trainer

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=1) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def _travelling_model() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(regression)
    yield
    cloudpickle.unregister_pickle_by_value(regression)


def on_two_ranks(pool: ComputePool, function: Any, *args: Any) -> list[Any]:
    """Return its value on each rank."""

    @sky.compute
    @sky.integrations.torch(backend="gloo", processes_per_node=2)
    def gathered() -> list[Any]:
        import torch.distributed as dist

        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, function(*args))
        return everybody

    found: list[Any] = gathered() >> pool
    return found


def result(made: Any) -> dict[str, Any]:
    return {"history": history(made), "weights": [each.tolist() for each in made.model.parameters()]}


READING: dict[str, tuple[Any, dict[str, Any]]] = {
    "each its own": (lambda: Points(21), {}),
    "rank 0 for all": (lambda: Points(21), {"dispatch_batches": True}),
    "rank 0 for all, an iterable": (lambda: Stream(21), {"max_steps": 8}),
}


@pytest.mark.parametrize("reading", READING)
def test_two_ranks_have_the_losses_of_one_process_with_the_double_batch(
    reading: str, pool: ComputePool, tmp_path: Path
) -> None:
    """With 21 samples, neither ranks nor batches divide them, and every sample counts once."""
    data, args = READING[reading]
    common: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
                              "gradient_accumulation_steps": 2, "save_strategy": "no", **args}  # fmt: skip

    def train(size: int) -> dict[str, Any]:
        made = run(tmp_path, data=data(), eval_dataset=Points(13), per_device_train_batch_size=size, **common)
        return result(made)

    first, second = on_two_ranks(pool, train, 3)
    assert first == second
    alone = train(6)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    for mine, other in zip(first["history"], alone["history"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


HARD: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "epoch",
}
RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "each its own": (lambda: Points(21, noise=0.1), {}),
    "rank 0 for all": (lambda: Points(21, noise=0.1), {"dispatch_batches": True}),
    "rank 0 for all, an iterable": (lambda: Stream(21, noise=0.1), {"max_steps": 7}),
    "each its own iterable": (lambda: Stream(9, noise=0.1), {"max_steps": 7, "dispatch_batches": False}),
}


@pytest.mark.parametrize("reading", RESUMED)
def test_two_ranks_resume_after_any_step_without_a_difference(reading: str, pool: ComputePool, tmp_path: Path) -> None:
    data, args = RESUMED[reading]

    def all_resumes() -> list[Any]:
        """Run the whole run, then one from each of its checkpoints."""

        def one(folder: str, step: int | None) -> dict[str, Any]:
            resume = None if step is None else str(tmp_path / "whole" / f"checkpoint-{step}")
            torch.manual_seed(step or 99)
            return result(run(tmp_path / folder, resume, model=Line(dropout=0.3), data=data(), **HARD | args))

        whole = one("whole", None)
        steps = whole["history"][-1]["step"]
        return [whole, *(one(f"after-{step}", step) for step in range(1, steps + 1))]

    ranks = on_two_ranks(pool, all_resumes)
    assert len(ranks[0]) == 1 + (7 if "max_steps" in args else 6)
    for whole, *resumed in ranks:
        assert resumed == [whole] * len(resumed)
    assert ranks[0][0] == ranks[1][0]


def test_a_request_of_one_rank_is_obeyed_by_both(pool: ComputePool, tmp_path: Path) -> None:
    def train() -> Any:
        import torch.distributed as dist

        def asks(state: Any, control: Any, **_: Any) -> None:
            if dist.get_rank() == 1 and state.global_step == 3:
                control.stop()

        saved: list[str] = []
        made = run(tmp_path, save_steps=100, max_steps=9, callbacks=[
            callback(on_step_end=asks, on_save=lambda checkpoint, **_: saved.append(Path(checkpoint).name))
        ])  # fmt: skip
        return made.state.global_step, saved

    assert on_two_ranks(pool, train) == [(3, ["checkpoint-3"])] * 2
    assert {each.name for each in (tmp_path / "checkpoint-3").glob("*rank*")} == {
        f"{key}_state_rank_{rank}.pt" for key in ("dataset", "rng") for rank in (0, 1)
    }


def test_an_error_of_one_ranks_callback_is_raised_on_both(pool: ComputePool, tmp_path: Path) -> None:
    def train() -> Any:
        import torch.distributed as dist

        def fails(state: Any, **_: Any) -> None:
            if dist.get_rank() == 1 and state.global_step == 2:
                raise OSError("no space")

        try:
            run(tmp_path, max_steps=9, save_strategy="no", callbacks=[callback(on_step_end=fails)])
        except (OSError, RankFailed) as error:
            return type(error).__name__, "no space" in str(error)

    assert on_two_ranks(pool, train) == [("RankFailed", True), ("OSError", True)]


def test_a_failing_reader_leaves_nobody_waiting(pool: ComputePool, tmp_path: Path) -> None:
    class Broken(Points):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError("row 7 is broken")
            return super().__getitem__(index)

    def train() -> Any:
        try:
            run(tmp_path, data=Broken(20), dispatch_batches=True, train_sampling_strategy="sequential", max_steps=9)
        except (ValueError, RankFailed) as error:
            return type(error).__name__, "row 7 is broken" in str(error)

    assert on_two_ranks(pool, train) == [("ValueError", True), ("RankFailed", True)]


def test_a_save_that_fails_on_one_rank_fails_on_both_and_keeps_the_old_checkpoint(
    pool: ComputePool, tmp_path: Path
) -> None:
    class Poison:
        """A callback whose state cannot be written on rank 0 in the second save."""

        saves = 0

        def state_dict(self) -> dict[str, Any]:
            self.saves += 1
            return {"bad": threading.Lock()} if self.saves > 1 else {"good": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def train() -> Any:
        try:
            run(tmp_path, max_steps=4, save_steps=2, callbacks=[Poison()])
        except UsageError as error:
            return "StateComponent 'callbacks'" in str(error), "lock" in str(error)

    assert on_two_ranks(pool, train) == [(True, True)] * 2
    assert [each.name for each in tmp_path.iterdir() if "checkpoint" in each.name] == ["checkpoint-2"]


def test_fsdp_is_left_unchanged_trains_like_one_process_and_resumes(pool: ComputePool, tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        return Net(layers)

    rows = [
        {"x": torch.randn(4, generator=torch.Generator().manual_seed(at)), "labels": torch.ones(2) * at / 20}
        for at in range(19)
    ]
    common: dict[str, Any] = {"data": rows, "eval_dataset": rows[:5], "logging_steps": 1, "num_train_epochs": 2,
                              "gradient_accumulation_steps": 2, "save_steps": 2, "learning_rate": 0.01}  # fmt: skip

    def train() -> Any:
        from torch.distributed.fsdp import fully_shard

        def sharded() -> torch.nn.Module:
            made = model()
            fully_shard(made)
            return made

        def is_part(parameter: Any) -> bool:
            return bool(parameter.to_local().numel() < parameter.numel())

        def weights(made: Any) -> list[Any]:
            return [each.full_tensor().tolist() for each in made.model.parameters()]

        whole = run(tmp_path / "fsdp", model=sharded(), per_device_train_batch_size=2, **common)
        assert whole.model_wrapped is whole.model
        assert all(is_part(each) for each in whole.model.parameters())
        again = run(tmp_path / "again", str(tmp_path / "fsdp" / "checkpoint-2"), model=sharded(),
                    per_device_train_batch_size=2, **common)  # fmt: skip
        assert history(again) == history(whole)
        assert weights(again) == weights(whole)
        return weights(whole), losses(whole), whole.evaluate()["eval_loss"]

    first, second = on_two_ranks(pool, train)
    assert first == second
    alone = run(tmp_path / "alone", model=model(), per_device_train_batch_size=4, **common)
    assert first[1] == pytest.approx(losses(alone), rel=1e-4)
    assert first[2] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-4)
    for mine, other in zip(first[0], alone.model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(mine), other.detach(), rtol=1e-4, atol=1e-5)


class Net(torch.nn.Module):
    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return (torch.nn.functional.mse_loss(self.layers(x), labels),)


def test_a_ddp_trainer_declares_the_shared_state_of_its_ranks(pool: ComputePool, tmp_path: Path) -> None:
    def train(dispatches: bool) -> Any:
        settings: dict[str, Any] = {"output_dir": tmp_path, "max_steps": 2, "save_strategy": "no", "use_cpu": True}
        loaders: list[Any] = []
        made = DDPTrainer(
            Line(),
            DDPTrainingArguments(disable_tqdm=True, **settings | ({} if dispatches else {"dispatch_batches": False})),
            train_dataset=Points(20),
            callbacks=[callback(on_train_begin=lambda train_dataloader, **_: loaders.append(train_dataloader))],
        )
        made.train()
        patterns = {component.key: component.sharing_pattern.value for component in made.get_state_components()}
        return patterns, loaders[0] is not None

    first, second = on_two_ranks(pool, train, True)
    assert (first[1], second[1]) == (True, False)
    assert (
        first[0]
        == second[0]
        == {
            "model": "replicated",
            "optimizer": "replicated",
            "scheduler": "replicated",
            "scaler": "replicated",
            "dataset": "global",
            "callbacks": "global",
            "trainer": "global",
            "rng": "per_rank",
        }
    )
    assert on_two_ranks(pool, train, False)[1] == (first[0] | {"dataset": "per_rank"}, True)
    assert {field.name for field in dataclasses.fields(DDPTrainingArguments)} >= {"dispatch_batches"}


def test_predictions_of_all_ranks_come_in_the_order_of_the_data(pool: ComputePool, tmp_path: Path) -> None:
    def predict() -> Any:
        made = trainer(
            tmp_path, per_device_eval_batch_size=2, compute_metrics=lambda told: {"seen": len(told.label_ids)}
        )
        done = made.predict(Points(11))
        return done.label_ids.tolist(), done.metrics["test_seen"], done.metrics["test_loss"]

    first, second = on_two_ranks(pool, predict)
    assert first[:2] == second[:2] == ((2 * Points(11).x + 3).tolist(), 11)
    assert first[2] == pytest.approx(((2 * Points(11).x + 3) ** 2).mean().item())
