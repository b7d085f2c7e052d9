"""Probes of parameters that are sharded over ranks: real gloo, fully_shard and other DTensors.

Every case runs in the same two processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpoint.crew import WARM, warm_process
from tests.training.probes.tiny_lm import Characters

# Limit for two processes that import torch, on a machine with other load.
pytestmark = pytest.mark.timeout(300)

WORLD = 2
MODEL_SEED = 7


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(MODEL_SEED)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))


def sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def norms_of_every_placement_are_those_of_the_whole_tensor(ranks: Any, folder: Path) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from skyward.training.callbacks.norms import measure

    torch.manual_seed(1)
    whole = {name: torch.randn(shape) for name, shape in {"a": (7, 3), "b": (1, 4), "c": (6, 6), "d": (5,)}.items()}
    line = init_device_mesh("cpu", (WORLD,))
    hybrid = init_device_mesh("cpu", (1, WORLD))
    found = {
        **{f"rows {name}": distribute_tensor(each, line, [Shard(0)]) for name, each in whole.items()},
        "columns c": distribute_tensor(whole["c"], line, [Shard(1)]),
        "replicated c": distribute_tensor(whole["c"], line, [Replicate()]),
        "hybrid c": distribute_tensor(whole["c"], hybrid, [Replicate(), Shard(0)]),
        "two ways c": distribute_tensor(whole["c"], hybrid, [Shard(1), Shard(0)]),
        "plain c": whole["c"],
        "sum c": DTensor.from_local(whole["c"] / WORLD, line, [Partial()]),
    }
    expected = {name: float(whole[name.split()[-1]].norm()) for name in found}
    values = measure(found).values()
    total = sum(each**2 for each in expected.values()) ** 0.5
    return {
        "norms": all(abs(values[name] - expected[name]) < 1e-5 for name in expected),
        "total": abs(measure(found).total() - total) < 1e-4,
    }


def loggers_write_what_one_process_writes(ranks: Any, folder: Path) -> Any:
    import torch

    from skyward.training.callbacks.grad_norm import GradNormLogger
    from skyward.training.callbacks.parameter_norm import ParameterNormLogger
    from skyward.training.callbacks.peak_memory import PeakMemory
    from skyward.training.callbacks.weight_norm import WeightNormLogger
    from tests.training.probes.small_run import SmallRun

    def run(where: Path, model: Any, ranks: Any = None) -> tuple[Any, Any]:
        callbacks = [GradNormLogger(), ParameterNormLogger(), WeightNormLogger(), PeakMemory()]
        done = SmallRun(where, callbacks, model=model, ranks=ranks, max_steps=4).train()
        return done.state.log_history, where

    both, _ = run(folder / "both", sharded(build()), ranks)
    torch.distributed.barrier()
    answer: dict[str, Any] = {
        "weight_norms": [round(each["weight_norm"], 4) for each in both],
        "peaks": all(len(each["peak_rss"]) == WORLD for each in both),
    }
    if ranks.rank == 0:
        alone, _ = run(folder / "alone", build())
        answer["alone"] = [round(each["weight_norm"], 4) for each in alone]
        for name in ("gradient_norms.json", "parameter_norms.json"):
            answer[name] = [
                _rounded(json.loads((folder / kind / "logs" / name).read_text())) for kind in ("both", "alone")
            ]
    return answer


def replicated_parameters_are_measured_by_rank_zero_only(ranks: Any, folder: Path) -> Any:
    from skyward.training.callbacks.grad_norm import GradNormLogger
    from skyward.training.callbacks.weight_norm import WeightNormLogger
    from tests.training.probes.small_run import SmallRun

    run = SmallRun(folder, [GradNormLogger(), WeightNormLogger()], model=build(), ranks=ranks, max_steps=2).train()
    return ["weight_norm" in each for each in run.state.log_history]


def one_rank_that_fails_leaves_no_other_waiting(ranks: Any, folder: Path) -> Any:
    from skyward.training.callbacks.grad_norm import GradNormLogger
    from tests.training.probes.small_run import SmallRun

    class Failing(GradNormLogger):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if ranks.rank == 1 and kwargs["state"].global_step == 2:
                raise OSError("no space left")
            super().on_pre_optimizer_step(**kwargs)

    run = SmallRun(folder, [Failing()], model=sharded(build()), ranks=ranks, max_steps=6).train()
    steps = json.loads((folder / "logs" / "gradient_norms.json").read_text()) if ranks.rank == 0 else []
    return [run.state.global_step, [each["global_step"] for each in steps]]


def text_of_a_sharded_model_is_that_of_the_whole_one(ranks: Any, folder: Path) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from skyward.training.callbacks.textgen import TextgenCallback
    from tests.training.probes.small_run import SmallRun
    from tests.training.probes.tiny_lm import TinyLM

    def texts(model: Any, counter: int, ranks: Any = None) -> tuple[list[str], int]:
        callback = TextgenCallback(prompts=["to be", "ab"], max_new_tokens=12)
        callback.load_state_dict({"next_step": counter})
        run = SmallRun(folder, [callback], model=model, ranks=ranks, processing_class=Characters())
        run.state.global_step = 40
        # Each rank draws its own numbers. Generated text must not depend on them.
        torch.manual_seed(0 if ranks is None else ranks.rank)
        before = torch.get_rng_state()
        run.fire("on_evaluate", metrics={})
        assert torch.equal(torch.get_rng_state(), before)
        return callback.texts, callback.state_dict()["next_step"]

    model = TinyLM()
    alone, _ = texts(model, 0)
    whole = fully_shard(TinyLM(), mesh=init_device_mesh("cpu", (WORLD,)))
    # Rank 1 does not know the counter, as after a resume in which only rank 0 got it: rank 0's decides.
    due, next_step = texts(whole, 40 if ranks.rank == 0 else 99, ranks)
    not_due, _ = texts(whole, 41 if ranks.rank == 0 else 0, ranks)
    return {"same": due == alone if ranks.rank == 0 else due == [], "next": next_step, "not due": not_due}


def a_pipeline_generates_on_all_ranks_in_one_order(ranks: Any, folder: Path) -> Any:
    import torch

    from skyward.training.callbacks.textgen import TextgenCallback
    from tests.training.probes.small_run import SmallRun
    from tests.training.probes.tiny_lm import TinyLM

    asked: list[Any] = []

    class PipelineRun(SmallRun):
        def pipeline_generate(self, *, input_ids: Any, max_new_tokens: int, **options: Any) -> Any:
            total = input_ids.clone()
            torch.distributed.all_reduce(total)
            asked.append([(total == input_ids * WORLD).all().item(), max_new_tokens, sorted(options)])
            return torch.cat([input_ids, input_ids[:, :2]], dim=1) if ranks.rank == 0 else None

    callback = TextgenCallback(prompts=["hello", "abc"], max_new_tokens=2)
    PipelineRun(folder, [callback], model=TinyLM(), ranks=ranks, processing_class=Characters()).fire("on_evaluate")
    return [asked, callback.texts]


def a_prompt_that_cannot_be_encoded_on_rank_zero_fails_on_all(ranks: Any, folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from skyward.training.callbacks.textgen import TextgenCallback
    from tests.training.probes.small_run import SmallRun
    from tests.training.probes.tiny_lm import TinyLM

    model: Any = fully_shard(TinyLM(), mesh=init_device_mesh("cpu", (WORLD,)))
    callback = TextgenCallback(prompts=["ä"], max_new_tokens=2)
    run = SmallRun(folder, [callback], model=model, ranks=ranks, processing_class=Characters())
    model.train()
    run.fire("on_evaluate")
    return [callback.texts, model.training]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items() if key != "timestamp"}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


CASES: list[Callable[[Any, Path], Any]] = [
    norms_of_every_placement_are_those_of_the_whole_tensor,
    loggers_write_what_one_process_writes,
    replicated_parameters_are_measured_by_rank_zero_only,
    one_rank_that_fails_leaves_no_other_waiting,
    text_of_a_sharded_model_is_that_of_the_whole_one,
    a_pipeline_generates_on_all_ranks_in_one_order,
    a_prompt_that_cannot_be_encoded_on_rank_zero_fails_on_all,
]


def _rank(rank: int, folder: Path, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from skyward.training import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    ranks = TorchRanks(timeout_s=120.0)
    for case in CASES:
        try:
            answer = case(ranks, folder / case.__name__)
        except Exception as error:
            answer = repr(error)
        answers.put((case.__name__, rank, answer))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    answers = WARM.Queue()
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [warm_process(_rank, rank, folder, answers) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=240) for _ in range(len(CASES) * WORLD)]
    for process in ranks:
        process.join(60)
    return {(case, rank): answer for case, rank, answer in found}


def of(said: dict[tuple[str, int], Any], case: Callable[[Any, Path], Any]) -> list[Any]:
    return [said[case.__name__, rank] for rank in range(WORLD)]


def test_norms_of_every_placement_are_those_of_the_whole_tensor(said: dict[tuple[str, int], Any]) -> None:
    assert of(said, norms_of_every_placement_are_those_of_the_whole_tensor) == [{"norms": True, "total": True}] * 2


def test_a_run_under_fully_shard_writes_the_norms_of_one_process(said: dict[tuple[str, int], Any]) -> None:
    zero, one = of(said, loggers_write_what_one_process_writes)
    assert zero["weight_norms"] == zero["alone"] == one["weight_norms"]
    assert zero["peaks"]
    assert one["peaks"]
    for name in ("gradient_norms.json", "parameter_norms.json"):
        sharded_records, alone = zero[name]
        assert sharded_records == alone
        assert len(alone) == 2


def test_replicated_parameters_cost_other_ranks_nothing(said: dict[tuple[str, int], Any]) -> None:
    assert of(said, replicated_parameters_are_measured_by_rank_zero_only) == [[True, True], [False, False]]


def test_one_failing_rank_leaves_no_other_waiting(said: dict[tuple[str, int], Any]) -> None:
    assert of(said, one_rank_that_fails_leaves_no_other_waiting) == [[6, [2]], [6, []]]


def test_text_of_a_sharded_model_equals_that_of_the_whole_one(said: dict[tuple[str, int], Any]) -> None:
    expected = {"same": True, "next": 42, "not due": []}
    assert of(said, text_of_a_sharded_model_is_that_of_the_whole_one) == [expected] * 2


def test_a_pipeline_generates_on_all_ranks_in_one_order(said: dict[tuple[str, int], Any]) -> None:
    options = ["do_sample", "eos_token_id", "pad_token_id", "repetition_penalty", "temperature", "top_k"]
    asked = [[True, 2, options]] * 2
    assert of(said, a_pipeline_generates_on_all_ranks_in_one_order) == [
        [asked, ["hello [START] he", "abc [START] ab"]],
        [asked, []],
    ]


def test_a_prompt_that_rank_zero_cannot_encode_fails_on_all(said: dict[tuple[str, int], Any]) -> None:
    assert of(said, a_prompt_that_cannot_be_encoded_on_rank_zero_fails_on_all) == [[[], True]] * 2
