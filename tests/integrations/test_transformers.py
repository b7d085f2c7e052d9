"""Transformers' integration: `Trainer` as one world of real ranks, on a tiny model made from a config.

Only the ranks import it. Nothing is downloaded.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.integrations.base import integrations_of
from skyward.integrations.transformers import TransformersIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.topology import Rank
from tests.few_modules import lean_frameworks


@pytest.fixture(scope="module")
def transformers_pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import the framework once."""
    image = sky.Image(env={"HF_HUB_OFFLINE": "1"})
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, image=image) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(transformers_pool: ComputePool) -> ComputePool:
    return transformers_pool


class TestTransformersConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.transformers)
    framework = "transformers"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, transformers_pool: ComputePool) -> ComputePool:
        return transformers_pool

    @staticmethod
    def is_initialized() -> bool:
        from torch.distributed import is_initialized

        return is_initialized()

    @staticmethod
    def place() -> tuple[int, int]:
        from transformers import TrainingArguments

        arguments = TrainingArguments(output_dir="never-made", report_to="none")
        return arguments.process_index, arguments.world_size

    @staticmethod
    def total(value: float) -> float:
        import torch
        from transformers.trainer_pt_utils import distributed_concat

        return float(distributed_concat(torch.tensor([value], dtype=torch.float64)).sum())


# Options and environment ------------------------------------------------------------------------------------------


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.transformers(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == TransformersIntegration(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)


def test_tokenizers_have_the_threads_of_torch_unless_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node=0,
        node_rank=0,
        nodes=1,
        head_addr="127.0.0.1",
        head_port=21_000,
        local_addr="127.0.0.1",
    )
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert TransformersIntegration().environment(rank)["RAYON_NUM_THREADS"] == "12"
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert TransformersIntegration().environment(rank)["RAYON_NUM_THREADS"] == "3"
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    assert "RAYON_NUM_THREADS" not in TransformersIntegration().environment(rank)


# The trainer ------------------------------------------------------------------------------------------------------


