"""PipelineTrainer and AccelTrainer on real ranks: the numbers of one process, and a resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training import AccelTrainer, DDPTrainer, PipelineTrainer, Trainer, TrainingArguments
from skyward.training.checkpoint import checkpoints_in
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.trainer import pipeline_callbacks
from tests.training.trainer.regression import Line, Points, callback, history, spy

IMPORTS = ["torch._dynamo", "torch.distributed.pipelining"]


class Net(nn.Module):
    """Model x: (B, 4) float32 -> (B, 2). Dropout shows which random numbers were drawn, a norm has buffers."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.middle = nn.Sequential(nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


class Tail(nn.Module):
    """The last stage, which also reads a column of the batch."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.middle, self.last = model.middle, model.last

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor | None = None) -> Any:
        out = self.last(self.middle(hidden))
        return out if scale is None else out * scale


class Scaled(Net):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * scale


def split(model: nn.Module, stages: int) -> list[nn.Module]:
    assert isinstance(model, Net)
    return [nn.Sequential(model.first, model.middle, model.last)] if stages == 1 else [model.first, Tail(model)]


def of_first(model: nn.Module, stages: int) -> list[nn.Module]:
    """Split like `split`, with the first stage called with the batch's column."""
    first, *others = split(model, stages)
    return [First(first), *others]


class First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def rows(size: int, *, scaled: bool = False) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    made = [{"x": torch.randn(4, generator=draws), "labels": torch.randn(2, generator=draws)} for _ in range(size)]
    return [each | {"scale": torch.tensor([1.0 + at / size])} for at, each in enumerate(made)] if scaled else made


def mse(outputs: Any, labels: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, labels)


COMMON: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 5,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "learning_rate": 0.05,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "disable_tqdm": True,
    "use_cpu": True,
}


def made(
    kind: type[Trainer], folder: Path, model: nn.Module, data: Any, args: dict[str, Any], **options: Any
) -> Trainer:
    trainer = kind(
        model,
        TrainingArguments(output_dir=folder, **COMMON | args),
        train_dataset=data,
        eval_dataset=rows(13, scaled=isinstance(model, Scaled)),
        compute_loss_func=mse,
        compute_metrics=lambda told: {"mean": float(abs(told.predictions).mean()), "seen": len(told.label_ids)},
        **options,
    )
    for name in ("InfoCallback", "ProgressCallback"):
        for each in list(trainer.callback_handler):
            if type(each).__name__ == name:
                trainer.remove_callback(each)
    return trainer


def result(trainer: Trainer, resume: str | bool | None = None) -> tuple[Any, Any]:
    """Return its logs, and its weights on this rank."""
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer), {name: each.tolist() for name, each in trainer.model.state_dict().items()}


def all_resumes(make: Any, folder: Path) -> list[Any]:
    """Run the whole run, then one from each of its checkpoints."""
    whole = result(make(folder / "whole"))
    resumed = []
    for found in checkpoints_in(folder / "whole"):
        torch.manual_seed(found.step or 0)
        resumed.append(result(make(folder / f"after-{found.step}"), found.path))
    return [whole, *resumed]


# On two ranks ---------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"model_splitter": of_first},
    "gpipe": {"model_splitter": of_first, "schedule": "gpipe", "num_microbatches": 1},
    "more pieces than rows": {"model_splitter": of_first, "num_microbatches": 7},
}


def a_pipeline(ranks: Any, folder: Path) -> Any:
    """Train a pipeline on 20 rows, so that the last batch and the last step of an epoch are short, and predict."""
    said = {}
    for name, options in WAYS.items():
        trainer = made(PipelineTrainer, folder / name, Net(), rows(20), {}, **options)
        logged, _ = result(trainer)
        found = trainer.predict(rows(7))
        trainer.save_model()
        said[name] = logged, found.predictions.tolist(), found.metrics["test_loss"]
    return said


def a_pipeline_whose_last_stage_looks_at_the_batch(ranks: Any, folder: Path) -> Any:
    trainer = made(PipelineTrainer, folder, Scaled(), rows(20, scaled=True), {}, model_splitter=of_first)
    return result(trainer)[0]


def a_pipeline_goes_on(ranks: Any, folder: Path) -> Any:
    """Resume a pipeline with each rank's own random numbers, buffers, and saves behind training."""

    def make(where: Path) -> Trainer:
        torch.manual_seed(ranks.rank)
        args = {"save_strategy": "steps", "save_steps": 1, "async_save": True}
        data = rows(20) if ranks.rank == 0 else None  # rank 0 reads for all
        return made(PipelineTrainer, where, Net(dropout=0.3, norm=True), data, args, model_splitter=of_first)

    said = all_resumes(make, folder)
    names = sorted(each.name for each in (folder / "whole" / "checkpoint-2").iterdir())
    return said, names


