"""TBLogger and ResumableSummaryWriter, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import MissingDependency, UsageError
from skyward.training.callbacks import ResumableSummaryWriter, TBLogger
from tests.training.events import scalars_in, texts_in, without_tensorflow
from tests.training.producer import Producer

without_tensorflow()


def started(folder: Path, **options: Any) -> Producer:
    run = Producer([TBLogger(ResumableSummaryWriter(folder), **options)])
    run.begin()
    return run


# TBLogger -------------------------------------------------------------------------------------------------------------


def test_logs_and_evaluations_become_scalars(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.step(loss=2.0, learning_rate=0.5, grad_norm=3.0, mfu=0.25, peak_mem_allocated=[7, 8], note="text", other=1.0)
    run.evaluate(eval_loss=0.0, as_hugging_face_does=True)
    run.step(loss=1.0)
    run.evaluate(eval_loss=1e6)
    run.end()
    assert scalars_in(tmp_path) == {
        "eval-loss": [(1, 0.0), (2, 1e6)],
        "eval-perplexity": [(1, 1.0)],  # infinite then: nothing to draw
        "grad-norm": [(1, 3.0)],
        "learning-rate": [(1, 0.5)],
        "mfu": [(1, 0.25)],
        "peak_memory_rank0": [(1, 7.0)],
        "peak_memory_rank1": [(1, 8.0)],
        "train-loss": [(1, 2.0), (2, 1.0)],
    }


def test_scalars_are_changed_added_erased_and_skipped(tmp_path: Path) -> None:
    def positive(value: float, metrics: Mapping[str, float]) -> float | None:
        return value * metrics["scale"] if value > 0 else None

    run = started(
        tmp_path,
        scalars={
            "train-loss": {"transform": positive},
            "learning-rate": None,
            "never": None,
            "my-metric": {},
            "renamed": {"source": "scale"},
        },
    )
    run.step(loss=2.0, scale=3.0, learning_rate=1.0, my_metric=5.0)
    run.step(loss=-2.0, scale=4.0)
    run.end()
    assert scalars_in(tmp_path) == {
        "my-metric": [(1, 5.0)],
        "renamed": [(1, 3.0), (2, 4.0)],
        "train-loss": [(1, 6.0)],
    }
    with pytest.raises(UsageError, match=r"scalars\['a'\]"):
        TBLogger(None, scalars={"a": {"sauce": "b"}})


def test_texts_describe_the_run_and_its_results(tmp_path: Path) -> None:
    import torch

    run = Producer(
        [TBLogger(ResumableSummaryWriter(tmp_path), experiment_info={"name": "first", "width": 8})],
        context={"model": torch.nn.Linear(2, 1)},
    )
    run.begin()
    run.step(loss=1.0)
    run.end()
    texts = texts_in(tmp_path)
    assert {tag: [step for step, _ in each] for tag, each in texts.items()} == {
        "experiment": [0],
        "train_results": [1],
        "training_info": [0],
    }
    assert "width: 8" in texts["experiment"][0][1]
    assert "parameters:" in texts["training_info"][0][1]
    assert "train_runtime: 1.5" in texts["train_results"][0][1]


def test_a_run_that_ends_without_a_log_has_no_results(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.fire("on_train_end")
    run.handler.close()
    assert list(texts_in(tmp_path)) == ["training_info"]
    run = started(tmp_path / "b")
    run.state.log_history.append({"loss": 1.0})
    run.fire("on_train_end")  # a framework without a summary: its last record
    assert "loss:" in texts_in(tmp_path / "b")["train_results"][0][1]


def test_a_log_is_in_the_file_at_once(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.step(loss=2.0)
    assert scalars_in(tmp_path)["train-loss"] == [(1, 2.0)]
    run.evaluate(eval_loss=0.0)
    assert scalars_in(tmp_path)["eval-loss"] == [(1, 0.0)]
    run.handler.close()


def test_torchs_own_writer_works_too(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    make: Any = SummaryWriter
    writer = make(str(tmp_path))
    run = Producer([TBLogger(writer)])
    run.begin()
    run.step(loss=math.nan)
    checkpoint = run.save()
    run.end()
    again = Producer([TBLogger(writer)])
    again.resume(checkpoint)
    again.begin()
    writer.close()
    assert math.isnan(scalars_in(tmp_path)["train-loss"][0][1])


def test_other_ranks_make_no_file(tmp_path: Path) -> None:
    class Second:
        rank, world_size, local_rank = 1, 2, 1

    writer = ResumableSummaryWriter(tmp_path / "a")
    run = Producer([writer, TBLogger(writer, experiment_info={"a": 1})], ranks=Second())  # type: ignore[arg-type]
    run.begin()
    run.step(loss=1.0)
    run.save()
    run.end()
    alone = Producer([TBLogger(writer, experiment_info={"a": 1})])
    alone.state.is_world_process_zero = False
    alone.begin()
    alone.step(loss=1.0)
    alone.end()
    assert list(tmp_path.iterdir()) == []


# ResumableSummaryWriter -----------------------------------------------------------------------------------------------


def test_nothing_is_made_before_something_is_added(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter(tmp_path / "a")
    run = Producer([writer])
    run.begin()
    run.step()
    run.save()
    assert list(tmp_path.iterdir()) == []
    writer.add_scalar("x", 1.0, 1)
    assert writer.get_logdir() == str(tmp_path / "a")
    writer.close()
    assert scalars_in(tmp_path / "a") == {"x": [(1, 1.0)]}
    with pytest.raises(AttributeError, match="on_log"):
        writer.on_log  # noqa: B018  # the bus asks which handlers it has


def test_values_up_to_the_checkpoints_step_stay_once_and_later_ones_go(tmp_path: Path) -> None:
    """There is no pause: the second file is made in the same second as the first."""
    writer = ResumableSummaryWriter(tmp_path)
    state: dict[str, Any] = {}
    for step in range(1, 8):
        writer.add_scalar("x", float(step), step)
        writer.add_text("said", f"{step}", step)
        writer.add_text("said", f"{step} again", global_step=step)
        if step == 5:
            state = writer.state_dict()
    writer.close()
    (tmp_path / ".cut.0a1b").write_bytes(b"left by a kill")
    for resumed_at, until in ((5, 9), (6, 8)):  # and once more, after the first resume's checkpoint
        again = ResumableSummaryWriter(tmp_path / "other")
        run = Producer([again])
        run.resume({"global_step": resumed_at, "epoch": 0.5, "callbacks": {"ResumableSummaryWriter": state}})
        run.begin()
        for step in range(resumed_at, until):  # the checkpoint's own step too: a producer that makes up for it
            again.add_scalar("x", 10.0 * step, step)
            again.add_text("said", f"{step}", step)
            again.add_text("said", f"{step} again", step)
        assert not list(tmp_path.glob(".cut*"))
        again.add_scalar("x", -1.0, until - 1)  # two scalars of one tag and step: the first
        run.handler.close()
    assert scalars_in(tmp_path)["x"] == [*((step, float(step)) for step in range(1, 6)), (6, 60.0), (7, 70.0)]
    assert texts_in(tmp_path)["said"] == [(step, text) for step in range(1, 8) for text in (f"{step}", f"{step} again")]
    assert not (tmp_path / "other").exists()


def test_a_new_step_zero_run_hides_nothing(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        run = started(tmp_path)
        run.step(loss=value)
        run.end()
    assert sorted(scalars_in(tmp_path)["train-loss"]) == [(1, 1.0), (1, 2.0)]


def test_a_missing_folder_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = ResumableSummaryWriter(tmp_path / "new")
    writer.load_state_dict({"log_dir": str(tmp_path / "old")})
    writer.add_scalar("x", 1.0, 1)
    writer.close()
    assert scalars_in(tmp_path / "new") == {"x": [(1, 1.0)]}
    assert "is missing; using" in caplog.text


def test_a_missing_tensorboard_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingDependency, match=r"skyward\[training\]"):
        Producer([ResumableSummaryWriter(tmp_path)]).begin()
