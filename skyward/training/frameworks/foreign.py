"""Access to another framework: its modules, the objects that it does not hand out, and attributes of its objects."""

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

__all__ = ["load_framework", "named", "on_the_stack", "plain", "put", "warn_of_silence"]

_log = logging.getLogger(__name__)

STACK_DEPTH = 16
"""How many frames are looked at. A framework's loop stands a few above its callbacks."""


def load_framework(module: str, *, extra: str) -> Any:
    """Import a framework's module. Raises: MissingDependency, with the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{module.partition('.')[0]} is not installed here ({error}); install it with "
            f"`pip install 'skyward[{extra}]'`",
            name=module,
        ) from error


def on_the_stack(kind: type) -> Any:
    """Find the nearest caller's `self` of this class; None where there is none.

    Hugging Face and Keras call a callback with neither their trainer nor the list of the other callbacks, which ours
    must change their place in, or pass results on to. Both objects are the `self` of methods that are running at that
    moment. The alternatives are worse: an argument that every user would have to pass after the trainer is made, a
    patch of the framework's class for the whole process, or `gc.get_referrers`. Look here when a run begins only.
    """
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
    """Set an attribute of one object until `undo` closes. Returns the value that it had."""
    before, own = getattr(owner, name), vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
    return before


def plain(value: Any) -> Any:
    """Return a number in place of an array or tensor of one element, and everything else as it is."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        size = value.numel() if hasattr(value, "numel") else value.size
        return value.item() if size == 1 else value
    return value


def named(metrics: Mapping[str, Any], prefix: str, *, instead_of: Sequence[str] = ()) -> dict[str, Any]:
    """Return metrics as numbers, with names that begin with `prefix`, which takes the place of any of `instead_of`."""
    numbers = {}
    for name, value in metrics.items():
        theirs = prefix if name.startswith(prefix) else next(filter(name.startswith, instead_of), "")
        numbers[prefix + name.removeprefix(theirs)] = plain(value)
    return numbers


def warn_of_silence(bus: CallbackHandler, silent: Mapping[str, str]) -> None:
    """Warn of callbacks that this framework never calls. silent: event -> why, and what to do.

    A callback with further handlers is taken to work without the missing events.
    """
    for callback in bus:
        heard = {event for event in EVENTS if CallbackHandler([callback]).listens(event)}
        if heard and heard <= set(silent):
            why = "; ".join(dict.fromkeys(silent[event] for event in sorted(heard)))
            _log.warning("%s is never called here: no %s: %s", callback_name(callback), ", ".join(sorted(heard)), why)
