"""Callbacks whose handlers run in the background. No framework is imported here.

    Trainer(model, args, callbacks=[asynchronously(TBLogger(ResumableSummaryWriter("runs/1")))])

Each handler runs in one of two places.

In place, on the training thread, after all queued calls:

- `on_init_end`, `on_train_begin` and `on_train_end`;
- `on_log_step`, because it changes the logs;
- `collective_events`, because all ranks run them together;
- handlers with a parameter `model`, `optimizer`, `lr_scheduler`, `trainer`, `train_dataloader` or `eval_dataloader`,
  because training goes on changing these;
- events that `in_place=` names.

In the background: all others. They receive copies of `state`, `logs` and `metrics` as they were at the event. A handler
that changes or returns a control is an error, because the change would take effect at an arbitrary later step. So is a
handler that uses the model from its `**kwargs`.

An exception is raised on the training thread: at the end of the step, at the callback's next event, before a checkpoint
takes its state, or at the end of training, whichever comes first. The callback's `on_error` then decides, as if the
handler had raised in place. Calls queued behind it are dropped.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NoReturn

from ..errors import UsageError
from .bus import CallbackHandler, callback_name, callback_state_key
from .events import EVENTS, ErrorPolicy, Stateful, TrainerCallback
from .handler_queue import HandlerCall, HandlerQueue
from .handlers import handlers_of
from .nested import map_leaves

ENDS = frozenset({"on_init_end", "on_train_begin", "on_train_end"})
ANSWERS = frozenset({"on_log_step"})
LIVE = frozenset({"model", "optimizer", "lr_scheduler", "trainer", "train_dataloader", "eval_dataloader"})
"""Arguments of events that training goes on changing, or that belong to its thread."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def asynchronously(
    callback: object,
    *,
    max_pending: int = 1024,
    on_error: ErrorPolicy | None = None,
    in_place: Collection[str] = (),
    timeout_s: float = 600.0,
) -> Asynchronous:
    """Run the handlers of a callback on a background thread, in order.

    All queued events are handled before training ends, and before a checkpoint takes the callback's state. Handlers
    that need the live model, that change the logs, or that all ranks run together stay on the training thread.

    Args:
        callback: instance or class of `TrainerCallback`, or one of Hugging Face's. Nobody else may use it meanwhile.
        max_pending: events that may wait, at least 1. At this bound training waits; no event is dropped.
        on_error: "raise" or "disable"; None: the callback's own `on_error`.
        in_place: further events whose handlers run on the training thread.
        timeout_s: seconds that training waits for a handler where it must, above 0. After that the callback fails with
            TimeoutError, and its queued events are dropped.

    Returns:
        A callback to pass in place of `callback`. Its `beside` names the events that run in the background.

    Raises:
        UsageError: the object is not a callback, a value is out of range, or no handler could run in the background.

    Example:
        >>> from skyward.training import JsonLogger, asynchronously
        >>> asynchronously(JsonLogger()).beside
        ('on_log', 'on_evaluate')
    """
    made = callback() if isinstance(callback, type) else callback
    CallbackHandler([made])  # raises if it is not a callback
    if isinstance(made, Asynchronous):
        raise UsageError(
            f"asynchronously(): {callback_name(made.callback)} is already asynchronous; call asynchronously() once"
        )
    if max_pending < 1:
        raise UsageError(f"max_pending={max_pending}: must be a whole number >= 1; set max_pending=1024 (the default)")
    if on_error not in (None, "raise", "disable"):
        raise UsageError(f"on_error={on_error!r}: must be 'raise', 'disable' or None; set None for the callback's own")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s}: must be a number of seconds > 0; set timeout_s=600 (the default)")
    unknown = sorted(set(in_place) - set(EVENTS))
    if unknown:
        raise UsageError(f"in_place={in_place!r}: no event {unknown[0]!r} exists; use some of {', '.join(EVENTS)}")
    return Asynchronous(made, max_pending=max_pending, on_error=on_error, in_place=tuple(in_place), timeout_s=timeout_s)


