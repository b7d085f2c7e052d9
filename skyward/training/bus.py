"""Event bus: calls the callbacks of a run in order, and keeps the ranks in step when one of them raises.

The callback's `on_error` decides about its exception. "disable" logs a warning and disables the callback. "raise" ends
the run. With one rank, the exception is raised where it happened. With several, a rank that left at once would leave
the others waiting in their next collective. The bus therefore keeps the exception until the next `agree`, which every
rank calls at the same places. There it raises on all ranks: the exception itself on its own rank, `RankFailed` on the
others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from ..errors import UsageError
from .agree import Alone, RankFailed, RankFailure, Ranks
from .events import EVENTS, ErrorPolicy, Stateful, TrainerControl
from .handlers import Handler, check_handlers, has_handler, keyword_handler, misnamed_handlers, was_not_entered

_log = logging.getLogger(__name__)

_FAILED = 1 << 62
"""Bit of `agree` that means: this rank keeps an exception. It is above all flags of a control."""


@dataclass(frozen=True, slots=True)
class _Registration:
    """A callback's handler of one event."""

    callback: object
    handler: Handler
    is_collective: bool


class CallbackHandler:
    """Callbacks of a run, called in their order. Not thread-safe: all events of a run come from one thread.

    Args:
        callbacks: instances or classes of `TrainerCallback` or of Hugging Face's `TrainerCallback`. Classes are
            instantiated without arguments. The empty handlers of Hugging Face's base class are not called.
        ranks: processes of the run; None: one process.

    Raises:
        UsageError: an object is not a callback, a handler does not take `**kwargs`, or two stateful callbacks have the
            same `state_key`.

    Example:
        >>> from skyward.training import CallbackHandler, TrainerCallback, TrainerControl
        >>> class Greet(TrainerCallback):
        ...     def on_train_begin(self, **kwargs): print("training begins")
        >>> _ = CallbackHandler([Greet]).fire("on_train_begin", control=TrainerControl(), args=None, state=None)
        training begins
    """

    def __init__(self, callbacks: Iterable[object] = (), *, ranks: Ranks | None = None) -> None:
        self.ranks: Ranks = ranks or Alone()
        self._callbacks: list[object] = []
        self._disabled: list[object] = []
        self._broken: list[tuple[object, Exception, str]] = []
        self._index: dict[str, list[_Registration]] | None = None
        self._kept: Exception | None = None
        self._kept_where = ""
        for callback in callbacks:
            self.add(callback)

    def __iter__(self) -> Iterator[object]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    # Which callbacks there are ---------------------------------------------------------------------------------------

    def add(self, callback: object) -> None:
        """Append a callback, or an instance of a callback class. A `join_bus` method of it receives this object.

        Args:
            callback: instance or class of a callback.

        Raises:
            UsageError: as for the constructor.
        """
        made = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(made, event, None)) for event in EVENTS) and not isinstance(made, Stateful):
            meant = "".join(f" ({name}: did you mean {event}?)" for name, event in misnamed_handlers(made))
            raise UsageError(
                f"callbacks: {made!r} handles no event{meant}; define a method such as {EVENTS[0]}, {EVENTS[1]} or "
                f"{EVENTS[-1]}"
            )
        check_handlers(made)
        for name, event in misnamed_handlers(made):
            _log.warning(
                "%s.%s is never called, because no event has this name; did you mean %s?",
                callback_name(made),
                name,
                event,
            )
        if isinstance(made, Stateful):
            key = callback_state_key(made)
            if any(isinstance(other, Stateful) and callback_state_key(other) == key for other in self._callbacks):
                raise UsageError(
                    f"callbacks: two callbacks have state_key={key!r}, but a checkpoint keeps one state for each key; "
                    "give one of them another state_key"
                )
        self._callbacks.append(made)
        self._index = None
        join = getattr(made, "join_bus", None)
        if callable(join):
            join(self)

    def pop(self, callback: object) -> object | None:
        """Remove a callback, or the first instance of a class, and return it. Return None if there is none."""
        for at, known in enumerate(self._callbacks):
            if known is callback or (isinstance(callback, type) and isinstance(known, callback)):
                self._index = None
                return self._callbacks.pop(at)
        return None

    def remove(self, callback: object) -> None:
        """Remove a callback, or the first instance of a class, if there is one."""
        self.pop(callback)

    # Events ----------------------------------------------------------------------------------------------------------

    def listens(self, event: str) -> bool:
        """Return whether any callback handles an event, so that a producer can skip the work for it."""
        return bool(self._handlers(event) if self._index is None else self._index.get(event))

    def fire(self, event: str, *, control: TrainerControl, **context: Any) -> TrainerControl:
        """Call every handler of an event, in the order of the callbacks. One that fails does not stop the others.

        Args:
            event: name of the event, one of `EVENTS`.
            control: the run's control; a control that a handler returns is copied into it.
            **context: further keywords of the handlers: `args`, `state` and whatever else the event passes.

        Returns:
            `control`. A run has one control object from beginning to end.

        Raises:
            Exception: the callback's own, if there is one rank or the handler is collective.
            RankFailed: a collective handler failed on another rank.
        """
        return self.dispatch(event, control, context)

    def dispatch(self, event: str, control: TrainerControl, context: dict[str, Any]) -> TrainerControl:
        """Call every handler as `fire` does, with a dict that the producer reuses for all events of a step.

        `control` and `ranks` are written into the dict.
        """
        # A new dict for each event costs as much as the handlers do (benchmarks/training_bus.py).
        entries = self._handlers(event) if self._index is None else self._index.get(event)
        if not entries:
            return control
        context["control"] = control
        context["ranks"] = self.ranks
        for entry in entries:
            try:
                answer = self._together(entry, context) if entry.is_collective else entry.handler(**context)
            except Exception as error:
                self._failed(entry, event, error)
                continue
            if answer is not None and answer is not control:
                _copy(answer, control)
        return control

    def agree(self, control: TrainerControl) -> TrainerControl:
        """Combine the flags of all ranks: a flag that one rank has set is set on all. Collective.

        Args:
            control: this rank's control; changed in place.

        Returns:
            `control`.

        Raises:
            Exception: a callback of this rank raised it since the last call.
            RankFailed: a callback of another rank raised since the last call.
        """
        if self.ranks.world_size == 1:
            return control
        bits = self.ranks.flags(control.flags() | (_FAILED if self._kept is not None else 0))
        if bits & _FAILED:
            self._raise_everywhere()
        control.set_flags(bits & ~_FAILED)
        if control.should_abort_without_save:
            control.should_save = control.should_evaluate = False
        return control

    def close(self) -> None:
        """Call `close()` of each callback that has one, to release files and profilers even after a failed run.

        A producer calls it last, in a `finally`. Exceptions are logged, not raised.
        """
        for callback in self._callbacks:
            close = getattr(callback, "close", None)
            if not callable(close):
                continue
            try:
                close()
            except Exception as error:
                _log.warning("%s.close failed", callback_name(callback), exc_info=error)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all stateful callbacks by `state_key`, Hugging Face's `ExportableState` included."""
        states: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, Stateful):
                states[callback_state_key(callback)] = callback.state_dict()
            elif _is_exportable(callback):
                states[callback_state_key(callback)] = cast("Any", callback).state()
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the callbacks' states. A state without a callback is skipped with a warning."""
        by_key = {
            callback_state_key(callback): callback
            for callback in self._callbacks
            if isinstance(callback, Stateful) or _is_exportable(callback)
        }
        for key, state in state_dict.items():
            callback = by_key.get(key)
            if callback is None:
                _log.warning(
                    "state of callback %r skipped: the checkpoint has it, but this run has no such callback", key
                )
            elif isinstance(callback, Stateful):
                callback.load_state_dict(state)
            else:
                _restore_exportable(callback, state)

    # Within ----------------------------------------------------------------------------------------------------------

    def _handlers(self, event: str) -> list[_Registration]:
        if self._index is None:
            self._index = {name: list(self._entries(name)) for name in EVENTS}
        return self._index.get(event, [])

    def _entries(self, event: str) -> Iterator[_Registration]:
        for callback in self._callbacks:
            if any(callback is disabled for disabled in self._disabled) or not has_handler(callback, event):
                continue
            is_collective = self.ranks.world_size > 1 and event in getattr(callback, "collective_events", ())
            if not is_collective and any(callback is broken for broken, _, _ in self._broken):
                continue
            # All ranks meet in a collective handler, so neither runs_on nor a failure on this rank removes it.
            runs_here = getattr(callback, "runs_on", "every_rank") == "every_rank" or self.ranks.rank == 0
            if runs_here or is_collective:
                yield _Registration(callback, keyword_handler(callback, event), is_collective)

    def _together(self, entry: _Registration, context: Mapping[str, Any]) -> Any:
        """Call a collective handler, and return its answer once it has succeeded on all ranks."""
        self._raise_broken(entry.callback)
        answer = entry.handler(**context)
        # A rank whose handler raises answers an exchange with its failure: one within the handlers of the others, or
        # this one. Without it, a rank that finished its handler would not hear of the failure.
        self.ranks.exchange(None)
        return answer

    def _failed(self, entry: _Registration, event: str, error: Exception) -> None:
        where = f"{callback_name(entry.callback)}.{event}"
        from_elsewhere = isinstance(error, RankFailed)
        if entry.is_collective and not from_elsewhere:
            self.ranks.fail(RankFailure.of(self.ranks.rank, error, where))
        if was_not_entered(error, __name__):
            error.add_note(
                f"{where} is called with keywords; declare those that it needs (args, state, ...) and **kwargs"
            )
        policy: ErrorPolicy = getattr(entry.callback, "on_error", "raise")
        if policy == "disable":
            self._index = None
            if (
                not entry.is_collective
                and self.ranks.world_size > 1
                and getattr(entry.callback, "collective_events", None)
            ):
                # Disabled on this rank only, it would leave the others waiting in its next collective handler. It
                # stays until that handler, where it can fail on all ranks at once (_raise_broken).
                self._broken.append((entry.callback, error, where))
                return
            self._disabled.append(entry.callback)
            _log.warning("%s failed; the callback is disabled from now on", where, exc_info=error)
            return
        error.add_note(f"raised in the callback {where} at rank {self.ranks.rank}")
        if self.ranks.world_size == 1 or entry.is_collective:
            raise error
        if self._kept is None:
            self._kept, self._kept_where = error, where

    def _raise_broken(self, callback: object) -> None:
        """Raise the exception that a callback kept on this rank, now that all ranks can learn of it."""
        for broken, error, where in self._broken:
            if broken is callback:
                error.add_note(f"raised in {where}")
                raise error

    def _raise_everywhere(self) -> None:
        kept = self._kept
        self._kept = None
        own = None if kept is None else RankFailure.of(self.ranks.rank, kept, self._kept_where)
        # Wrapped in a tuple: a bare RankFailure would raise in `exchange` on the rank whose own exception must surface.
        failures = self.ranks.exchange((own,))
        if kept is not None:
            raise kept
        failure = next(failed for (failed,) in failures if failed is not None)
        raise RankFailed(rank=failure.rank, error=failure.error, where=failure.where)


def callback_name(callback: object) -> str:
    """Return the name of a callback in messages."""
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else type(callback).__name__


def callback_state_key(callback: object) -> str:
    """Return the key of a callback's state in a checkpoint."""
    key = getattr(callback, "state_key", None)
    return key if isinstance(key, str) else type(callback).__qualname__


def _copy(answer: object, control: TrainerControl) -> None:
    for field in fields(control):
        if hasattr(answer, field.name):
            setattr(control, field.name, bool(getattr(answer, field.name)))


def _is_exportable(callback: object) -> bool:
    """Return whether a callback has the methods of Hugging Face's `ExportableState`, without importing it."""
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


def _restore_exportable(callback: object, state: Mapping[str, Any]) -> None:
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)
