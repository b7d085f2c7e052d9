"""Callbacks that record the events they receive."""

from __future__ import annotations

from typing import Any

from skyward.training import EVENTS, TrainerCallback


class Recorder(TrainerCallback):
    """Callback that records every event with the run's position. `told` holds the events' arguments."""

    def __init__(self, *, only: tuple[str, ...] = EVENTS) -> None:
        self.events: list[tuple[str, int]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        for event in only:
            setattr(self, event, self._handler(event))

    def _handler(self, event: str) -> Any:
        def handler(state: Any, **told: Any) -> None:
            self.events.append((event, state.global_step))
            self.told.append((event, {"epoch": state.epoch, **told}))

        return handler

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [told for name, told in self.told if name == event]


class Asks(TrainerCallback):
    """Callback that sets flags of the control at one event of one step, in one rank or all."""

    def __init__(self, event: str, step: int, ask: str, *, rank: int | None = None) -> None:
        self.step, self.ask, self.rank = step, ask, rank
        setattr(self, event, self._at)

    def _at(self, state: Any, control: Any, ranks: Any, **_: Any) -> None:
        if state.global_step == self.step and self.rank in (None, ranks.rank):
            if self.ask in ("stop", "abort"):
                getattr(control, self.ask)()
            else:
                setattr(control, self.ask, True)


class Counts(TrainerCallback):
    """Stateful callback that counts."""

    def __init__(self) -> None:
        self.steps = 0
        self.loaded: dict[str, Any] | None = None

    def on_step_end(self, **_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        self.steps = state["steps"]


class Adds(TrainerCallback):
    """Callback that adds its own number to each log."""

    def on_log_step(self, state: Any, logs: dict[str, Any], **_: Any) -> None:
        logs["ours"] = 10.0 * state.global_step
