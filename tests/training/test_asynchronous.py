"""Callbacks beside training: they run in order, with the values of the event, and report their errors."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training import Alone, JsonLogger, TrainerCallback, asynchronously
from tests.training.producer import Producer
from tests.waiting import until


class Slow(TrainerCallback):
    """Callback that handles a log when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.seen: list[Any] = []
        self.threads: set[str] = set()

    def on_log(self, state: Any, logs: Any, **context: Any) -> None:
        assert self.go.wait(60)
        self.threads.add(threading.current_thread().name)
        self.seen.append((state.global_step, dict(logs), len(state.log_history)))

    def on_train_end(self, state: Any, **context: Any) -> None:
        self.seen.append("end")


class Fails(TrainerCallback):
    def __init__(self, at: int = 2) -> None:
        self.at, self.handled = at, 0

    def on_log(self, state: Any, **context: Any) -> None:
        self.handled += 1
        if state.global_step == self.at:
            raise OSError("the disk is full")


def threads_of_callbacks() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("callback ")]


def test_training_goes_on_while_a_handler_runs_and_order_is_kept() -> None:
    slow = Slow()
    run = Producer([wrapped := asynchronously(slow)])
    run.begin()
    for at in range(5):
        run.step(loss=float(at))  # none of these waits
    assert (slow.seen, wrapped.pending) == ([], 5)
    slow.go.set()
    run.end()
    assert [each[0] for each in slow.seen[:-1]] == [1, 2, 3, 4, 5, 5]
    assert [each[1]["loss"] for each in slow.seen[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert slow.seen[-1] == "end"
    assert slow.threads == {"callback Slow"}
    assert threads_of_callbacks() == []


def test_handlers_see_state_logs_and_arrays_of_the_event() -> None:
    import numpy as np
    import torch

    class Keeps(TrainerCallback):
        def __init__(self) -> None:
            self.go = threading.Event()
            self.kept: Any = None

        def on_log(self, state: Any, logs: Any, **context: Any) -> None:
            assert self.go.wait(60)
            self.kept = self.kept or (state, logs)

    keeps = Keeps()
    run = Producer([asynchronously(keeps)])
    run.begin()
    norms, graph = np.zeros(3), torch.ones(2, requires_grad=True) * 2
    logs: dict[str, Any] = {"norms": norms, "deep": {"list": [1]}, "tensor": graph}
    run.step(**logs)
    norms += 1
    logs["deep"]["list"].append(2)
    with torch.no_grad():
        graph.zero_()
    run.state.log_history[-1]["late"] = True
    run.step(loss=2.0)
    keeps.go.set()
    run.end()
    assert keeps.kept is not None
    state, seen = keeps.kept
    assert (state.global_step, len(state.log_history), "late" in state.log_history[0]) == (1, 1, False)
    assert seen["norms"].tolist() == [0, 0, 0]
    assert seen["deep"] == {"list": [1]}
    assert seen["tensor"].tolist() == [2, 2]


def test_a_log_file_equals_that_of_a_callback_in_place(tmp_path: Path) -> None:
    records = []
    for name, wrap in (("beside", asynchronously), ("in place", lambda each: each)):
        run = Producer([wrap(JsonLogger())], tmp_path / name)
        run.begin()
        for at in range(20):
            run.step(loss=1 / (at + 1))
        run.evaluate(eval_loss=0.5)
        run.end()
        found = json.loads((tmp_path / name / "trainer_logs.json").read_text())
        records.append([{key: value for key, value in each.items() if key != "timestamp"} for each in found])
    assert len(records[0]) == 22
    assert records[0] == records[1]


def test_a_checkpoint_waits_for_earlier_events_and_resumes_like_the_callback(tmp_path: Path) -> None:
    run = Producer([asynchronously(JsonLogger())], tmp_path)
    run.begin()
    for at in range(4):
        run.step(loss=float(at))
    checkpoint = run.save()
    run.step(loss=4.0)
    run.step(loss=5.0)
    assert checkpoint["callbacks"].keys() == {"JsonLogger"}
    assert checkpoint["callbacks"]["JsonLogger"]["last_step"] == 4
    run.handler.close()

    again = Producer([JsonLogger()], tmp_path)  # in place, this time
    again.resume(checkpoint)
    again.begin()
    again.step(loss=9.0)
    again.end()
    found = json.loads((tmp_path / "trainer_logs.json").read_text())
    assert [each["global_step"] for each in found] == [1, 2, 3, 4, 5, 5]
    assert found[4]["loss"] == 9.0


def test_in_our_trainer_a_resumed_run_has_the_records_of_one_in_place(tmp_path: Path) -> None:
    import torch

    from skyward.training import Trainer, TrainingArguments

    x = torch.linspace(-1, 1, 16)[:, None]

    def train(name: str, callback: Any, steps: int, resume: bool = False) -> None:
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=str(tmp_path / name),
            logging_dir=str(tmp_path / name),
            max_steps=steps,
            logging_steps=2,
            save_steps=4,
            lr_scheduler_type="constant",  # one that does not depend on max_steps
            disable_tqdm=True,
        )
        made = Trainer(
            torch.nn.Linear(1, 1),
            args,
            train_dataset=torch.utils.data.TensorDataset(x, 2 * x),
            compute_loss_func=torch.nn.functional.mse_loss,
            callbacks=[callback],
        )
        made.train(resume_from_checkpoint=resume)

    def records(name: str) -> list[Any]:
        found = json.loads((tmp_path / name / "trainer_logs.json").read_text())
        return [(each["global_step"], each["loss"]) for each in found if "loss" in each]

    train("in place", JsonLogger(), 12)
    train("beside", asynchronously(JsonLogger()), 8)
    train("beside", asynchronously(JsonLogger()), 12, resume=True)
    assert [step for step, _ in records("beside")] == [2, 4, 6, 8, 10, 12]
    assert records("beside") == records("in place")
    assert threads_of_callbacks() == []


def test_an_error_ends_the_run_at_the_end_of_a_step() -> None:
    run = Producer([wrapped := asynchronously(fails := Fails(at=2))])
    run.begin()
    run.step(loss=1.0)
    run.step(loss=1.0)
    until(lambda: wrapped.pending == 0)
    with pytest.raises(OSError, match="the disk is full") as raised:
        run.step()  # which logs nothing
    assert any("raised in the background, in Fails.on_log of step 2" in note for note in raised.value.__notes__)
    run.step(loss=1.0)  # a producer that went on all the same
    run.handler.close()
    assert fails.handled == 2
    assert threads_of_callbacks() == []


def test_an_ignorable_error_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Producer([wrapped := asynchronously(fails := Fails(at=1), on_error="disable")])
    run.begin()
    run.step(loss=1.0)
    until(lambda: wrapped.pending == 0)
    for _ in range(3):
        run.step(loss=1.0)
    run.end()
    assert fails.handled == 1
    assert [each.getMessage() for each in caplog.records] == [
        "Fails.on_step_end failed; the callback is disabled from now on"
    ]


@pytest.mark.parametrize("policy", ["raise", "disable"])
def test_an_error_before_a_checkpoint_follows_the_policy(policy: Any) -> None:
    class Kept(Fails):
        def state_dict(self) -> dict[str, Any]:
            return {"handled": self.handled}

        def load_state_dict(self, state_dict: Any, /) -> None:
            self.handled = state_dict["handled"]

    run = Producer([asynchronously(Kept(at=1), on_error=policy)])
    run.begin()
    run.step(loss=1.0)
    if policy == "raise":
        with pytest.raises(OSError, match="the disk is full"):
            run.save()
    else:
        assert run.save()["callbacks"] == {f"{Kept.__qualname__}": {"handled": 1}}
    run.handler.close()


def test_an_error_at_the_very_end_is_raised_there() -> None:
    run = Producer([asynchronously(Fails(at=1))])
    run.begin()
    run.state.global_step = 1
    with pytest.raises(OSError, match="the disk is full"):
        run.end()
    run.handler.close()


class OneOfTwo(Alone):
    """Rank 0 of two, of which the other has nothing to say."""

    def flags(self, bits: int) -> int:
        return bits

    def exchange(self, value: Any) -> list[Any]:
        return [value, (None,)]


def test_among_ranks_an_error_is_kept_until_they_agree() -> None:
    seen: list[Any] = []

    class Fails2(TrainerCallback):
        def on_log(self, ranks: Any, **context: Any) -> None:
            seen.append((ranks.rank, ranks.world_size))
            ranks.exchange(1)

    run = Producer([wrapped := asynchronously(Fails2())], ranks=OneOfTwo(world_size=2))
    run.begin()
    run.step(loss=1.0)
    until(lambda: wrapped.pending == 0)
    run.step()
    with pytest.raises(UsageError, match=r"ranks\.exchange: used in the background"):
        run.handler.agree(run.control)
    assert seen == [(0, 2)]
    run.handler.close()


def test_callbacks_that_change_the_run_or_read_the_model_run_in_place() -> None:
    told: list[tuple[str, bool]] = []

    class Mixed(TrainerCallback):
        collective_events = frozenset({"on_evaluate"})

        def tell(self, event: str) -> None:
            told.append((event, threading.current_thread() is threading.main_thread()))

        def on_train_begin(self, model: Any, **context: Any) -> None:
            self.tell("on_train_begin")

        def on_log_step(self, logs: Any, **context: Any) -> None:
            logs["added"] = 1
            self.tell("on_log_step")

        def on_log(self, logs: Any, **context: Any) -> None:
            assert logs["added"] == 1
            self.tell("on_log")

        def on_step_begin(self, control: Any, **context: Any) -> None:
            self.tell("on_step_begin")

        def on_step_end(self, model: Any, **context: Any) -> None:
            assert model == "the model"
            self.tell("on_step_end")

        def on_evaluate(self, **context: Any) -> None:
            self.tell("on_evaluate")

    wrapped = asynchronously(Mixed(), in_place=("on_step_begin",))
    assert wrapped.beside == ("on_log",)
    assert wrapped.collective_events == {"on_evaluate"}
    run = Producer([wrapped], context={"model": "the model"})
    run.begin()
    logs = run.step(loss=1.0)
    run.evaluate(eval_loss=1.0)
    run.end()
    assert logs == {"loss": 1.0, "added": 1}
    assert told == [
        *(("on_train_begin", True), ("on_step_begin", True), ("on_step_end", True)),
        *(("on_log_step", True), ("on_log", False), ("on_evaluate", True), ("on_log_step", True), ("on_log", False)),
    ]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda control, **_: control.stop(), r"on_log of step 1: changes control, .* in_place=\('on_log',\)"),
        (lambda **_: object(), "on_log of step 1: returns an answer"),
        (lambda **context: context["model"].parameters(), "model: used in the background .* declare model as a param"),
        (lambda control, **_: control, None),
    ],
)
def test_an_answer_or_a_read_of_the_model_beside_training_is_an_error(handler: Any, message: str | None) -> None:
    class Asks(TrainerCallback):
        def on_log(self, **context: Any) -> Any:
            return handler(**context)

    run = Producer([wrapped := asynchronously(Asks())], context={"model": object()})
    run.begin()
    run.step(loss=1.0)
    until(lambda: wrapped.pending == 0)
    if message is None:
        run.end()
        return
    with pytest.raises(UsageError, match=message):
        run.step()
    assert not run.control.should_training_stop
    run.handler.close()


