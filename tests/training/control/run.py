"""A run for tests of control: a loop that fires events and obeys its control, with nothing to train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skyward.training import CallbackHandler, Ranks, TrainerCallback, TrainerControl, TrainerState
from skyward.training.control import TrainerControlCallback

__all__ = ["Run", "run_in_thread"]


@dataclass(eq=False)
class Run:
    """One rank. `pause()` is called in each step, `logs` are added to each log, and `events` are (step, what) pairs."""

    callbacks: list[Any]
    pause: Callable[[], object] = lambda: None
    max_steps: int = 1_000_000
    log_every: int = 10
    logs: dict[str, float] = field(default_factory=dict)
    save_every: int = 0
    ranks: Ranks | None = None
    args: Any = field(
        default_factory=lambda: SimpleNamespace(save_strategy="steps", eval_strategy="no", output_dir="o")
    )
    events: list[tuple[int, str]] = field(default_factory=list)
    state: TrainerState = field(default_factory=TrainerState)

    def train(self) -> None:
        handler = CallbackHandler(self.callbacks, ranks=self.ranks)
        control, state = TrainerControl(), self.state
        state.max_steps = self.max_steps
        state.is_world_process_zero = handler.ranks.rank == 0

        def fire(event: str, **context: Any) -> None:
            handler.fire(event, args=self.args, state=state, control=control, **context)
            handler.agree(control)

        fire("on_train_begin")
        while state.global_step < self.max_steps and not control.should_training_stop:
            self.pause()
            state.global_step += 1
            state.epoch = state.global_step / 100
            control.should_save = bool(self.save_every) and state.global_step % self.save_every == 0
            control.should_evaluate = False
            fire("on_step_end")
            if state.global_step % self.log_every == 0:
                fire("on_log", logs={"loss": 1 / state.global_step, "tok_per_sec": 1000.0, **self.logs})
            if control.should_evaluate:
                self.events.append((state.global_step, "evaluate"))
                fire("on_evaluate", metrics={"eval_loss": 0.5})
            if control.should_save:
                self.events.append((state.global_step, "save"))
                fire("on_save")
        self.events.append((state.global_step, "aborted" if control.should_abort_without_save else "ended"))
        fire("on_train_end")


class Begun(TrainerCallback):
    """Callback that reports that the callbacks before it have begun."""

    def __init__(self) -> None:
        self.is_set = threading.Event()

    def on_train_begin(self, **_: Any) -> None:
        self.is_set.set()


@contextmanager
def run_in_thread(run: Run) -> Iterator[TrainerControlCallback]:
    """Start the run in a thread and return it once it listens. It is aborted at the end if it still runs."""
    (control,) = (each for each in run.callbacks if isinstance(each, TrainerControlCallback))
    failed: list[BaseException] = []
    begun = Begun()
    run.callbacks.append(begun)

    def train() -> None:
        try:
            run.train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        while not begun.is_set.wait(0.005) and thread.is_alive():
            pass
        yield control
    finally:
        run.max_steps = 0
        thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