def events_of_a_pipeline(ranks: Any, folder: Path) -> Any:
    """Return the events, which equal a Trainer's. A stop that one rank requests is both's."""

    def stops(state: Any, control: Any, **_: Any) -> None:
        if ranks.rank == 1 and state.global_step == 3:
            control.stop()

    seen: list[list[str]] = []
    ways: list[tuple[type[Trainer], int, dict[str, Any]]] = [
        (PipelineTrainer, 6, {"model_splitter": of_first}),
        (Trainer, 3, {}),  # each of two ranks
    ]
    for kind, size, options in ways:
        events: list[str] = []
        args = {"save_strategy": "steps", "per_device_train_batch_size": size, "per_device_eval_batch_size": size}
        callbacks = [spy(events), callback(on_step_end=stops)]
        trainer = made(kind, folder / kind.__name__, Net(), rows(24), args, callbacks=callbacks, **options)
        trainer.train()
        seen.append(events)
        assert trainer.state.global_step == 3
    return seen, sorted(each.step or 0 for each in checkpoints_in(folder / "PipelineTrainer"))


def an_accelerated_run(ranks: Any, folder: Path) -> Any:
    from accelerate.state import AcceleratorState

    said = {}
    for name, args in (("float", {}), ("bf16", {"bf16": True})):
        AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, whose precision cannot be changed
        said[name] = [result(made(kind, folder / f"{name}-{kind.__name__}", Net(), rows(20), args))
                      for kind in (AccelTrainer, Trainer)]  # fmt: skip
    return said


def an_accelerated_run_goes_on(ranks: Any, folder: Path) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)

    def make(where: Path) -> Trainer:
        args = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3}
        return made(AccelTrainer, where, Net(dropout=0.3), rows(20), args, accelerator=Accelerator(cpu=True))

    said = all_resumes(make, folder)
    trainer = make(folder / "declared")
    trainer.train()
    parts = {each.key: (each.sharing_pattern.value, each.is_compared) for each in trainer.get_state_components()}
    # A Trainer reads its files.
    plain = made(Trainer, folder / "plain", Net(dropout=0.3), rows(20), {"per_device_train_batch_size": 3})
    same = result(plain, str(folder / "whole" / "checkpoint-2")) == said[0]
    return said, parts, same


def what_is_refused(ranks: Any, folder: Path) -> Any:
    from accelerate import Accelerator

    def pipeline(**options: Any) -> Any:
        args = options.pop("args", {})
        given = {"model_splitter": of_first} | options
        return error_of(lambda: made(PipelineTrainer, folder, Net(), rows(20), args, **given))

    def tied(model: nn.Module, stages: int) -> list[nn.Module]:
        return [model, model]

    return {
        "no splitter": pipeline(model_splitter=None),
        "stages": pipeline(num_stages=3),
        "pieces": pipeline(num_microbatches=1),
        "schedule": pipeline(schedule="zigzag"),
        "fp16": pipeline(args={"fp16": True}),
        "every rank reads": pipeline(args={"dispatch_batches": False}),
        "too few": pipeline(model_splitter=lambda model, stages: [model]),
        "tied": pipeline(model_splitter=tied),
        "accumulates": error_of(
            lambda: AccelTrainer(Net(), TrainingArguments(folder), accelerator=Accelerator(
                cpu=True, gradient_accumulation_steps=2))
        ),
    }  # fmt: skip


