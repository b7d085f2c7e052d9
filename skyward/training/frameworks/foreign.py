"""Access to another framework: its modules, objects that it does not pass to callbacks, and their attributes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from ...errors import MissingDependency
from ..bus import CallbackHandler, callback_name
from ..events import EVENTS

_log = logging.getLogger(__name__)

STACK_DEPTH = 16
"""Frames to search. A framework's loop is a few frames above its callbacks."""


def load_framework(module: str, *, extra: str) -> Any:
    """Import a framework's module.

    Raises:
        MissingDependency: the framework is not installed; the message names the extra to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{module.partition('.')[0]}: not installed in this environment ({error}); run "
            f"`pip install 'skyward[{extra}]'`",
            name=module,
        ) from error


def on_the_stack(kind: type) -> Any:
    """Return the nearest caller's `self` of a class; None if there is none. Call it only when a run begins."""
    # Hugging Face and Keras pass callbacks neither their trainer nor the list of callbacks. Ours must move to another
    # place in that list, or pass results on to the others. Both objects are the `self` of methods on the stack.
    # Rejected: an argument that every user must pass after the trainer is made, a patch of the framework's class for
    # the whole process, and gc.get_referrers.
    frame = sys._getframe(1)
    for _ in range(STACK_DEPTH):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def put(undo: ExitStack, owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of one object until `undo` closes. Return its previous value."""
    before, own = getattr(owner, name), vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
    return before


def plain(value: Any) -> Any:
    """Convert an array or tensor of one element to a number; return anything else unchanged."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        size = value.numel() if hasattr(value, "numel") else value.size
        return value.item() if size == 1 else value
    return value


def named(metrics: Mapping[str, Any], prefix: str, *, instead_of: Sequence[str] = ()) -> dict[str, Any]:
    """Return metrics as numbers, with names that begin with `prefix`, which replaces any prefix in `instead_of`."""
    numbers = {}
    for name, value in metrics.items():
        theirs = prefix if name.startswith(prefix) else next(filter(name.startswith, instead_of), "")
        numbers[prefix + name.removeprefix(theirs)] = plain(value)
    return numbers


def warn_of_silence(bus: CallbackHandler, silent: Mapping[str, str]) -> None:
    """Warn of callbacks that handle only events which this framework does not have.

    A callback that handles other events too presumably works without the missing ones.

    Args:
        bus: the callbacks.
        silent: for each missing event, the reason and an alternative.
    """
    for callback in bus:
        handled = {event for event in EVENTS if CallbackHandler([callback]).listens(event)}
        if handled and handled <= set(silent):
            why = "; ".join(dict.fromkeys(silent[event] for event in sorted(handled)))
            events = ", ".join(sorted(handled))
            _log.warning("%s is never called here: no %s: %s", callback_name(callback), events, why)
