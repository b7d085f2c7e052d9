"""The sent part of a model: under its own names, whole if ranks hold parts, and only trained parts of adapters."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training.evaluation import AsyncEvaluator, load_trainable, model_state, submit_model
from skyward.training.evaluation.weights import FROZEN_SAMPLE, halved
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.evaluation.parts import ByHand, make_model, norm_of, scored


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    cases = [
        of_ddp,
        of_sharded_parameters,
        of_flat_parameters,
        skipped_ones_gather_nothing,
        one_that_fails,
        in_the_trainer,
    ]
    return run_cases(cases, world=2, folder=tmp_path_factory.mktemp("states"))


# One process ---------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_model_without_its_wrappers() -> None:
    model = make_model()
    inner: nn.Module = nn.Sequential(cast("nn.Module", torch.compile(nn.Linear(2, 2), backend="eager")), nn.ReLU())
    assert set(model_state(torch.compile(model, backend="eager"))) == set(model.state_dict())
    assert set(model_state(inner)) == {"0.weight", "0.bias"}
    assert model_state(model)["0.weight"].data_ptr() == model.state_dict()["0.weight"].data_ptr(), "no copy yet"


def test_only_trained_parts_and_buffers_of_an_adapter_travel() -> None:
    from peft import LoraConfig, get_peft_model

    def base() -> nn.Module:
        torch.manual_seed(0)
        return make_model()

    def adapted() -> nn.Module:
        model: nn.Module = get_peft_model(base(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["3"]))
        return model

    model = adapted()
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.add_(0.5)
    state = model_state(model)
    names = set(state) - {FROZEN_SAMPLE}
    assert names == {
        name
        for name in model.state_dict()
        if "lora" in name or "running" in name or "num_batches" in name or "modules_to_save" in name
    }
    worker = adapted()
    load_trainable(worker, state)
    for name, each in worker.state_dict().items():
        assert torch.equal(each, model.state_dict()[name]), name
    x = torch.ones(3, 4)
    assert torch.equal(worker(x), model.eval()(x))
    # A factory that does not load the base's weights would score another model.
    with torch.no_grad():
        worker.get_parameter("base_model.model.0.base_layer.weight").add_(0.1)
    with pytest.raises(UsageError, match="the frozen parameters differ from those in training"):
        load_trainable(worker, halved(state))
    with AsyncEvaluator(adapted, norm_of, gate="sync", fp16_state_dict=True) as evaluator:
        record = evaluator.submit(model_state(model), step=1)
        assert record is not None
        assert record.status == "ok", record.error


# Two ranks -----------------------------------------------------------------------------------------------------------


def whole_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def _evaluated(ranks: Any, model: Any, trains: Any) -> Any:
    """Return the scores of rank 0's evaluation, with and without the wrapper, after a step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        trains(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluator = AsyncEvaluator(whole_model, norm_of, gate="always") if ranks.rank == 0 else None
    submit_model(evaluator, model, ranks=ranks, step=2)
    for _ in range(2):  # training goes on
        trains(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if evaluator is None:
        return "nothing here"
    with evaluator:
        (record,) = evaluator.drain(60)
    return record.status, record.error, record.metrics


def _expected() -> float:
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return norm_of(model, None)["norm"]


def of_ddp(ranks: Any, place: Path) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(whole_model())
    return _evaluated(ranks, model, model)


def of_sharded_parameters(ranks: Any, place: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = whole_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return _evaluated(ranks, model, model)


def of_flat_parameters(ranks: Any, place: Path) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have FSDP2, and an accelerator
        model = FullyShardedDataParallel(whole_model(), device_id=torch.device("cpu"), use_orig_params=True)
        return _evaluated(ranks, model, model)


@pytest.mark.parametrize("case", ["of_ddp", "of_sharded_parameters", "of_flat_parameters"])
def test_ranks_evaluate_the_whole_model_on_rank_0(said: Said, case: str) -> None:
    first, second = said[case]
    assert first[:2] == ("ok", ""), first
    assert first[2]["norm"] == pytest.approx(_expected(), rel=1e-6)
    assert second == "nothing here"


def skipped_ones_gather_nothing(ranks: Any, place: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = whole_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    gathered = 0
    full = model.state_dict

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += 1
        return full(*args, **kwargs)

    model.state_dict = counted  # type: ignore[method-assign]
    evaluator = AsyncEvaluator(int, int, compute=ByHand(), gate="always", max_pending=1) if ranks.rank == 0 else None
    for step in range(1, 4):
        submit_model(evaluator, model, ranks=ranks, step=step)
    if evaluator is not None:
        evaluator.close()
    return gathered


def test_a_skipped_evaluation_is_gathered_by_no_rank(said: Said) -> None:
    assert said["skipped_ones_gather_nothing"] == [1, 1]


def one_that_fails(ranks: Any, place: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = whole_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    evaluator = AsyncEvaluator(int, int, compute=ByHand()) if ranks.rank == 0 else None
    if evaluator is not None:
        evaluator.close()
    return error_of(functools.partial(submit_model, evaluator, model, ranks=ranks, step=1)).partition(":")[0]


def test_a_failing_rank_0_leaves_nobody_waiting(said: Said) -> None:
    assert said["one_that_fails"] == ["UsageError", "nothing"]


def in_the_trainer(ranks: Any, place: Path) -> Any:
    from skyward.training import Trainer, TrainerCallback, TrainingArguments
    from skyward.training.evaluation import AsyncEvaluation

    seen: list[tuple[int, bool]] = []

    class Seen(TrainerCallback):
        def on_log(self, state: Any, logs: Any, **kwargs: Any) -> None:
            if "eval_loss" in logs:
                seen.append((state.global_step, state.is_world_process_zero))

    x = torch.linspace(-1, 1, 32)[:, None].repeat(1, 4)
    evaluation = AsyncEvaluation(
        make_model, scored, x, eval_strategy="steps", eval_steps=2, gate="sync", stop_on="eval_count", patience=2
    )
    trainer = Trainer(
        make_model(),
        TrainingArguments(
            output_dir=str(place),
            per_device_train_batch_size=4,
            max_steps=12,
            logging_steps=2,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=torch.utils.data.TensorDataset(x, x[:, :1]),
        compute_loss_func=nn.functional.mse_loss,
        callbacks=[Seen(), evaluation],
    )
    trainer.train()
    return seen, [each.step for each in evaluation.history], trainer.state.global_step


def test_all_ranks_hear_the_result_and_stop_at_the_same_step(said: Said) -> None:
    first, second = said["in_the_trainer"]
    assert first[1:] == second[1:], (first, second)
    assert [step for step, _ in first[0]] == [step for step, _ in second[0]] == first[1]
    # The first is better than none, and two are no better. This is known when the third's step is logged, or one log
    # later.
    assert first[2] in (6, 8)
