"""Our Trainer on a device: mixed precision, peak memory, the profiler, sharded models, checkpoints beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from skyward.training import PeakMemory, ProfilerCallback, Trainer, TrainingArguments
from tests.gpu.conftest import Device, Figures
from tests.gpu.models import Classifier, make_classifier, rows, score, settings

pytestmark = pytest.mark.gpu


def trained(folder: Path | str, device: str, *, model: Any = None, callbacks: Any = (), **changes: Any) -> Any:
    args = TrainingArguments(**settings(str(folder), device, **changes))
    resume = changes.get("resume_from_checkpoint")
    trainer = Trainer(model or make_classifier(), args, train_dataset=rows(640), callbacks=list(callbacks))
    trainer.train(resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision(tmp_path: Path, device: Device, precision: str, figures: Figures) -> None:
    options = {} if precision == "fp32" else {precision: True}
    trainer = trained(tmp_path, device, **options)
    told = losses(trainer)
    assert told[-1] < told[0] / 2
    accuracy = score(trainer.model, rows(200))["accuracy"]
    figures("accuracy", accuracy)
    assert accuracy > 0.8
    assert next(trainer.model.parameters()).device.type == device


class Overflowing(Classifier):
    """Model whose loss is too large for the scaled gradients of fp16, once."""

    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        if self.training:
            self.calls += 1
            if self.calls == 15:
                out["loss"] = out["loss"] * 1e38
        return out


def test_fp16_skips_the_step_whose_gradients_overflow(tmp_path: Path, device: Device) -> None:
    torch.manual_seed(0)
    trainer = trained(tmp_path, device, model=Overflowing(), fp16=True)
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_peak_memory_is_that_of_the_device(tmp_path: Path, device: Device, figures: Figures) -> None:
    wide = Classifier(width=2048 if device == "cuda" else 64, depth=4)
    weights = sum(parameter.numel() * 4 for parameter in wide.parameters())
    callback = PeakMemory()
    trainer = trained(tmp_path, device, model=wide, callbacks=[callback], num_train_epochs=1)
    key = "peak_mem_allocated" if device == "cuda" else "peak_rss"
    (peak,) = callback.peaks
    assert [each[key] for each in trainer.state.log_history if "loss" in each][-1] == [peak]
    assert peak >= 3 * weights, "weights, gradients and at least one more copy for the optimizer"
    if device == "cuda":
        assert peak <= torch.cuda.max_memory_allocated()
    figures("weights MiB", round(weights / 2**20, 1))
    figures("peak MiB", round(peak / 2**20, 1))


def test_the_profiler_has_a_table_of_the_device(tmp_path: Path, device: Device, figures: Figures) -> None:
    trained(tmp_path, device, callbacks=[ProfilerCallback(3, 4, tmp_path / "profiler")], num_train_epochs=1)
    summary = (tmp_path / "profiler" / "summary_rank0.txt").read_text()
    assert "self_cpu_time_total, 4 steps" in summary
    assert ("self_device_time_total, 4 steps" in summary) == (device == "cuda")
    trace = (tmp_path / "profiler" / "trace_rank0.json").read_text()
    assert ('"cat": "kernel"' in trace) == (device == "cuda")
    figures("trace MiB", round(len(trace) / 2**20, 1))


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside training"])
def test_a_run_resumes_from_its_checkpoint(tmp_path: Path, device: Device, beside: bool) -> None:
    whole = trained(tmp_path, device, save_strategy="steps", save_steps=30, async_save=beside)
    again = trained(tmp_path / "again", device, resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert again.state.global_step == whole.state.global_step == 60
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def sharded(folder: str, device: str, fp16: bool) -> dict[str, Any]:
    """Train a rank's part of a model by FSDP2, and resume from a checkpoint of parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = torch.distributed.get_world_size()

    def model() -> Any:
        made = make_classifier().to(device)
        fully_shard(made, mesh=init_device_mesh(device, (world,)))
        return made

    def weights(trainer: Any) -> list[torch.Tensor]:
        return [parameter.full_tensor().detach().cpu() for parameter in trainer.model.parameters()]

    common = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 1, "fp16": fp16}
    whole = trained(folder, device, model=model(), **common)
    again = trained(f"{folder}-again", device, model=model(), **common, resume_from_checkpoint=f"{folder}/checkpoint-5")
    return {
        "losses": losses(whole),
        "weights": weights(whole),
        "again": weights(again),
        "devices": sorted({parameter.to_local().device.type for parameter in whole.model.parameters()}),
        "world": world,
    }


sharded_over_all = sky.compute(sky.integrations.torch(processes_per_node="auto")(sharded))


@pytest.mark.limit(90)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_sharded_model_trains_and_resumes(
    pool: sky.ComputePool, tmp_path: Path, device: Device, precision: str, figures: Figures
) -> None:
    found = sharded_over_all(str(tmp_path / "run"), device, precision == "fp16") >> pool
    figures("ranks", found["world"])
    assert found["devices"] == [device]
    assert all(bool(weight.isfinite().all()) for weight in found["weights"])
    for one, other in zip(found["again"], found["weights"], strict=True):
        torch.testing.assert_close(one, other)
