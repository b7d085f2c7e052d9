"""DefaultMetrics adds metrics to training logs, and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training.callbacks import DefaultMetrics
from tests.training.producer import Producer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def started(clock: Clock, *, flops: float | None = None, tokens: int = 0, flos: float = 0.0) -> Producer:
    run = Producer([DefaultMetrics(flops, clock=clock)])
    run.state.num_input_tokens_seen, run.state.total_flos = tokens, flos
    run.begin()
    return run


def test_tokens_per_second_are_there_from_the_first_log_on() -> None:
    clock = Clock()
    run = started(clock)
    clock.now += 2
    assert run.step(tokens=1000, loss=1.0) == {"loss": 1.0, "tokens": 1000, "tok_per_sec": 500}
    run.step(tokens=1000)
    clock.now += 10
    logs = run.step(tokens=1000, loss=1.0)
    assert (logs["tokens"], logs["tok_per_sec"]) == (2000, 200)


def test_a_resumed_run_counts_from_the_checkpoint() -> None:
    clock = Clock()
    run = started(clock, flops=1e3, tokens=1_000_000, flos=5e9)
    run.fire("on_step_begin")
    clock.now += 1
    run.fire("on_step_end")
    run.state.num_input_tokens_seen += 100
    run.state.total_flos += 500
    logs: dict[str, Any] = {"loss": 1.0}
    run.log(logs)
    assert logs == {"loss": 1.0, "tokens": 100, "tok_per_sec": 100, "total_flos": 5e9 + 500, "mfu": 0.5}


def test_mfu_is_relative_to_the_time_in_steps_and_all_ranks_hardware() -> None:
    clock = Clock()
    run = started(clock, flops=200.0)
    for _ in range(2):
        clock.now += 7  # data, saving, evaluating: no step
        run.fire("on_step_begin")
        clock.now += 1
        run.fire("on_step_end")
        run.state.total_flos += 100
    logs: dict[str, Any] = {"loss": 1.0}
    run.log(logs)
    assert logs["mfu"] == pytest.approx(0.5)
    logs = {"loss": 1.0}
    run.log(logs)  # no step since
    assert "mfu" not in logs


def test_evaluations_and_the_summary_are_unchanged_and_do_not_end_an_interval() -> None:
    clock = Clock()
    run = started(clock)
    clock.now += 1
    run.step(tokens=100)
    for other in ({"eval_loss": 1.0, "epoch": 1.0}, {"train_runtime": 1.0, "train_loss": 1.0}):
        logs = dict(other)
        run.log(logs)
        assert logs == other
    clock.now += 1
    assert run.step(loss=1.0)["tok_per_sec"] == 50


def test_values_logged_by_the_producer_stay() -> None:
    clock = Clock()
    run = started(clock)
    clock.now += 1
    logs = run.step(tokens=100, loss=1.0, tok_per_sec=7, peak_mem_allocated=[1, 2])
    assert (logs["tok_per_sec"], logs["peak_mem_allocated"]) == (7, [1, 2])


def test_peak_memory_is_bytes_one_number_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # the edge: no accelerator here
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)

    class TwoRanks:
        rank, world_size, local_rank = 0, 2, 0

        def exchange(self, value: Any) -> list[Any]:
            return [value] if value is None else [value, None]

    run = Producer([DefaultMetrics()], ranks=TwoRanks())  # type: ignore[arg-type]
    run.begin()
    assert run.step(loss=1.0)["peak_mem_allocated"] == [5, 0]


def test_nothing_is_added_if_nothing_is_known() -> None:
    assert started(Clock(), flops=1.0).step(loss=1.0) == {"loss": 1.0}


@pytest.mark.parametrize("flops", [0, -1.0, float("nan")])
def test_an_illegal_peak_is_refused(flops: float) -> None:
    with pytest.raises(UsageError, match="peak_hardware_flops"):
        DefaultMetrics(flops)
