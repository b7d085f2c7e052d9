"""Checkpoints that a Trainer writes behind training, before a machine ends, and of groups of ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.errors import CheckpointSaveFailed, UsageError
from skyward.training import SharingPattern, StateComponent, Trainer, TrainingArguments
from skyward.training.checkpoint import RunTerminated, best_of, checkpoints_in, problems
from skyward.values.topology import InstanceInfo
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.checkpoint.states import Box, Unwritable
from tests.training.trainer.regression import Line, Points, callback, history, run, trainer
from tests.waiting import until

HARD: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "save_steps": 2,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 9,
    "async_save": True,
}


class Gated:
    """A callback whose state cannot be written before a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def state_dict(self) -> dict[str, Any]:
        return {"gate": Gate(self.file)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Gate:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def __reduce__(self) -> Any:
        until(self.file.exists, within_s=60)
        return (complex, ())  # which loads it by default


class Poisoned:
    """A callback whose state cannot be written from its second save on."""

    saves = 0

    def state_dict(self) -> Any:
        self.saves += 1
        return Unwritable(None).state_dict() if self.saves > 1 else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def result(made: Trainer) -> dict[str, Any]:
    return {"history": history(made), "weights": [each.tolist() for each in made.model.parameters()]}


def hard(folder: Path, resume: str | bool | None = None, **options: Any) -> Trainer:
    made = {"model": Line(dropout=0.3), "data": Points(21, noise=0.1)} | HARD | options
    return run(folder, resume, **made)


def steps_in(folder: Path) -> list[int | None]:
    return [each.step for each in checkpoints_in(folder)]


def all_resumes(folder: Path) -> list[dict[str, Any]]:
    """Run one that saves at once, one that saves behind training, and one from each checkpoint."""
    at_once = result(hard(folder / "at-once", async_save=False))
    whole = result(hard(folder / "whole"))
    resumed = []
    for step in steps_in(folder / "whole"):
        torch.manual_seed(step or 0)
        resumed.append(result(hard(folder / f"after-{step}", str(folder / "whole" / f"checkpoint-{step}"))))
    return [at_once, whole, *resumed]


# One process ----------------------------------------------------------------------------------------------------------


def test_saves_behind_training_change_nothing_and_each_can_be_resumed(tmp_path: Path) -> None:
    first, *others = all_resumes(tmp_path)
    assert len(others) == 1 + 6
    assert others == [first] * len(others)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_has_its_epoch_its_metrics_and_the_hash_of_its_settings(
    tmp_path: Path, asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "max_steps": 12,
        "logging_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 2,
    }
    made = run(tmp_path, async_save=asynchronous, **settings)
    found = {each.step: each.manifest for each in checkpoints_in(tmp_path)}
    assert [found[step].epoch for step in (2, 4, 12)] == [0.4, 0.8, 2.4]
    losses = {each["step"]: each["eval_loss"] for each in made.state.log_history if "eval_loss" in each}
    assert found[2].metadata["metrics"] == {}  # nothing was measured there
    assert found[4].metadata["metrics"] == {"eval_loss": losses[4]}
    assert set(found[12].metadata["metrics"]) == {"loss", "eval_loss"}
    assert best_of(checkpoints_in(tmp_path), "eval_loss")[0].step == min(losses, key=lambda step: losses[step])
    assert {each.training_args_hash for each in found.values()} == {made.args.digest()}
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert f"eval_loss={losses[4]:.4g}" in capsys.readouterr().out


def test_a_save_that_a_callback_requests_is_made_though_only_the_best_are_saved(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1}
    run(tmp_path, learning_rate=0.0, callbacks=[callback(on_step_end=asks(3))], **settings)
    assert steps_in(tmp_path) == [1, 3]


def test_the_hash_of_settings_covers_those_that_affect_the_computation() -> None:
    first = TrainingArguments("here", learning_rate=0.1).digest()
    assert TrainingArguments("there", learning_rate=0.1, resume_from_checkpoint="auto").digest() == first
    assert TrainingArguments("here", learning_rate=0.2).digest() != first


def test_training_goes_on_during_a_save_and_is_notified_when_it_is_durable(tmp_path: Path) -> None:
    told: list[tuple[str, int, int, list[str]]] = []
    seen: list[bool] = []

    def tell(state: Any, checkpoint: str, saved_step: int, **_: Any) -> None:
        told.append((Path(checkpoint).name, saved_step, state.global_step, problems(checkpoint)))

    def step(state: Any, **_: Any) -> None:
        seen.append(Path(tmp_path, "checkpoint-2").exists())
        if state.global_step == 5:
            (tmp_path / "open").touch()

    run(tmp_path, max_steps=9, save_steps=100, async_save=True, callbacks=[
        Gated(tmp_path / "open"),
        callback(on_step_end=asks(2), on_save=tell),
        callback(on_step_end=step),
    ])  # fmt: skip
    assert seen[:5] == [False] * 5, "step 2 was copied, and steps 3 to 5 were made before it was written"
    (name, saved_step, at, damaged), last = told
    assert (name, saved_step, damaged) == ("checkpoint-2", 2, [])
    assert at >= 5
    assert last[:2] == ("checkpoint-9", 9)


def asks(*steps: int) -> Any:
    def on_step_end(state: Any, control: Any, **_: Any) -> None:
        if state.global_step in steps:
            control.should_save = True

    return on_step_end


def test_a_busy_writer_skips_saves_that_only_the_cadence_requests(tmp_path: Path) -> None:
    """Neither a callback's request (7), nor the best (4: every evaluation is better), nor the last is skipped."""

    def opens(state: Any, **_: Any) -> None:
        if state.global_step == 3:  # its save has been skipped
            (tmp_path / "open").touch()

    run(tmp_path, model=Slow(), max_steps=9, save_steps=1, async_save=True, save_on_busy="skip",
        eval_strategy="steps", eval_steps=4, metric_for_best_model="loss", learning_rate=0.01,
        callbacks=[Gated(tmp_path / "open"), callback(on_step_begin=opens), callback(on_step_end=asks(7))],
    )  # fmt: skip
    steps = steps_in(tmp_path)
    assert steps[0] == 1
    assert not {2, 3} & set(steps), "the writer was at step 1"
    assert {4, 7, 8, 9} <= set(steps)


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_log"])
def test_an_order_to_save_at_a_scheduled_step_waits_for_the_busy_writer(tmp_path: Path, event: str) -> None:
    """The writer is at step 1 until the order of step 3 waits for it, so step 2 is skipped and step 3 is not."""

    def order(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 - (event == "on_step_begin"):
            control.should_save = True
            threading.Timer(0.2, (tmp_path / "open").touch).start()

    run(tmp_path, max_steps=4, save_steps=1, async_save=True, save_on_busy="skip", logging_steps=1,
        callbacks=[Gated(tmp_path / "open"), callback(**{event: order})],
    )  # fmt: skip
    steps = steps_in(tmp_path)
    assert (steps[0], 2 in steps, 3 in steps) == (1, False, True)


class Slow(Line):
    """Callback that makes a step longer than a flag takes."""


def test_an_error_of_a_save_behind_training_ends_the_run_at_a_later_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=100_000, save_steps=2, async_save=True, callbacks=[Poisoned()])
    with pytest.raises(CheckpointSaveFailed, match="No space left on device"):
        made.train()
    assert 4 < made.state.global_step < 100_000
    assert steps_in(tmp_path) == [2]


def test_the_best_model_is_loaded_from_a_checkpoint_that_was_being_written(tmp_path: Path) -> None:
    """Steps move away from the line, so the first evaluation is the best."""
    made = run(tmp_path, max_steps=6, save_steps=3, eval_strategy="steps", eval_steps=3, async_save=True,
               learning_rate=-0.0, load_best_model_at_end=True, save_total_limit=1)  # fmt: skip
    assert made.state.best_model_checkpoint is not None
    assert os.path.isdir(made.state.best_model_checkpoint)


@pytest.mark.parametrize("at", [5, 6, 9])
def test_a_sigterm_saves_the_step_and_the_run_resumes_from_there(at: int, tmp_path: Path) -> None:
    """Step 6 is logged and ends an epoch, and after 9 it is evaluated."""
    before = signal.getsignal(signal.SIGTERM)

    def terminates(state: Any, **_: Any) -> None:
        if state.global_step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = result(hard(tmp_path / "whole", save_steps=100))
    ways: list[dict[str, Any]] = [{"async_save": True}, {"async_save": False}, {"save_strategy": "no"}]
    for number, options in enumerate(ways):
        folder = tmp_path / str(number)
        with pytest.raises(RunTerminated) as ended:
            hard(folder, enable_jit_checkpoint=True, callbacks=[callback(on_step_end=terminates)],
                 **{"save_steps": 100} | options)  # fmt: skip
        assert (ended.value.code, ended.value.checkpoint) == (143, str(folder / f"checkpoint-{at}"))
        assert result(hard(folder, True, save_steps=100)) == whole
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_notice_of_the_provider_saves_the_step_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = tmp_path / "notice"
    info = InstanceInfo(
        node=0, worker=0, total_nodes=1, workers_per_node=1, accelerators=0, total_accelerators=0, head_addr="",
        head_port=0, job_id="job", notice_file=str(notice),
    )  # fmt: skip
    # No cloud is here to give one.
    monkeypatch.setattr("skyward.training.checkpoint.termination.instance_info", lambda: info)

    def announces(state: Any, **_: Any) -> None:
        if state.global_step == 4:
            notice.touch()

    with pytest.raises(RunTerminated) as ended:
        run(tmp_path / "run", max_steps=9, enable_jit_checkpoint=True, callbacks=[callback(on_step_end=announces)])
    assert ended.value.checkpoint == str(tmp_path / "run" / "checkpoint-4")


def test_an_emergency_save_that_takes_longer_than_its_grace_time_is_an_error(tmp_path: Path) -> None:
    def terminates(state: Any, **_: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    made = trainer(tmp_path, max_steps=9, save_strategy="no", async_save=True, enable_jit_checkpoint=True,
                   jit_checkpoint_grace_s=0.2,
                   callbacks=[Gated(tmp_path / "open"), callback(on_step_end=terminates)])  # fmt: skip
    with pytest.raises(CheckpointSaveFailed, match="not durable within"):
        made.train()
    (tmp_path / "open").touch()
    made.checkpoints.wait()
    assert steps_in(tmp_path) == [2], "it is written all the same if the process is not killed"


def test_refused_arguments_of_saves_list_the_legal_values() -> None:
    with pytest.raises(UsageError, match=r"save_on_busy='drop': must be one of 'wait', 'skip'"):
        TrainingArguments(save_on_busy="drop")
    with pytest.raises(UsageError, match=r"jit_checkpoint_grace_s=0: must be a number of seconds > 0"):
        TrainingArguments(jit_checkpoint_grace_s=0)


# Two ranks ------------------------------------------------------------------------------------------------------------


def two_ranks_save_behind_training(ranks: Any, folder: Path) -> Any:
    return all_resumes(folder)


def an_error_of_one_rank(ranks: Any, folder: Path) -> Any:
    made = trainer(folder, max_steps=100_000, save_steps=2, async_save=True, callbacks=[Poisoned()])
    said = error_of(made.train)
    return said, made.state.global_step, steps_in(folder)


def a_sigterm_of_one_rank(ranks: Any, folder: Path) -> Any:
    def terminates(state: Any, **_: Any) -> None:
        if state.global_step == 3 and ranks.rank == 1:  # it is logged
            os.kill(os.getpid(), signal.SIGTERM)

    first: Any = None
    try:
        hard(folder, enable_jit_checkpoint=True, save_steps=100, callbacks=[callback(on_step_end=terminates)])
    except RunTerminated as ended:
        first = Path(str(ended.checkpoint)).name, ended.code
    resumed = result(hard(folder, True, save_steps=100))
    return first, resumed == result(hard(folder / "whole", save_steps=100))


class Grouped(Trainer):
    """Component with a state that each group of ranks shares, beside the usual one."""

    group: Any = None
    box: Box

    def get_process_groups(self) -> dict[str, Any]:
        return {"copies": self.group}

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        own = StateComponent("own", self.box, SharingPattern.PER_GROUP, "copies")
        return [*super().get_state_components(for_saving=for_saving), own]


def groups_reach_the_coordinator(ranks: Any, folder: Path) -> Any:
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(2)][ranks.rank]

    def made(group: Any, where: str, state: dict[str, Any], **options: Any) -> Grouped:
        args = TrainingArguments(folder / where, max_steps=4, save_steps=2, disable_tqdm=True, use_cpu=True, **options)
        trained = Grouped(Line(), args, train_dataset=Points(20))
        trained.group, trained.box = group, Box(state)
        return trained

    said = []
    for where, is_async in (("at-once", False), ("behind", True)):
        made(alone, where, {"mine": ranks.rank}, async_save=is_async).train()
        again = made(alone, where, {}, resume_from_checkpoint=True)
        again.train()
        said.append(again.box.state)
    refused = error_of(made(dist.group.WORLD, "refused", {"mine": ranks.rank}).train)
    names = sorted(each.name for each in (folder / "behind" / "checkpoint-4").glob("own*"))
    return said, names, refused


CASES = [
    two_ranks_save_behind_training,
    an_error_of_one_rank,
    a_sigterm_of_one_rank,
    groups_reach_the_coordinator,
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_cases(CASES, world=2, folder=tmp_path_factory.mktemp("saves"), imports=["torch._dynamo"])


def test_two_ranks_that_save_behind_training_resume_to_the_bit(said: Said) -> None:
    for first, *others in said["two_ranks_save_behind_training"]:
        assert len(others) == 1 + 3
        assert others == [first] * len(others)


def test_an_error_of_one_rank_behind_training_is_raised_on_both_at_the_same_step(said: Said) -> None:
    (text, step, left), other = said["an_error_of_one_rank"]
    assert other == (text, step, left)
    assert text.startswith("CheckpointSaveFailed: saving checkpoint-4: failed on rank 0: OSError: [Errno 28]")
    assert left == [2]


def test_a_sigterm_of_one_rank_saves_on_both(said: Said) -> None:
    assert said["a_sigterm_of_one_rank"] == [(("checkpoint-3", 143), True)] * 2


def test_a_trainers_process_groups_reach_its_checkpoints(said: Said) -> None:
    names = [f"own_state_group_copies_grank_0_rank_{rank}.pt" for rank in (0, 1)]
    for rank, (states, found, refused) in enumerate(said["groups_reach_the_coordinator"]):
        assert states == [{"mine": rank}] * 2
        assert found == names
        assert "own: sharing_pattern=PER_GROUP over 'copies'" in refused