class Asynchronous(TrainerCallback):
    """Callback that `asynchronously` returns. Its events come from one thread."""

    def __init__(
        self,
        callback: object,
        *,
        max_pending: int,
        on_error: ErrorPolicy | None,
        in_place: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self.callback = callback
        self._chosen = {
            "max_pending": max_pending,
            "on_error": on_error,
            "in_place": in_place,
            "timeout_s": timeout_s,
        }
        own: ErrorPolicy = getattr(callback, "on_error", "raise")
        self.on_error = on_error or own
        self.runs_on = getattr(callback, "runs_on", "every_rank")
        self.collective_events = frozenset(getattr(callback, "collective_events", ()))
        self._queue = HandlerQueue(callback_name(callback), max_pending, timeout_s)
        self._is_over = False
        handlers = handlers_of(callback)
        rules = {event: self._why_in_place(event, handler, in_place) for event, handler in handlers.items()}
        self.beside = tuple(event for event, why in rules.items() if not why)
        """Events whose handlers run in the background."""
        if not self.beside:
            why = ", ".join(f"{event} {why}" for event, why in rules.items()) or "it has no handlers"
            raise UsageError(
                f"asynchronously({callback_name(callback)}): no handler can run in the background ({why}); pass the "
                "callback without asynchronously()"
            )
        # Instance attributes: the bus looks for handlers there too, and each callback has its own events.
        for event, handler in handlers.items():
            call = self._queued if event in self.beside else self._at_once
            self.__dict__[event] = partial(call, event, handler)
        self.__dict__.setdefault("on_step_end", self._surface)
        self.__dict__.setdefault("on_train_end", partial(self._at_once, "on_train_end", lambda **_: None))
        if isinstance(callback, Stateful):
            self.__dict__["state_dict"] = self._state_dict
            self.__dict__["load_state_dict"] = callback.load_state_dict

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.callback, self._chosen)

    def __repr__(self) -> str:
        return f"asynchronously({self.callback!r})"

    @property
    def name(self) -> str:
        return callback_name(self.callback)

    @property
    def state_key(self) -> str:
        """The callback's own key, so that a checkpoint does not depend on where handlers ran."""
        return callback_state_key(self.callback)

    @property
    def pending(self) -> int:
        """Number of events that have not been handled yet."""
        return self._queue.pending

    def drain(self) -> None:
        """Wait until all events are handled.

        Raises:
            Exception: a handler raised it.
            TimeoutError: a handler took longer than `timeout_s`.
        """
        self._queue.drain()
        self._surface()

    def close(self) -> None:
        """Handle all queued events and close the callback, after a run that raised too. Idempotent."""
        self._queue.finish()
        try:
            self._surface()
        finally:
            close = getattr(self.callback, "close", None)
            if callable(close):
                close()

    # Within ----------------------------------------------------------------------------------------------------------

    def _why_in_place(self, event: str, handler: Callable[..., Any], in_place: tuple[str, ...]) -> str:
        if event in ENDS:
            return "begins or ends the run"
        if event in in_place:
            return "is named by in_place="
        if event in ANSWERS:
            return "changes the logs"
        if event in self.collective_events:
            return "is collective"
        named = sorted(LIVE & set(inspect.signature(getattr(self.callback, event, handler)).parameters))
        return f"takes {', '.join(named)}" if named else ""

    def _queued(self, event: str, handler: Callable[..., Any], **context: Any) -> None:
        self._surface()
        if self._is_over:
            return
        frozen = _event_as_it_is(context)
        step = getattr(frozen.get("state"), "global_step", None)
        where = f"{self.name}.{event}" if step is None else f"{self.name}.{event} of step {step}"
        self._queue.put(HandlerCall(where=where, handler=handler, context=frozen))

    def _at_once(self, event: str, handler: Callable[..., Any], **context: Any) -> Any:
        if event == "on_train_begin":
            self._is_over = False
        if self._is_over:
            return None
        if event == "on_train_end":
            self._queue.finish()
        self.drain()
        return handler(**context)

    def _surface(self, **_: Any) -> None:
        error = self._queue.take_error()
        if error is not None:
            self._is_over = True
            raise error

    def _state_dict(self) -> dict[str, Any]:
        self._queue.drain()
        if self.on_error == "raise":
            self._surface()
        state: dict[str, Any] = self.callback.state_dict()  # type: ignore[attr-defined]
        return state


def _again(callback: object, chosen: Mapping[str, Any]) -> Asynchronous:
    return Asynchronous(callback, **chosen)


def _event_as_it_is(context: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments of an event; replace those of the training thread by objects that raise when used."""
    frozen: dict[str, Any] = {}
    for name, value in context.items():
        if name in LIVE:
            frozen[name] = None if value is None else _Elsewhere(name)
        elif name == "state":
            frozen[name] = _state(value)
        elif name == "control":
            frozen[name] = copy.copy(value)
        elif name == "ranks":
            frozen[name] = value if value.world_size == 1 else _Rank(value)
        elif isinstance(value, dict | list | tuple):
            frozen[name] = map_leaves(value, _copied)
        else:
            frozen[name] = value
    return frozen


def _state(state: Any) -> Any:
    if state is None:
        return None
    frozen = copy.copy(state)
    for name, value in vars(frozen).items():
        if name == "log_history" and value:
            # The history is long and only its last record still changes, so a deep copy for each event is not needed.
            setattr(frozen, name, [*value[:-1], dict(value[-1])])
        elif isinstance(value, dict | list):
            setattr(frozen, name, map_leaves(value, _copied))
    return frozen


def _copied(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    # deepcopy raises for a tensor that is part of an autograd graph.
    is_tensor = callable(getattr(value, "detach", None)) and callable(getattr(value, "clone", None))
    return value.detach().clone() if is_tensor else copy.deepcopy(value)


class _Elsewhere:
    """Placeholder of an object that only the training thread may use."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name} of the training thread>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{self._name}: used in the background while training changes it; declare {self._name} as a parameter of "
            "the handler, which then runs in place"
        )


class _Rank:
    """Numbers of this rank, without the exchanges, which must run on the training thread."""

    def __init__(self, ranks: Any) -> None:
        self.rank, self.world_size, self.local_rank = ranks.rank, ranks.world_size, ranks.local_rank

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"ranks.{name}: used in the background, where the other ranks do not take part; add the event to the "
            "callback's collective_events, and its handler runs in place"
        )