def test_at_the_limit_training_waits_and_nothing_is_dropped() -> None:
    slow = Slow()
    run = Producer([wrapped := asynchronously(slow, max_pending=2)])
    run.begin()
    for _ in range(3):  # one runs, two wait
        run.step(loss=1.0)
    until(lambda: wrapped.pending == 3)
    threading.Timer(0.1, slow.go.set).start()
    run.step(loss=1.0)
    assert len(slow.seen) >= 1
    run.end()
    assert [each[0] for each in slow.seen[:-1]] == [1, 2, 3, 4, 4]


def test_a_handler_that_never_ends_does_not_hang_the_run() -> None:
    slow = Slow()
    run = Producer([asynchronously(slow, timeout_s=0.2)])
    run.begin()
    run.step(loss=1.0)
    with pytest.raises(TimeoutError, match=r"Slow\.on_log of step 1: still running .* timeout_s=0\.2, "):
        run.fire("on_train_end")
    run.handler.close()
    slow.go.set()
    until(lambda: threads_of_callbacks() == [])


def test_a_run_that_is_never_closed_leaves_no_thread_for_long() -> None:
    slow = Slow()
    slow.go.set()
    run = Producer([asynchronously(slow)])
    run.begin()
    run.step(loss=1.0)
    until(lambda: len(slow.seen) == 1)
    until(lambda: threads_of_callbacks() == [])
    run.step(loss=1.0)
    until(lambda: len(slow.seen) == 2)
    run.end()
    gc.collect()