def make_trainer(folder: Path, callbacks: tuple[Any, ...] = (), **options: Any) -> Any:
    """Make a Trainer of a language model of two thousand parameters.

    It has no dropout, so that a step depends only on its rows.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(
        vocab_size=24,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).double()
    tokens = torch.randint(24, (32, 8), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 4,
            "learning_rate": 0.1,
            "optim": "sgd",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **options,
        },
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:13],
        compute_metrics=count_hits,
        callbacks=list(callbacks),
    )


def count_hits(predicted: Any) -> dict[str, float]:
    labels, guesses = predicted.label_ids[:, 1:], predicted.predictions[:, :-1].argmax(-1)
    return {"rows": len(labels), "hits": int((guesses == labels).sum()), "sum": float(predicted.predictions.sum())}


def weights_of(trainer: Any) -> list[float]:
    import torch

    return torch.cat([w.detach().flatten() for w in trainer.model.parameters()]).tolist()


def train(folder: Path, batch_size: int) -> tuple[list[float], int]:
    trainer = make_trainer(folder, per_device_train_batch_size=batch_size)
    before = weights_of(trainer)
    trainer.train()
    assert weights_of(trainer) != before
    return weights_of(trainer), trainer.state.global_step


def test_the_trainer_averages_gradients(pool: ComputePool, tmp_path: Path) -> None:
    function = sky.compute(sky.integrations.transformers(seed=3)(train))
    first, second = function(tmp_path, 4) @ pool
    assert first == second
    # One process with the doubled batch makes the same steps.
    alone, steps = function(tmp_path, 8) >> pool
    assert steps == 4
    # The model's loss is in float32, whatever the type of its weights.
    np.testing.assert_allclose(first[0], alone, rtol=1e-6, atol=1e-8)


def test_every_rank_has_the_metrics_of_the_whole_evaluation_set(pool: ComputePool, tmp_path: Path) -> None:
    @sky.compute
    @sky.integrations.transformers(seed=3)
    def evaluate() -> dict[str, float]:
        measured = make_trainer(tmp_path, per_device_eval_batch_size=2).evaluate()
        return {name: measured[f"eval_{name}"] for name in ("rows", "hits", "sum")}

    first, second = evaluate() @ pool
    alone = evaluate() >> pool
    assert first == second
    assert (first["rows"], first["hits"]) == (13, alone["hits"])
    assert first["sum"] == pytest.approx(alone["sum"], rel=1e-9)


def test_only_rank_0_saves_and_all_resume(pool: ComputePool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}

    @sky.compute
    @sky.integrations.transformers(seed=3)
    def straight() -> list[float]:
        # Each rank has its own folder, so that the rank itself wrote all files in it.
        trainer = make_trainer(tmp_path / os.environ["RANK"], **options)
        trainer.train()
        trainer.save_model(str(tmp_path / os.environ["RANK"] / "model"))
        return weights_of(trainer)

    @sky.compute
    @sky.integrations.transformers(seed=4)  # other first weights: the checkpoint decides
    def resumed() -> list[float]:
        trainer = make_trainer(tmp_path / "0", **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "0" / "checkpoint-2"))
        return weights_of(trainer)

    weights, _ = straight() @ pool
    assert {path.parent.name for path in tmp_path.glob("0/**/*.safetensors")} == {
        "checkpoint-2",
        "checkpoint-4",
        "model",
    }
    assert not [*tmp_path.glob("1/**/*.safetensors"), *tmp_path.glob("1/**/optimizer*")]
    assert resumed() @ pool == [weights, weights]


def test_on_the_cpu_the_arguments_may_choose_the_cpu(pool: ComputePool, tmp_path: Path) -> None:
    @sky.compute
    @sky.integrations.transformers(processes_per_node=2)
    def places() -> list[Any]:
        arguments = make_trainer(tmp_path, use_cpu=True, ddp_backend="gloo").args
        mine = [arguments.process_index, arguments.local_process_index, arguments.world_size]
        return [*mine, arguments.device.type, arguments.should_save, arguments.should_log]

    assert places() @ pool == [[0, 0, 4, "cpu", True, True], [2, 0, 4, "cpu", False, True]]


def test_ranks_are_forked_from_a_process_that_has_imported_the_trainer(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.transformers
    def parents_command() -> tuple[bool, bool]:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        return b"skyward.node.slot.zygote import main" in command, "transformers.trainer" in sys.modules

    assert parents_command() @ pool == [(True, True)] * 2


def test_tokenizers_work_in_the_rank_and_in_the_workers_of_its_data_loader(
    pool: ComputePool, capfd: pytest.CaptureFixture[str]
) -> None:
    @sky.compute
    @sky.integrations.transformers
    def count() -> int:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from torch.utils.data import DataLoader

        tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        lines: Any = ["a b a"] * 64
        tokenizer.encode_batch(lines)  # with threads, which the workers forked below do not have
        loader = DataLoader(lines, batch_size=16, num_workers=1, collate_fn=tokenizer.encode_batch)
        return sum(len(batch) for batch in loader)

    assert count() @ pool == [64, 64]
    assert "forked" not in capfd.readouterr().err


# Stacks and failures ----------------------------------------------------------------------------------------------


def test_integrations_stack_in_any_order(pool: ComputePool, tmp_path: Path) -> None:
    def place() -> tuple[int, int, int]:
        import torch.distributed as dist

        arguments = make_trainer(tmp_path).args
        return arguments.process_index, arguments.world_size, dist.get_world_size()

    decorators = [sky.integrations.transformers(seed=1), sky.integrations.accelerate, sky.integrations.torch]
    for order in (decorators, decorators[::-1]):
        stacked: Any = sky.stdout(only="head")(place)
        for decorator in order:
            stacked = decorator(stacked)
        assert sky.compute(stacked)() @ pool == [(0, 2, 2), (1, 2, 2)]


def test_a_gang_that_is_started_again_resumes_from_the_checkpoint(pool: ComputePool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}

    @sky.compute(max_restarts=1)
    @sky.integrations.transformers(seed=3)
    def train_through(folder: Path, dies_at: int) -> tuple[list[float], int]:
        from transformers import TrainerCallback
        from transformers.trainer_utils import get_last_checkpoint

        class Dies(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
            def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
                steps.append(state.global_step)
                if checkpoint is None and state.global_step == dies_at and arguments.process_index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        steps: list[int] = []
        folder.mkdir(exist_ok=True)
        checkpoint = get_last_checkpoint(str(folder))
        trainer = make_trainer(folder, callbacks=(Dies(),), **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights_of(trainer), len(steps)

    straight, through = (train_through(tmp_path / str(step), step) @ pool for step in (9, 3))
    assert {steps for _, steps in straight} == {4}
    assert {steps for _, steps in through} == {2}
    assert [weights for weights, _ in straight] == [weights for weights, _ in through]


def test_a_rank_that_raises_in_a_step_is_the_error_though_the_others_wait_for_it(
    pool: ComputePool, tmp_path: Path
) -> None:
    @sky.compute
    @sky.integrations.transformers
    def fail() -> None:
        from transformers import TrainerCallback

        class Fails(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
            def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2 and arguments.process_index == 1:
                    raise ValueError("bad batch")

        make_trainer(tmp_path, callbacks=(Fails(),)).train()

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        fail() @ pool
    assert time.monotonic() - begin < 60
    assert "Rank 1 of 2 failed first" in "\n".join(raised.value.__notes__)
