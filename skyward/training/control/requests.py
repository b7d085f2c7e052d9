"""Flags of `TrainerControl` that carry out a command, for every framework's control."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


def request(command: str, args: Any, control: Any) -> None:
    """Set the flags of a command other than abort; see `COMMANDS`."""
    saves = command != "graceful_stop" or _strategy(args, "save_strategy") != "no"
    if saves:
        control.should_save = True
        if getattr(args, "load_best_model_at_end", False) and _strategy(args, "eval_strategy") != "no":
            control.should_evaluate = True  # the best checkpoint is chosen among evaluated ones
    if command != "save_checkpoint":
        control.should_training_stop = True


def request_abort(control: Any) -> None:
    """Set the flags of an abort. Call it again at later events, because a schedule may request a save there."""
    control.should_training_stop = True
    control.should_save = control.should_evaluate = False
    if hasattr(control, "should_abort_without_save"):
        control.should_abort_without_save = True
    else:
        _log.warning(
            "abort: this trainer cannot skip its work at the end of training; only the saves until then are skipped"
        )


def _strategy(args: Any, name: str) -> str:
    """Return a strategy's name; Hugging Face uses enumerations. An unknown strategy does not prevent a save."""
    value = getattr(args, name, None)
    return str(getattr(value, "value", value))
