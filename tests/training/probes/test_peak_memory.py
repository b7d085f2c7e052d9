"""PeakMemory without a device, and on CUDA, where a stand-in is used if there is no device."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training import Alone
from skyward.training.callbacks import peak_memory
from skyward.training.callbacks.peak_memory import PeakMemory
from tests.training.probes.small_run import SmallRun

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Device(peak_memory.MemorySource):
    """A device of the tests."""

    key, tag, words = "peak_mem_allocated", "peak_memory", "peak allocated memory"

    def __init__(self) -> None:
        self.peak = 3 * 2**30
        self.said: list[str] = []

    def peak_bytes(self) -> int:
        return self.peak

    def reset(self) -> None:
        self.said.append("reset")

    def details(self) -> str:
        return "the summary"

    def start_history(self, entries: int) -> bool:
        self.said.append("on")
        return True

    def end_history(self, path: Path) -> None:
        self.said.append("off")
        path.write_bytes(b"history")


class TwoRanks(Alone):
    """World with another rank whose values the test gives."""

    def exchange(self, value: Any) -> Any:
        return [value, 2 * value]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(peak_memory, "source_of_this_process", lambda: found)
    return found


class Scalars:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.scalars.append((tag, value, global_step))


def test_the_peak_of_each_rank_is_logged_and_never_falls(tmp_path: Path, device: Device) -> None:
    writer, callback = Scalars(), PeakMemory()
    callback.summary_writer = writer
    run = SmallRun(tmp_path, [callback], ranks=TwoRanks())
    run.fire("on_train_begin")
    for step, peak in ((1, 5), (2, 3)):  # somebody has reset the counter
        device.peak, run.state.global_step, logs = peak, step, dict[str, Any]()
        run.fire("on_log_step", logs=logs)
        assert logs == {"peak_mem_allocated": [5, 10]}
        run.fire("on_log", logs=logs)
    assert writer.scalars == [(f"peak_memory_rank{rank}", 5 * (rank + 1), step) for step in (1, 2) for rank in (0, 1)]
    assert device.said == ["reset"]


def test_it_shows_nothing_by_default(tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    SmallRun(tmp_path / "1", [PeakMemory()], max_steps=2).train()
    assert capsys.readouterr().out == ""
    SmallRun(tmp_path / "2", [PeakMemory(do_log=True, show_details=True)], max_steps=2).train()
    line = "peak allocated memory: 3.00 GiB"
    assert capsys.readouterr().out == f"step 1, {line}\nstep 2, {line}\nmemory of rank 0:\nthe summary\n"


def test_a_memory_history_ends_at_the_first_log(tmp_path: Path, device: Device) -> None:
    SmallRun(tmp_path, [PeakMemory(enable_memory_snapshot=True)], max_steps=4).train()
    assert device.said == ["reset", "on", "off"]
    assert (tmp_path / "memory_snapshot_rank0.pickle").read_bytes() == b"history"


@pytest.mark.parametrize("dies_at", [None, 2])
def test_a_memory_history_ends_though_nothing_is_logged(tmp_path: Path, device: Device, dies_at: int | None) -> None:
    run = SmallRun(tmp_path, [PeakMemory(enable_memory_snapshot=True, file_prefix="m")], logging_steps=100, max_steps=3)
    if dies_at is None:
        run.train()
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            run.train(dies_at=dies_at)
    assert device.said == ["reset", "on", "off"]
    assert (tmp_path / "m_rank0.pickle").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_resident_memory_is_logged_under_its_own_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = PeakMemory(enable_memory_snapshot=True, show_details=True)
    run = SmallRun(tmp_path, [callback], max_steps=2).train()
    assert caplog.messages == [
        "PeakMemory: the run uses no CUDA device; it logs each process's peak resident memory, as peak_rss"
    ]
    for each in run.state.log_history:
        assert "peak_mem_allocated" not in each
        (peak,) = each["peak_rss"]
        assert 2**25 < peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert list(tmp_path.rglob("*.pickle")) == []


@needs_cuda
def test_on_cuda_the_peak_is_what_torch_allocated_and_a_snapshot_can_be_read(tmp_path: Path) -> None:
    import pickle

    callback = PeakMemory(enable_memory_snapshot=True)
    torch.cuda.init()
    run = SmallRun(tmp_path, [callback])
    run.fire("on_train_begin")
    kept = torch.zeros(2**20, device="cuda")
    logs: dict[str, Any] = {}
    run.fire("on_log_step", logs=logs)
    run.fire("on_log", logs=logs)
    assert logs["peak_mem_allocated"] == [torch.cuda.max_memory_allocated()]
    assert logs["peak_mem_allocated"][0] >= kept.nbytes
    snapshot = pickle.loads((tmp_path / "memory_snapshot_rank0.pickle").read_bytes())
    assert any(trace for trace in snapshot["device_traces"])


def test_defaults_are_those_of_the_table() -> None:
    import inspect

    defaults = [each.default for each in inspect.signature(PeakMemory).parameters.values()]
    assert defaults == [None, False, False, False, "memory_snapshot"]
