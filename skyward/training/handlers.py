"""Handlers of a callback: which events it handles, how each is called, and which methods are likely misspelled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from ..errors import UsageError
from .events import EVENTS

Handler = Callable[..., Any]

FIRST = ("args", "state", "control")
"""Arguments that Hugging Face's Trainer passes by position."""
PASSED = frozenset(
    (*FIRST, "ranks", "model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
) | {"trainer", "logs", "metrics", "checkpoint", "saved_step"}
"""Arguments that events pass by keyword."""
ELSEWHERE = {
    "on_train_start": "on_train_begin",
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_epoch_start": "on_epoch_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_batch_begin": "on_step_begin",
    "on_train_batch_begin": "on_step_begin",
    "on_train_batch_start": "on_step_begin",
    "on_batch_end": "on_step_end",
    "on_train_batch_end": "on_step_end",
    "on_test_end": "on_evaluate",
    "on_validation_end": "on_evaluate",
    "on_predict_end": "on_predict",
    "on_save_checkpoint": "on_save",
}
"""Our closest event to each event of Lightning and Keras."""
_FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "keras")


def has_handler(callback: object, event: str) -> bool:
    """Return whether a callback handles an event. The empty handlers of Hugging Face's base class do not count."""
    if event in getattr(callback, "__dict__", {}):
        return True
    for kind in type(callback).__mro__:
        if event in vars(kind):
            # Compared by name, because importing transformers takes seconds.
            return not (kind.__name__ == "TrainerCallback" and kind.__module__.startswith("transformers."))
    return False


def handlers_of(callback: object) -> dict[str, Handler]:
    """Return a callback's handlers by event. They take keywords only."""
    return {event: keyword_handler(callback, event) for event in EVENTS if has_handler(callback, event)}


def keyword_handler(callback: object, event: str) -> Handler:
    """Return a callback's handler of an event as a function that takes keywords only.

    Hugging Face's callbacks receive the first three arguments by position, whatever their parameters are called. So do
    handlers whose first three parameters have names that no event passes.
    """
    handler: Handler = getattr(callback, event)
    if _is_of_hugging_face(callback):

        def as_hugging_face(*, args: Any, state: Any, control: Any, ranks: Any, **context: Any) -> Any:
            return handler(args, state, control, **context)  # without `ranks`, which no handler there expects

        return as_hugging_face
    if not _is_positional(handler):
        return handler

    def positional(*, args: Any, state: Any, control: Any, **context: Any) -> Any:
        return handler(args, state, control, **context)

    return positional


def check_handlers(callback: object) -> None:
    """Check that every handler takes `**kwargs`, because each event passes more than one handler needs.

    Raises:
        UsageError: a handler does not. The check runs before training, and not at an event hours later.
    """
    for event in EVENTS if not _is_of_hugging_face(callback) else ():
        if not has_handler(callback, event):
            continue
        parameters = _parameters_of(getattr(callback, event))
        if parameters is not None and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            takes = ", ".join(parameter.name for parameter in parameters)
            raise UsageError(
                f"callbacks: {type(callback).__name__}.{event}({takes}): does not take all keywords of its event; add "
                "**kwargs to take the rest"
            )


def misnamed_handlers(callback: object) -> Iterator[tuple[str, str]]:
    """Yield methods that look like handlers but are not, each with the event that its author most likely meant."""
    for name in sorted({*dir(type(callback)), *getattr(callback, "__dict__", ())}):
        if not name.startswith("on") or name in EVENTS or _is_of_a_framework(callback, name):
            continue
        meant = ELSEWHERE.get(name) or next(iter(get_close_matches(name, EVENTS, 1, 0.75)), None)
        if meant is not None and callable(inspect.getattr_static(callback, name)):
            yield name, meant


def was_not_entered(error: BaseException, caller: str) -> bool:
    """Return whether a call failed because of its arguments, before the function began.

    Args:
        error: exception of the call.
        caller: name of the module that made the call.
    """
    # The innermost frame tells: a call that cannot bind its arguments has no frame of its own.
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if not isinstance(error, TypeError) or traceback is None:
        return False
    return traceback.tb_frame.f_globals.get("__name__") in (caller, __name__)


def _is_of_hugging_face(callback: object) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(callback).__mro__)


def _is_of_a_framework(callback: object, name: str) -> bool:
    """Return whether a method belongs to another framework's callback class, which a callback may also extend."""
    return any(name in vars(kind) and kind.__module__.split(".")[0] in _FRAMEWORKS for kind in type(callback).__mro__)


def _is_positional(handler: Handler) -> bool:
    parameters = _parameters_of(handler) or []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter for parameter in parameters if parameter.kind in by_place][: len(FIRST)]
    names = [parameter.name for parameter in first]
    if len(first) < len(FIRST) or any(parameter.default is not parameter.empty for parameter in first):
        return False
    if any(name in PASSED and name != place for name, place in zip(names, FIRST, strict=True)):
        return False
    return names != list(FIRST) or first[0].kind is by_place[0]


def _parameters_of(handler: Handler) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
