"""The best model's file has the scored weights, complete at every instant, and names their step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyward.errors import UsageError
from skyward.training.evaluation import AsyncEvaluator, BestModel, EvaluationRecord
from skyward.training.evaluation.best import EarlyStopping, is_greater_better
from tests.training.evaluation.parts import ByHand


def record(step: int, **metrics: Any) -> EvaluationRecord:
    return EvaluationRecord(step=step, snapshot_id=f"s-{step}", submitted_at=0.0, status="ok", metrics=metrics)


def test_the_file_has_the_weights_of_the_best_score_and_not_the_current_ones(tmp_path: Path) -> None:
    hand, best, live = ByHand(), BestModel(tmp_path / "best.pt", "loss"), {"w": torch.zeros(3)}
    with AsyncEvaluator(int, int, compute=hand, gate="always", best=best) as evaluator:
        for step in range(1, 5):
            live["w"].fill_(step)
            evaluator.submit(live, step=step)
        live["w"].fill_(99)
        for at, loss in ((1, 0.5), (0, 0.3), (3, 0.4), (2, math.nan)):  # they end in another order
            hand.end(at, {"loss": loss})
        evaluator.drain()
        assert evaluator.best is not None
        assert evaluator.best.step == 1
    assert torch.load(best.path, weights_only=True)["w"].tolist() == [1, 1, 1]
    beside = json.loads((tmp_path / "best.pt.json").read_text())
    assert (beside["step"], beside["metrics"]) == (1, {"loss": 0.3})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best.pt", "best.pt.json"]


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    def half(state: Any, path: Path) -> None:
        path.write_text("half")
        if state == "full disk":
            raise OSError("no space")

    best = BestModel(tmp_path / "deeper" / "best.bin", "accuracy", save=half)
    assert best.offer(record(1, accuracy=0.5), "fine")
    with pytest.raises(OSError, match="no space"):
        best.offer(record(2, accuracy=0.6), "full disk")
    assert best.path.read_text() == "half"
    assert best.record is not None
    assert (best.record.step, best.value) == (1, 0.5)
    assert len(list(best.path.parent.iterdir())) == 2


def test_a_best_model_that_cannot_be_written_is_noted_in_the_record(tmp_path: Path) -> None:
    hand, best = ByHand(), BestModel(tmp_path / "best.pt", "f1")
    with AsyncEvaluator(int, int, compute=hand, gate="always", best=best, on_error="raise") as evaluator:
        evaluator.submit({"w": torch.zeros(1)}, step=1)
        hand.end(0, {"loss": 0.1})
        with pytest.raises(
            UsageError, match=r"metric='f1': eval_fn returned no such metric; use one that it returns \(loss\)"
        ):
            evaluator.drain()
        (only,) = evaluator.drain()
    assert only.status == "ok"
    assert only.error.startswith("the best model was not written: metric='f1': eval_fn returned no such metric")


def test_the_formats_are_read_by_their_own_libraries(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tied = torch.arange(3.0)
    BestModel(tmp_path / "a.safetensors", "loss").offer(record(1, eval_loss=1), {"a": tied, "b": tied})
    assert load_file(tmp_path / "a.safetensors")["b"].tolist() == [0, 1, 2]
    BestModel(tmp_path / "a.npz", "eval_loss").offer(record(1, loss=1), [np.ones(2), np.zeros(1)])
    assert [np.load(tmp_path / "a.npz")[name].tolist() for name in ("0", "1")] == [[1, 1], [0]]


def test_the_better_direction_follows_from_the_name_unless_given() -> None:
    assert [is_greater_better(each) for each in ("eval_loss", "perplexity", "accuracy", "f1")] == [
        False,
        False,
        True,
        True,
    ]
    assert BestModel("x", "accuracy", greater_is_better=False).greater_is_better is False


def test_training_stops_after_enough_evaluations_without_improvement() -> None:
    stopping = EarlyStopping("eval_loss", patience=2, threshold=0.1)
    told = [stopping.observe(record(step, loss=loss)) for step, loss in enumerate([1.0, 0.95, 0.8, math.nan, 0.75])]
    assert told == [False, False, False, False, True]
    late = EvaluationRecord(step=9, snapshot_id="", submitted_at=0, status="late", metrics={"loss": 9})
    assert not EarlyStopping("loss", patience=1).observe(late)
    again = EarlyStopping("eval_loss", patience=2, threshold=0.1)
    again.load_state_dict(stopping.state_dict())
    assert again.observe(record(10, loss=0.79))