def test_a_process_that_ends_writes_all_reported_events() -> None:
    code = """
import time
from skyward.training import TrainerCallback, asynchronously
from tests.training.producer import Producer
class Says(TrainerCallback):
    def on_log(self, state, **_):
        time.sleep(0.05)
        print(state.global_step, flush=True)
run = Producer([asynchronously(Says)])
run.begin()
for _ in range(4):
    run.step(loss=1.0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["1", "2", "3", "4"], "")


def test_it_can_be_sent_to_the_training_process() -> None:
    again = pickle.loads(pickle.dumps(asynchronously(JsonLogger(), max_pending=7)))
    assert (again.name, again.state_key, again.runs_on, again.on_error) == (
        *("JsonLogger", "JsonLogger", "rank_zero", "disable"),
    )
    _, (_, options) = again.__reduce__()
    assert options["max_pending"] == 7


def test_hugging_faces_own_callbacks_are_called_like_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face passes arguments by position, and a handler that the base class leaves empty does not count."""
    base = type(
        "TrainerCallback", (), {"on_save": lambda *_, **__: None, "__module__": "transformers.trainer_callback"}
    )
    seen: list[Any] = []

    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        seen.append((state.global_step, logs))

    theirs = type("Theirs", (base,), {"on_log": on_log})
    wrapped = asynchronously(theirs())
    assert wrapped.beside == ("on_log",)
    run = Producer([wrapped])
    run.begin()
    run.step(loss=1.0)
    run.end()
    assert seen[0] == (1, {"loss": 1.0})


class Decides(TrainerCallback):
    collective_events = frozenset({"on_log"})

    def on_log(self, **context: Any) -> None: ...

    def on_epoch_end(self, model: Any, **context: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: asynchronously(Decides()),
            "Decides.*in the background .on_epoch_end takes model, on_log is collective",
        ),
        (lambda: asynchronously(object()), "handles no event"),
        (lambda: asynchronously(asynchronously(Fails())), "Fails is already asynchronous"),
        (lambda: asynchronously(Fails(), max_pending=0), r"max_pending=0: must be a whole number >= 1"),
        (lambda: asynchronously(Fails(), timeout_s=0), r"timeout_s=0: must be a number of seconds > 0"),
        (lambda: asynchronously(Fails(), on_error="no"), r"on_error='no': must be"),  # type: ignore[arg-type]
        (lambda: asynchronously(Fails(), in_place=("on_logs",)), r"in_place=\('on_logs',\): no event 'on_logs' exists"),
    ],
)
def test_impossible_combinations_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
