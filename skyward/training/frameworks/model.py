"""What every adapter needs: the framework's module, a class over one of its own, the user's model under its wrappers,
logs that JSON can hold, and a word about events that the framework does not have.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ...errors import MissingDependency
from ...signatures import checked_options
from ..bus import CallbackHandler, callback_name
from ..events import EVENTS

__all__ = ["class_at_first_use", "load_framework", "plain", "unwrapped", "warn_of_silence"]

_log = logging.getLogger(__name__)


def load_framework(module: str, *, extra: str) -> Any:
    """Raises: MissingDependency, with the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{module.partition('.')[0]} is not installed here ({error}); install it with "
            f"`pip install 'skyward[{extra}]'`",
            name=module,
        ) from error


def class_at_first_use(
    module: str, name: str, doc: str, bases: Callable[[], tuple[type, ...]], **body: Any
) -> Callable[[str], Any]:
    """Gives the `__getattr__` (PEP 562) of a module that has a class over one of a framework's.

    module: its `__name__`. bases: called when `name` is first asked for; imports the framework.
    """

    def get(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {module!r} has no attribute {asked!r}")
        made = checked_options(type(name, bases(), {"__doc__": doc, "__module__": module, **body}))
        setattr(sys.modules[module], name, made)  # found without us from now on
        return made

    return get


def unwrapped(model: Any) -> Any:
    """The user's model: without the wrappers of data parallelism (`.module`) and torch.compile (`._orig_mod`)."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None:
            return model
        model = inner


def plain(value: Any) -> Any:
    """A number in place of an array or tensor of one; everything else as it is."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        size = value.numel() if hasattr(value, "numel") else value.size
        return value.item() if size == 1 else value
    return value


def warn_of_silence(bus: CallbackHandler, silent: Mapping[str, str]) -> None:
    """Says which callbacks this framework never calls. silent: event -> why, and what to do.

    One that has other handlers, too, is taken to do with less.
    """
    for callback in bus:
        heard = {event for event in EVENTS if CallbackHandler([callback]).listens(event)}
        if heard and heard <= set(silent):
            why = "; ".join(dict.fromkeys(silent[event] for event in sorted(heard)))
            _log.warning("%s is never called here: no %s: %s", callback_name(callback), ", ".join(sorted(heard)), why)
