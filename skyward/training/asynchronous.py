"""`asynchronously(callback)`: a callback whose handlers run beside training, in order. No framework is imported here.

    Trainer(model, args, callbacks=[asynchronously(TBLogger(ResumableSummaryWriter("runs/1")))])

Which handlers run where:

- *In place*, on the training thread, after all that is queued: those of `on_init_end`, `on_train_begin` and
  `on_train_end`; of `on_log_step`, whose answer is what it adds to the logs; of `collective_events`, which all ranks
  run together; those that name one of `model`, `optimizer`, `lr_scheduler`, `trainer`, `train_dataloader` or
  `eval_dataloader` as a parameter, for these change while training goes on; and those that `in_place=` names.
- *Beside training*: all others. They get copies of `state`, `logs` and `metrics` as they were at the event. An answer
  would come at a step that nobody can tell, so a handler that changes `control`, or returns one, is an error there, and
  so is one that uses the model out of its `**kwargs`.

An error is raised on the training thread when the step ends, at the callback's next event, before a checkpoint takes
its state, or when training ends, whichever comes first; from there on `on_error` of the callback decides, as if it had
been raised in place. What was queued behind it is dropped.
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

__all__ = ["Asynchronous", "asynchronously"]

ENDS = frozenset({"on_init_end", "on_train_begin", "on_train_end"})
ANSWERS = frozenset({"on_log_step"})
LIVE = frozenset({"model", "optimizer", "lr_scheduler", "trainer", "train_dataloader", "eval_dataloader"})
"""What an event gives that training goes on changing, or that belongs to its thread."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def asynchronously(
    callback: object,
    *,
    max_pending: int = 1024,
    on_error: ErrorPolicy | None = None,
    in_place: Collection[str] = (),
    timeout_s: float = 600.0,
) -> Asynchronous:
    """Gives a callback that runs the handlers of `callback` on a thread of its own, one after another.

    Everything has been handled when training ends, and before a checkpoint asks for the callback's state.

    callback: a `TrainerCallback`, a class of one, or one of Hugging Face's. To be used by nobody else meanwhile.
    max_pending: events that may wait, at least 1; at the bound training waits for the oldest, none is dropped.
    on_error: "raise" or "disable"; None: the callback's own.
    in_place: events whose handlers run on the training thread all the same.
    timeout_s: seconds that training waits for a handler, where it has to; then TimeoutError is raised like an error of
        the callback's, and what was queued is dropped.

    Raises: UsageError for what is no callback, for illegal values, and where no handler could run beside training.

    Example:
        >>> from skyward.training import JsonLogger, asynchronously
        >>> asynchronously(JsonLogger()).beside
        ('on_log', 'on_evaluate')
    """
    made = callback() if isinstance(callback, type) else callback
    CallbackHandler([made])  # says what is wrong with it
    if isinstance(made, Asynchronous):
        raise UsageError(f"asynchronously: {callback_name(made.callback)} is asynchronous already")
    if max_pending < 1:
        raise UsageError(f"asynchronously(max_pending={max_pending}): must be at least 1")
    if on_error not in (None, "raise", "disable"):
        raise UsageError(
            f"asynchronously(on_error={on_error!r}): must be 'raise', 'disable' or None, the callback's own"
        )
    if not timeout_s > 0:
        raise UsageError(f"asynchronously(timeout_s={timeout_s}): must be above 0, seconds")
    unknown = sorted(set(in_place) - set(EVENTS))
    if unknown:
        raise UsageError(f"asynchronously(in_place={unknown}): there is no such event; they are {', '.join(EVENTS)}")
    return Asynchronous(made, max_pending=max_pending, on_error=on_error, in_place=tuple(in_place), timeout_s=timeout_s)


class Asynchronous(TrainerCallback):
    """What `asynchronously` gives. Its events come from one thread."""

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
        """Events that are handled beside training."""
        if not self.beside:
            why = "; ".join(f"{event} {why}" for event, why in rules.items()) or "it has no handlers"
            raise UsageError(f"asynchronously({callback_name(callback)}): nothing could run beside training: {why}")
        for event, handler in handlers.items():
            told = self._queued if event in self.beside else self._at_once
            self.__dict__[event] = partial(told, event, handler)
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
        """The callback's own: a checkpoint does not know where handlers ran."""
        return callback_state_key(self.callback)

    @property
    def pending(self) -> int:
        """Events that have not been handled yet."""
        return self._queue.pending

    def drain(self) -> None:
        """Waits until all is handled. Raises: what a handler raised; TimeoutError."""
        self._queue.drain()
        self._surface()

    def close(self) -> None:
        """For a run that raises: what is queued is handled, then the callback's own `close` is called. Idempotent."""
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
            return "is in place, as in_place= says"
        if event in ANSWERS:
            return "changes the logs"
        if event in self.collective_events:
            return "is collective: all ranks run it together"
        named = sorted(LIVE & set(inspect.signature(getattr(self.callback, event, handler)).parameters))
        return f"takes {', '.join(named)}" if named else ""

    def _queued(self, event: str, handler: Callable[..., Any], **context: Any) -> None:
        self._surface()
        if self._is_over:
            return
        taken = _event_as_it_is(context)
        step = getattr(taken.get("state"), "global_step", None)
        where = f"{self.name}.{event}" if step is None else f"{self.name}.{event} of step {step}"
        self._queue.put(HandlerCall(where=where, handler=handler, context=taken))

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
    """Copies; where only the training thread may use something, what says so when it is used."""
    taken: dict[str, Any] = {}
    for name, value in context.items():
        if name in LIVE:
            taken[name] = None if value is None else _Elsewhere(name)
        elif name == "state":
            taken[name] = _state(value)
        elif name == "control":
            taken[name] = copy.copy(value)
        elif name == "ranks":
            taken[name] = value if value.world_size == 1 else _Rank(value)
        elif isinstance(value, dict | list | tuple):
            taken[name] = map_leaves(value, _copied)
        else:
            taken[name] = value
    return taken


def _state(state: Any) -> Any:
    """A copy. Its log history is long, and only ever the last record of it is added to."""
    if state is None:
        return None
    taken = copy.copy(state)
    for name, value in vars(taken).items():
        if name == "log_history" and value:
            setattr(taken, name, [*value[:-1], dict(value[-1])])
        elif isinstance(value, dict | list):
            setattr(taken, name, map_leaves(value, _copied))
    return taken


def _copied(value: Any) -> Any:
    """A leaf of its own: a tensor within a graph cannot be deep-copied."""
    if isinstance(value, _PLAIN):
        return value
    is_tensor = callable(getattr(value, "detach", None)) and callable(getattr(value, "clone", None))
    return value.detach().clone() if is_tensor else copy.deepcopy(value)


class _Elsewhere:
    """Stands for what only the training thread may use."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name}, which the training thread has>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{self._name} was used beside training, which changes it meanwhile: name {self._name} as a parameter of "
            "the handler, and it runs in place"
        )


class _Rank:
    """Who this rank is; it talks to no other from here."""

    def __init__(self, ranks: Any) -> None:
        self.rank, self.world_size, self.local_rank = ranks.rank, ranks.world_size, ranks.local_rank

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"ranks.{name} was used beside training, where other ranks do not wait for it: name the event in the "
            "callback's collective_events, and its handler runs in place"
        )