def sharded_models(ranks: Any, folder: Path) -> Any:
    """Return a Trainer's errors for models whose parameters are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def of(shape: tuple[int, int], *, cuts: bool, shards: str | None) -> Any:
        mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), Net()
        if cuts:
            parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        if shards is not None:
            fully_shard(model, mesh=mesh if shards == "both" else mesh[shards])
        return error_of(lambda: made(DDPTrainer, folder, model, rows(4), {}))

    return {
        "tensor parallel": of((1, 2), cuts=True, shards=None),
        "tensor parallel and FSDP": of((1, 2), cuts=True, shards="dp"),
        "FSDP over one of two": of((1, 2), cuts=False, shards="dp"),
        "FSDP and tensor parallel of one": of((2, 1), cuts=True, shards="dp"),
        "hybrid FSDP": [of((1, 2), cuts=False, shards="both"), of((2, 1), cuts=False, shards="both")],
    }


def data_on_rank_0_only(ranks: Any, folder: Path) -> Any:
    """Evaluate data of rank 0 more than once."""
    data, dataset = (Points(20), Points(9)) if ranks.rank == 0 else (None, None)
    args = TrainingArguments(folder, max_steps=4, eval_strategy="steps", eval_steps=1, dispatch_batches=True,
                             save_strategy="no", use_cpu=True, disable_tqdm=True)  # fmt: skip
    trainer = DDPTrainer(Line(), args, train_dataset=data, eval_dataset=dataset)  # type: ignore[arg-type]
    trainer.train()
    return [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]


ON_TWO = [
    a_pipeline,
    a_pipeline_whose_last_stage_looks_at_the_batch,
    a_pipeline_goes_on,
    events_of_a_pipeline,
    an_accelerated_run,
    an_accelerated_run_goes_on,
    what_is_refused,
    sharded_models,
    data_on_rank_0_only,
    *pipeline_callbacks.ON_TWO,
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def said(two: Path) -> Said:
    return run_cases(ON_TWO, world=2, folder=two, imports=IMPORTS, environment=environment)


def environment(rank: int) -> dict[str, str]:
    """Set the variables of torchrun and of our integrations, which Accelerate reads."""
    one = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    return one | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def alone(folder: Path, model: nn.Module | None = None, *, size: int = 6, scaled: bool = False) -> Any:
    """Train in one process with the same batches. Returns its trainer too."""
    args = {"per_device_train_batch_size": size}
    trainer = made(Trainer, folder / "alone", model or Net(), rows(20, scaled=scaled), args)
    return trainer, result(trainer)[0]


def is_close(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    assert [list(each) for each in mine] == [list(each) for each in other]
    return all(one == pytest.approx(two, rel=2e-4, abs=1e-6) for one, two in zip(mine, other, strict=True))


def test_a_pipeline_has_the_numbers_of_one_process(said: Said, two: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer, expected = alone(tmp_path)
    predicted = trainer.predict(rows(7))
    for ways in said["a_pipeline"]:
        for name, (logged, predictions, loss) in ways.items():
            assert is_close(logged, expected), name
            assert np.allclose(predictions, predicted.predictions, rtol=1e-4, atol=1e-5)
            assert loss == pytest.approx(predicted.metrics["test_loss"], rel=1e-4)
    assert said["a_pipeline"][0] == said["a_pipeline"][1]
    whole = load_file(two / "a_pipeline" / "1f1b" / "model.safetensors")
    torch.testing.assert_close(whole, dict(trainer.model.state_dict()), rtol=1e-4, atol=1e-5)


def test_a_later_stage_gets_the_columns_of_the_batch_that_it_names(said: Said, tmp_path: Path) -> None:
    _, expected = alone(tmp_path, Scaled(), scaled=True)
    for logged in said["a_pipeline_whose_last_stage_looks_at_the_batch"]:
        assert is_close(logged, expected)


def test_a_pipeline_resumes_after_any_step_to_the_bit(said: Said) -> None:
    for (whole, *resumed), names in said["a_pipeline_goes_on"]:
        assert len(resumed) == 4
        assert resumed == [whole] * len(resumed)
        assert names == [
            "callbacks_state.pt", "checkpoint_manifest.json", "dataset_state.pt",
            "model_state_rank_0.pt", "model_state_rank_1.pt", "optimizer_state_rank_0.pt", "optimizer_state_rank_1.pt",
            "rng_state_rank_0.pt", "rng_state_rank_1.pt", "scaler_state.pt", "scheduler_state.pt", "trainer_state.pt",
        ]  # fmt: skip


def test_a_pipeline_has_a_trainers_events_and_stops_as_one(said: Said) -> None:
    for (mine, other), saved in said["events_of_a_pipeline"]:
        assert mine == other
        assert saved == [3]


def test_accelerate_trains_as_data_parallel_ranks_do(said: Said) -> None:
    for ways in said["an_accelerated_run"]:
        for name, ((logged, weights), (expected, others)) in ways.items():
            assert logged == expected, name
            assert weights == others, name


def test_an_accelerated_run_resumes_after_any_step_to_the_bit(said: Said) -> None:
    for (whole, *resumed), parts, same in said["an_accelerated_run_goes_on"]:
        assert len(resumed) == 4
        assert resumed == [whole] * len(resumed)
        assert parts == {
            "model": ("replicated", True),
            "optimizer": ("replicated", False),
            "scheduler": ("replicated", False),
            "scaler": ("replicated", False),
            "dataset": ("per_rank", False),
            "callbacks": ("global", False),
            "trainer": ("global", False),
            "rng": ("per_rank", False),
        }
        assert same


def test_impossible_settings_are_refused_in_one_line(said: Said) -> None:
    first, second = said["what_is_refused"]
    assert first == second
    assert "pass a function (model, num_stages) -> [module, ...]" in first["no splitter"]
    assert "num_stages=3: does not divide the number of ranks, 2" in first["stages"]
    assert "num_microbatches=1: must be >= 2, the number of stages" in first["pieces"]
    assert "schedule='zigzag': must be one of 'gpipe', '1f1b'" in first["schedule"]
    assert "fp16=True: its loss scaler would see only one stage" in first["fp16"]
    assert "dispatch_batches=False: all stages need the same batches" in first["every rank reads"]
    assert "model_splitter: returned 1 stages, but 2 modules are needed" in first["too few"]
    assert "'first.weight' of stage 1 is the same parameter as 'first.weight' of stage 0" in first["tied"]
    assert "gradient_accumulation_steps=2: must be 1" in first["accumulates"]


def test_a_model_whose_ranks_need_the_same_batches_is_refused_and_one_of_fsdp_is_not(said: Said) -> None:
    first, second = said["sharded_models"]
    assert first == second
    for name, where in (
        ("tensor parallel", "DDPTrainer: model=Net: its parameter 'first.weight' is a DTensor with placements (Shard("),
        ("tensor parallel", "on DeviceMesh((tp=2), 'cpu'"),
        ("tensor parallel and FSDP", "on DeviceMesh((dp=1, tp=2), 'cpu'"),
    ):
        assert where in first[name]
        assert "2 ranks hold it together, as in tensor parallelism, and need the same batches" in first[name]
        assert "guides/hybrid_parallelism.md" in first[name]
    assert "only 1 of 2 ranks hold it, so the others would not get its gradients" in first["FSDP over one of two"]
    assert first["FSDP and tensor parallel of one"] == "nothing"
    assert first["hybrid FSDP"] == ["nothing", "nothing"]


def test_a_data_set_of_rank_0_is_evaluated_repeatedly(said: Said) -> None:
    assert [len(losses) for losses in said["data_on_rank_0_only"]] == [4, 4]


@pytest.fixture(scope="module")
def observed_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pipeline_callbacks.observed(Trainer, tmp_path_factory.mktemp("observed"))


def is_near(mine: Any, other: Any) -> bool:
    """Compare numbers in dictionaries and lists, which pytest.approx does not enter."""
    if isinstance(mine, dict):
        return set(mine) == set(other) and all(is_near(each, other[name]) for name, each in mine.items())
    if isinstance(mine, list):
        return len(mine) == len(other) and all(is_near(*pair) for pair in zip(mine, other, strict=True))
    return bool(mine == pytest.approx(other, rel=1e-3, abs=1e-6))


@pytest.mark.parametrize("stages", ["two stages", "two copies of two stages"])
def test_norms_facts_and_texts_of_a_pipeline_are_those_of_the_whole_model(
    request: pytest.FixtureRequest, observed_alone: dict[str, Any], stages: str
) -> None:
    if stages == "two stages":
        told = request.getfixturevalue("said")["what_is_observed_of_a_pipeline"]
    else:
        told = request.getfixturevalue("said_by_four")["what_is_observed_of_two_pipelines"]
    assert len(observed_alone["gradients"]) == len(observed_alone["parameters"]) == 3
    assert "embed.weight" in observed_alone["parameters"][0]["spectral_norms"]
    for each in told:
        for what in ("weight_norms", "gradients", "parameters"):
            assert is_near(each[what], observed_alone[what]), what
    for text in (told[0]["info"], observed_alone["info"]):
        assert ["parameters:", "546"] in [line.split() for line in text.splitlines()]
        assert "Language(\n  (embed): Embedding(28, 6)" in text
    assert told[0]["texts"] == observed_alone["texts"] != []
    assert [each["texts"] for each in told[1:]] == [[]] * (len(told) - 1)


def test_norms_and_texts_of_a_resumed_pipeline_are_those_of_the_whole_run(said: Said) -> None:
    whole, resumed, texts, others = said["what_is_observed_goes_on"][0]
    assert [each["global_step"] for each in whole] == [2, 4, 6]
    assert resumed == whole
    assert texts == others


def test_a_frozen_stage_has_no_gradients_and_the_others_are_written(said: Said) -> None:
    (names, info), _ = said["a_frozen_stage"]
    assert names == [["head.bias", "head.weight", "mix.0.bias", "mix.0.weight"]]
    assert "trained:" in info


def test_a_stage_that_fails_during_text_generation_leaves_no_rank_waiting(said: Said) -> None:
    failed = "RankFailed: rank 1: failed in pipeline_generate (OSError: no space left"
    for step, texts, error, shape, misuse, is_training in said["a_stage_that_fails_while_text_is_made"]:
        assert (step, texts) == (4, [])
        assert failed in error
        assert shape == (1, 3)
        assert "input_ids.shape=(3,): must be (1, T)" in misuse
        assert is_training


def test_a_sequential_that_takes_no_column_is_refused_with_the_columns(said: Said) -> None:
    expected = (
        "columns=['tokens', 'labels']: the first stage (Sequential) takes ['input'], so none of them would reach it"
    )
    for told in said["a_sequential_and_columns"]:
        assert [expected in each for each in told] == [True, True], told


def test_an_evaluation_beside_training_is_refused_for_a_pipeline(said: Said) -> None:
    for error in said["an_evaluation_beside_a_pipeline"]:
        assert "AsyncEvaluation: PipelineTrainer gives each rank one stage of the model" in error


# Four ranks: two pipelines of two stages ------------------------------------------------------------------------------


def two_pipelines(ranks: Any, folder: Path) -> Any:
    torch.manual_seed(ranks.rank)
    args = {"per_device_train_batch_size": 3}
    trainer = made(PipelineTrainer, folder, Net(), rows(20), args, model_splitter=of_first, num_stages=2)
    logged, _ = result(trainer)
    found = trainer.predict(rows(7))
    trainer.save_model()
    return logged, found.predictions.tolist(), found.metrics["test_loss"]


def two_pipelines_go_on(ranks: Any, folder: Path) -> Any:
    def make(where: Path) -> Trainer:
        args = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3, "async_save": True}
        model = Net(dropout=0.3, norm=True)
        return made(PipelineTrainer, where, model, rows(20), args, model_splitter=of_first, num_stages=2)

    said = all_resumes(make, folder)
    names = sorted(each.name for each in (folder / "whole" / "checkpoint-2").iterdir())
    return said, [name for name in names if name.startswith(("model", "optimizer", "dataset"))]


ON_FOUR = [two_pipelines, two_pipelines_go_on, pipeline_callbacks.what_is_observed_of_two_pipelines]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def said_by_four(four: Path) -> Said:
    return run_cases(ON_FOUR, world=4, folder=four, imports=IMPORTS)


def test_two_pipelines_share_the_data_and_have_the_numbers_of_one_process(
    said_by_four: Said, four: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    trainer, expected = alone(tmp_path)
    predicted = trainer.predict(rows(7))
    for logged, predictions, loss in said_by_four["two_pipelines"]:
        assert is_close(logged, expected)
        assert np.allclose(predictions, predicted.predictions, rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(predicted.metrics["test_loss"], rel=1e-4)
    whole = load_file(four / "two_pipelines" / "model.safetensors")
    torch.testing.assert_close(whole, dict(trainer.model.state_dict()), rtol=1e-4, atol=1e-5)


def test_two_pipelines_resume_after_any_step_and_write_each_stage_once(said_by_four: Said) -> None:
    for (whole, *resumed), names in said_by_four["two_pipelines_go_on"]:
        assert len(resumed) == 4
        assert resumed == [whole] * len(resumed)
        assert names == [
            "dataset_state.pt",
            *(f"{key}_state_group_stage_replicas_grank_0_rank_{rank}.pt" for key in ("model", "optimizer")
              for rank in (0, 1)),
        ]  # fmt: skip


# One process ----------------------------------------------------------------------------------------------------------


def test_a_pipeline_of_one_stage_needs_no_other_rank(tmp_path: Path) -> None:
    _, expected = alone(tmp_path)
    trainer = made(PipelineTrainer, tmp_path / "one", Net(), rows(20), {}, model_splitter=of_first, num_microbatches=3)
    assert is_close(result(trainer)[0], expected)


def test_a_trainer_of_one_process_declares_everything_global(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, Net(), rows(20), {})
    trainer.train()
    patterns = {each.key: each.sharing_pattern.value for each in trainer.get_state_components()}
    assert patterns.pop("rng") == "per_rank"
    assert set(patterns) == {"model", "optimizer", "scheduler", "scaler", "dataset", "callbacks", "trainer"}
    assert set(patterns.values()) == {"global"}


def test_a_pipeline_names_its_requirements(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compute_loss_func="):
        PipelineTrainer(Net(), TrainingArguments(tmp_path), model_splitter=split)
