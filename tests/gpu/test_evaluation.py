"""Evaluations of a model on a device beside its training: in threads, in a process, on a node."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyward as sky
from skyward.training import Trainer, TrainingArguments
from skyward.training.evaluation import AsyncEvaluation, AsyncEvaluator, BestModel
from tests.gpu.conftest import Device, Figures
from tests.gpu.models import make_classifier, rows, score, settings

pytestmark = pytest.mark.gpu


def on_device(device: str) -> nn.Module:
    return make_classifier().to(device)


@pytest.mark.parametrize("where", ["threads", "subprocess", "node"])
def test_every_state_is_scored_as_it_was_at_submission(
    pool: sky.ComputePool, tmp_path: Path, device: Device, where: str, figures: Figures
) -> None:
    compute: Any = {"threads": None, "subprocess": "subprocess", "node": pool.node(0)}[where]
    model, held_out, direct = on_device(device), rows(500), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = {name: torch.stack([row[name] for row in rows(400)]).to(device) for name in ("x", "labels")}
    best = BestModel(tmp_path / "best.safetensors", "accuracy")
    options: dict[str, Any] = {"on_backpressure": "block", "gate": "always", "best": best}
    began = time.perf_counter()
    with AsyncEvaluator(partial(on_device, device), score, held_out, compute=compute, **options) as evaluator:
        for step in range(1, 7):
            for _ in range(20):
                optimizer.zero_grad()
                model(**batch)["loss"].backward()
                optimizer.step()
            direct.append(score(model, held_out)["accuracy"])
            evaluator.submit(model.state_dict(), step=step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)  # changes after the copy are in none
        evaluator.drain()
        assert [record.status for record in evaluator.history] == ["ok"] * 6, evaluator.history
        found = [record.metrics["accuracy"] for record in sorted(evaluator.history, key=lambda each: each.step)]
    figures("seconds", round(time.perf_counter() - began, 2))
    assert found == pytest.approx(direct)
    assert best.record is not None
    assert best.record.metrics["accuracy"] == pytest.approx(max(direct))
    assert best.path.stat().st_size > 1000


def test_a_trainer_logs_the_scores_that_come_back(tmp_path: Path, device: Device) -> None:
    evaluation = AsyncEvaluation(
        partial(on_device, device), score, rows(300), eval_strategy="steps", eval_steps=20, compute="subprocess",
        on_backpressure="block", gate="always",
    )  # fmt: skip
    args = TrainingArguments(**settings(str(tmp_path), device))
    trainer = Trainer(make_classifier(), args, train_dataset=rows(640), callbacks=[evaluation])
    trainer.train()
    told = {each["step"]: each["eval_accuracy"] for each in trainer.state.log_history if "eval_accuracy" in each}
    assert sorted(told) == [20, 40, 60]
    assert told[60] == pytest.approx(score(trainer.model.eval(), rows(300))["accuracy"])
