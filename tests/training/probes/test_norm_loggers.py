"""GradNormLogger, ParameterNormLogger, WeightNormLogger in a run: their records, their cost, and a resume."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training import TrainerCallback, TrainerControl, TrainerState
from skyward.training.callbacks.grad_norm import GradNormLogger, evaluation_follows
from skyward.training.callbacks.parameter_norm import ParameterNormLogger
from skyward.training.callbacks.weight_norm import WeightNormLogger
from tests.training.probes.small_run import SmallRun
from tests.training.probes.waits import Waits


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "logs" / name).read_text())
    return found


def test_gradient_norms_are_those_after_clipping_of_the_step_before_the_evaluation(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [GradNormLogger()]).train()
    found = records(tmp_path, "gradient_norms.json")
    assert [each["global_step"] for each in found] == [2, 4, 6]
    for each in found:
        assert each["grad_norms"] == pytest.approx(run.gradients[each["global_step"]], rel=1e-6)
        assert sum(norm**2 for norm in each["grad_norms"].values()) ** 0.5 <= 0.1 * 1.0001  # the clipping
    assert found[0]["epoch"] == 0.5


def test_gradients_are_measured_only_if_recorded_with_one_wait(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watching(GradNormLogger):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with Waits() as waits:
                super().on_pre_optimizer_step(**kwargs)
            calls.append(f"pre {kwargs['state'].global_step + 1}: {waits.count} {self._pending is not None}")

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            with Waits() as waits:
                super().on_evaluate(**kwargs)
            calls.append(f"evaluate: {waits.count}")

    SmallRun(tmp_path, [Watching()], max_steps=4).train()
    assert calls == ["pre 1: 0 False", "pre 2: 0 True", "evaluate: 1", "pre 3: 0 False", "pre 4: 0 True", "evaluate: 1"]


@pytest.mark.parametrize(
    ("args", "control", "step", "loader", "expected"),
    [
        ({"eval_strategy": "steps", "eval_steps": 5}, {}, 10, None, True),
        ({"eval_strategy": "steps", "eval_steps": 5}, {}, 11, None, False),
        ({"eval_strategy": "steps", "eval_steps": 5, "eval_delay": 20}, {}, 10, None, False),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"should_evaluate": True}, 11, None, True),
        ({"eval_strategy": "steps", "eval_steps": 7}, {}, 100, None, True),  # the last of all
        ({"eval_strategy": "no"}, {}, 10, None, False),
        ({"eval_strategy": "epoch"}, {}, 10, [0] * 10, True),
        ({"eval_strategy": "epoch"}, {}, 11, [0] * 10, False),
        ({"eval_strategy": "epoch", "gradient_accumulation_steps": 4}, {}, 6, [0] * 10, True),
        ({"eval_strategy": "epoch", "gradient_accumulation_steps": 4}, {}, 4, [0] * 10, False),
        ({"eval_strategy": "epoch"}, {"should_epoch_stop": True}, 11, [0] * 10, True),
        ({"eval_strategy": "epoch"}, {}, 10, iter([]), None),
        ({"eval_strategy": "whenever it likes"}, {}, 10, None, None),
    ],
)
def test_the_step_before_an_evaluation_is_foreseen(
    args: dict[str, Any], control: dict[str, bool], step: int, loader: Any, expected: bool | None
) -> None:
    from types import SimpleNamespace

    state = TrainerState(global_step=step - 1, max_steps=100, eval_steps=args.get("eval_steps", 0))
    got = evaluation_follows(SimpleNamespace(**args), state, TrainerControl(**control), loader)
    assert got is expected


def test_huggingfaces_enum_of_strategies_is_understood() -> None:
    import enum
    from types import SimpleNamespace

    class IntervalStrategy(enum.Enum):
        STEPS = "steps"

    args = SimpleNamespace(eval_strategy=IntervalStrategy.STEPS, eval_steps=3)
    state = TrainerState(global_step=2, max_steps=100, eval_steps=3)
    assert evaluation_follows(args, state, TrainerControl(), None) is True


def test_evaluations_by_epochs_have_their_records(tmp_path: Path) -> None:
    SmallRun(tmp_path, [GradNormLogger()], eval_strategy="epoch", epoch_steps=3, max_steps=7).train()
    assert [each["global_step"] for each in records(tmp_path, "gradient_norms.json")] == [3, 6]


def test_an_unforeseen_evaluation_has_no_record_and_the_next_one_has(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [GradNormLogger()], max_steps=8, eval_steps=4, evaluates_also_at=(1, 3)).train()
    found = records(tmp_path, "gradient_norms.json")
    assert [each["global_step"] for each in found] == [3, 4, 8]
    for each in found:
        assert each["grad_norms"] == pytest.approx(run.gradients[each["global_step"]], rel=1e-6)


def test_two_evaluations_at_a_step_are_one_record_and_one_before_the_first_step_is_none(tmp_path: Path) -> None:
    """There are evaluations of several data sets, and `eval_on_start`."""
    callback = GradNormLogger()
    run = SmallRun(tmp_path, [callback], max_steps=4)

    class Again(TrainerCallback):
        def on_train_begin(self, **kwargs: Any) -> None:
            run.fire("on_evaluate", metrics={})

        def on_log(self, **kwargs: Any) -> None:
            if run.state.global_step == 2:
                run.fire("on_evaluate", metrics={})

    run.handler.add(Again())
    run.train()
    run.fire("on_evaluate", metrics={})  # when training is over
    assert [each["global_step"] for each in records(tmp_path, "gradient_norms.json")] == [2, 4]
    assert callback.state_dict()["foresees"] is True


def test_a_parameter_without_a_gradient_is_not_in_the_record(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [GradNormLogger()], max_steps=2)
    assert isinstance(run.model.conv, nn.Conv2d)
    run.model.conv.weight.requires_grad_(False)
    run.train()
    (record,) = records(tmp_path, "gradient_norms.json")
    assert set(record["grad_norms"]) == {name for name, _ in run.model.named_parameters()} - {"conv.weight"}


def test_without_a_logging_dir_nothing_is_written_or_measured(tmp_path: Path) -> None:
    SmallRun(tmp_path, [GradNormLogger(), ParameterNormLogger()], logging_dir=None, max_steps=2).train()
    assert list(tmp_path.iterdir()) == []


def test_gradients_consumed_by_the_backward_pass_are_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    SmallRun(tmp_path, [GradNormLogger()], model=model).train()
    assert [each.message for each in caplog.records] == [
        "GradNormLogger is disabled: no parameter has a gradient when the optimizer's step begins"
    ]
    assert records(tmp_path, "gradient_norms.json") == []


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing torch.distributed.optim
def test_torchs_own_optimizer_in_backward_is_recognised_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    SmallRun(tmp_path, [GradNormLogger()], model=model, max_steps=2).train()
    reason = "the optimizer runs within the backward pass, which leaves no gradient of '1.weight'"
    assert [each.message for each in caplog.records] == [f"GradNormLogger is disabled: {reason}"]


@pytest.mark.parametrize("callback", [GradNormLogger, ParameterNormLogger, WeightNormLogger])
def test_parameters_on_the_meta_device_are_warned_about_once(
    tmp_path: Path, callback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    run = SmallRun(tmp_path, [callback()], model=model)
    run.fire("on_train_begin")
    run.fire("on_pre_optimizer_step")
    logs: dict[str, Any] = {}
    run.fire("on_log_step", logs=logs)
    run.fire("on_evaluate", metrics={})
    run.fire("on_train_end")
    assert logs == {}
    assert [each.message for each in caplog.records] == [
        f"{callback.__name__} is disabled: parameter 'weight' is on the meta device, so it has no values"
    ]
    assert list(tmp_path.rglob("*.json")) == []


def test_parameter_norms_are_those_of_torch(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [ParameterNormLogger(power_iter_steps=50)], max_steps=2).train()
    (record,) = records(tmp_path, "parameter_norms.json")
    parameters = dict(run.model.named_parameters())
    assert record["norms"] == pytest.approx(
        {name: float(each.detach().norm()) for name, each in parameters.items()}, rel=1e-5
    )
    matrices = {name: each.flatten(1) for name, each in parameters.items() if each.ndim > 1}
    assert set(matrices) == {"conv.weight", "head.weight", "adapter"}
    true = {name: float(torch.linalg.matrix_norm(each.detach(), 2)) for name, each in matrices.items()}
    assert record["spectral_norms"] == pytest.approx(true, rel=1e-3)


def test_each_kind_of_norm_can_be_left_out(tmp_path: Path) -> None:
    for at, (options, expected) in enumerate(
        [({"log_norms": False}, {"spectral_norms"}), ({"log_spectral_norms": False}, {"norms"})]
    ):
        SmallRun(tmp_path / str(at), [ParameterNormLogger(**options)], max_steps=2).train()
        (record,) = records(tmp_path / str(at), "parameter_norms.json")
        assert set(record) == {"timestamp", "global_step", "epoch"} | expected


def test_parameter_norms_wait_twice_at_an_evaluation_and_at_no_other_time(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [ParameterNormLogger()])
    run.fire("on_train_begin")
    with Waits() as waits:
        run.fire("on_evaluate", metrics={})
    assert waits.count == 2  # norms, spectral norms


def test_a_resumed_run_writes_the_same_records_as_one_that_never_stopped(tmp_path: Path) -> None:
    """The directions of the power iteration are part of the checkpoint, so records agree to the bit."""
    whole = tmp_path / "whole"
    SmallRun(whole, [GradNormLogger(), ParameterNormLogger(power_iter_steps=1)], max_steps=8).train()

    cut = tmp_path / "cut"
    first = SmallRun(cut, [GradNormLogger(), ParameterNormLogger(power_iter_steps=1)], max_steps=8)
    kept: dict[str, Any] = {}

    class SaveAndDie(TrainerCallback):
        def on_step_end(self, state: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                kept.update(first.checkpoint())
                kept["callbacks"] = json.loads(json.dumps(kept["callbacks"]))  # fits every checkpoint

    first.handler.add(SaveAndDie())
    with pytest.raises(RuntimeError, match="out of memory"):
        first.train(dies_at=7)
    second = SmallRun(cut, [GradNormLogger(), ParameterNormLogger(power_iter_steps=1)], max_steps=8)
    second.resume(kept).train()

    for name in ("gradient_norms.json", "parameter_norms.json"):
        expected, got = records(whole, name), records(cut, name)
        for each in (*expected, *got):
            del each["timestamp"]
        assert got == expected


def test_the_weight_norm_is_that_of_all_weights_at_every_log_in_one_wait(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [WeightNormLogger()], max_steps=3, logging_steps=1)
    true: list[float] = []

    class Check(TrainerCallback):
        def on_log_step(self, model: nn.Module, **kwargs: Any) -> None:
            true.append(float(torch.cat([each.detach().flatten() for each in model.parameters()]).double().norm()))

    run.handler.add(Check())
    run.train()
    assert [each["weight_norm"] for each in run.state.log_history] == pytest.approx(true, rel=1e-6)
    with Waits() as waits:
        run.fire("on_log_step", logs={})
    assert waits.count == 2  # one, and the check's own


def test_norm_loggers_never_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    run = SmallRun(tmp_path, [GradNormLogger(), ParameterNormLogger()], max_steps=2).train()
    assert run.state.global_step == 2
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [
        "GradNormLogger.on_train_begin failed; the callback is disabled from now on",
        "ParameterNormLogger.on_train_begin failed; the callback is disabled from now on",
    ]


def test_steps_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="power_iter_steps=0: must be at least 1; set"):
        ParameterNormLogger(power_iter_steps=0)


def test_defaults_are_those_of_the_table() -> None:
    import inspect

    assert str(inspect.signature(GradNormLogger)) == "() -> 'None'"
    parameters = inspect.signature(ParameterNormLogger).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "log_norms": None,
        "log_spectral_norms": True,
        "power_iter_steps": 10,
    }
