"""Commands from the hub (save, stop, abort) on their way through a training, until they are acknowledged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...calls.control import CommandState
from ...training.control.commands import ControlledRun
from ...training.control.requests import request, request_abort
from .sender import RunCommand

_log = logging.getLogger(__name__)

_COMMANDS = {"save": "save_checkpoint", "stop": "graceful_stop", "abort": "abort"}


class RunOrders:
    """Commands of one run. The sender's thread adds them, and training applies them at the end of a step.

    Args:
        run_id: id of the run.
        acknowledge: reports a command's outcome to the hub.
    """

    def __init__(self, run_id: str, acknowledge: Callable[[int, str], None]) -> None:
        self.controlled = ControlledRun(run_id)
        self.is_aborting = False
        self._acknowledge = acknowledge
        self._known: dict[int, str] = {}
        self._open: set[int] = set()
        self._lock = threading.Lock()

    # In the sender's thread -------------------------------------------------------------------------------------------

    def take(self, commands: Sequence[RunCommand]) -> None:
        """Add commands. The hub repeats one until it is acknowledged."""
        for command in commands:
            with self._lock:
                if command.number in self._known:
                    continue
                self._known[command.number] = command.action
            action = _COMMANDS.get(command.action)
            if action is None:
                self._acknowledge(command.number, f"failed: {command.action!r} is unknown to this run")
                continue
            try:
                self.controlled.submit(action, f"hub-{command.number}")
            except RuntimeError as error:
                self._acknowledge(command.number, f"failed: {error}")
                continue
            with self._lock:
                self._open.add(command.number)

    # In the training thread -------------------------------------------------------------------------------------------

    def apply(self, step: int, args: Any, control: Any) -> None:
        """Set the flags of new commands at the end of a step."""
        if self.controlled.has_new:
            for command in self.controlled.take(step).commands:
                _log.info("hub: applied %s at step %d", command, step)
                if command == "abort":
                    self.is_aborting = True
                else:
                    request(command, args, control)
            if self.is_aborting:
                request_abort(control)
            self._report()

    def keep_aborting(self, control: Any) -> None:
        """Suppress later requests for a save or an evaluation after an abort."""
        if self.is_aborting:
            control.should_save = control.should_evaluate = False
            control.should_training_stop = True

    def saved(self, step: int) -> None:
        """Note that the checkpoint of a step is durable."""
        self.controlled.saved(step)
        self._report()

    def ended(self) -> None:
        """Note the end of the run."""
        self.controlled.ended()
        self._report()

    def _report(self) -> None:
        with self._lock:
            waiting = sorted(self._open)
        for number in waiting:
            state = self.controlled.command(f"hub-{number}")
            result = _result_of(state)
            if result is not None:
                with self._lock:
                    self._open.discard(number)
                self._acknowledge(number, result)


def _result_of(state: CommandState | None) -> str | None:
    if state is None or state.state == "waiting":
        return None
    if state.state == "failed":
        return f"failed: {state.detail}"
    if state.command == "save_checkpoint":
        return f"saved at step {state.step}" if state.state == "executed" else None
    # The end of the run follows by itself, perhaps after a long save.
    return f"{'aborting' if state.command == 'abort' else 'stopping'} at step {state.step}"
