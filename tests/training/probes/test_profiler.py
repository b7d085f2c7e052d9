"""ProfilerCallback: its window, its files, and that it is closed however training ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training.callbacks.profiler import ProfilerCallback
from tests.training.probes.small_run import SmallRun


def steps_in(trace: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return sorted({each["name"] for each in events if each.get("name", "").startswith("ProfilerStep#")})


def test_a_window_of_steps_is_written_as_a_trace_and_a_summary(tmp_path: Path) -> None:
    SmallRun(tmp_path, [ProfilerCallback(start_step=2, num_steps=3)], max_steps=8).train()
    folder = tmp_path / "logs" / "profiler"
    assert sorted(each.name for each in folder.iterdir()) == ["summary_rank0.txt", "trace_rank0.json"]
    assert steps_in(folder / "trace_rank0.json") == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    trace = json.loads((folder / "trace_rank0.json").read_text())
    assert any(each.get("name") == "aten::convolution" for each in trace["traceEvents"])
    summary = (folder / "summary_rank0.txt").read_text()
    assert summary.startswith("self_cpu_time_total, 3 steps\n")
    assert "aten::" in summary  # which operators take the most time depends on the machine
    assert "Total MFLOPs" in summary or "FLOP" in summary


def test_the_window_may_begin_with_the_first_step(tmp_path: Path) -> None:
    SmallRun(tmp_path, [ProfilerCallback(0, 1, tmp_path / "here", False, False, False)], max_steps=2).train()
    assert steps_in(tmp_path / "here" / "trace_rank0.json") == ["ProfilerStep#0"]


def test_training_that_ends_inside_the_window_closes_it(tmp_path: Path) -> None:
    callback = ProfilerCallback(start_step=1, num_steps=5)
    SmallRun(tmp_path, [callback], max_steps=3).train()
    folder = tmp_path / "logs" / "profiler"
    assert steps_in(folder / "trace_rank0.json")[:2] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert (folder / "summary_rank0.txt").read_text().startswith("self_cpu_time_total, 2 steps\n")
    callback.close()  # nothing more


def test_training_that_raises_inside_the_window_closes_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        SmallRun(tmp_path, [ProfilerCallback(start_step=1, num_steps=5)], max_steps=9).train(dies_at=4)
    assert steps_in(tmp_path / "logs" / "profiler" / "trace_rank0.json")[:2] == ["ProfilerStep#1", "ProfilerStep#2"]


def test_training_that_ends_before_the_window_writes_nothing_and_leaves_no_profiler(tmp_path: Path) -> None:
    for at in range(2):  # a profiler that was left open would refuse the second
        SmallRun(tmp_path / str(at), [ProfilerCallback(start_step=3)], max_steps=3 - at).train()
        assert not (tmp_path / str(at) / "logs").exists()


def test_the_profiler_of_an_unclosed_run_is_closed_by_the_next(tmp_path: Path) -> None:
    """Hugging Face's Trainer fires nothing when it raises."""
    callback = ProfilerCallback(start_step=0, num_steps=5)
    run = SmallRun(tmp_path / "1", [callback])
    run.fire("on_train_begin")
    run.fire("on_step_begin")
    run = SmallRun(tmp_path / "2", [callback], max_steps=6).train()
    assert steps_in(tmp_path / "1" / "logs" / "profiler" / "trace_rank0.json")[0] == "ProfilerStep#0"
    assert len(steps_in(tmp_path / "2" / "logs" / "profiler" / "trace_rank0.json")) == 5


def test_a_process_that_ends_by_an_exception_has_written_its_trace(tmp_path: Path) -> None:
    program = f"""
import torch
from tests.training.probes.small_run import SmallRun
from skyward.training.callbacks.profiler import ProfilerCallback
from pathlib import Path
run = SmallRun(Path({str(tmp_path)!r}), [ProfilerCallback(start_step=0, num_steps=50, with_stack=False)])
run.fire("on_train_begin")
run.fire("on_step_begin")
torch.ones(3).sum()
raise RuntimeError("out of memory")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, capture_output=True, text=True, timeout=100
    )
    assert "out of memory" in ended.stderr
    assert steps_in(tmp_path / "logs" / "profiler" / "trace_rank0.json")[0] == "ProfilerStep#0"


def test_numbers_out_of_range_are_refused_and_flags_are_on() -> None:
    with pytest.raises(UsageError, match="start_step=-1: must be at least 0; set"):
        ProfilerCallback(start_step=-1)
    with pytest.raises(UsageError, match="num_steps=0: must be at least 1; set"):
        ProfilerCallback(num_steps=0)
    callback = ProfilerCallback()
    assert (callback.start_step, callback.num_steps, callback.output_dir) == (3, 5, None)
    assert callback.with_stack is callback.with_flops is callback.record_shapes is True
