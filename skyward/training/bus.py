"""Brings a producer's events to its callbacks, in their order, and keeps their errors from parting the ranks.

An error in a callback is dealt with as its `on_error` says. "disable" is warned of once. "raise" ends the run: in a
world of one rank it is raised where it happened; among more, a rank that left alone would leave the others waiting in
their next collective, so the error is kept until the next `agree`, which every rank calls at the same places and
which raises everywhere: the callback's own exception on its rank, `RankFailed` on the others.
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

__all__ = ["CallbackHandler", "callback_name", "callback_state_key"]

_log = logging.getLogger(__name__)

_FAILED = 1 << 62
"""The bit of `agree` that says: this rank keeps an error. Above all flags of a control."""


@dataclass(frozen=True, slots=True)
class _Registration:
    """One callback's handler of one event."""

    callback: object
    handler: Handler
    is_collective: bool


class CallbackHandler:
    """A run's callbacks. Not for several threads at once: a run's events come from one.

    callbacks: `TrainerCallback`s, classes of them (made here without arguments), or objects of Hugging Face's
        `TrainerCallback`, whose handlers have the same names; handlers that its base class leaves empty are not
        called.
    ranks: the run's processes; a producer makes it when they are known. See `skyward.training.agree`.

    Raises: UsageError for what is no callback, and for two stateful ones with one `state_key`.
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
        """Appends one, or a class of one. One that fires events itself gets this object by its `join_bus`."""
        made = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(made, event, None)) for event in EVENTS) and not isinstance(made, Stateful):
            meant = "".join(f" ({name}: did you mean {event}?)" for name, event in misnamed_handlers(made))
            raise UsageError(
                f"callbacks: {made!r} has no handler of an event{meant}; they are named {EVENTS[0]}, {EVENTS[1]}, ..., "
                f"{EVENTS[-1]}"
            )
        check_handlers(made)
        for name, event in misnamed_handlers(made):
            _log.warning(
                "%s.%s is never called: there is no such event; did you mean %s?", callback_name(made), name, event
            )
        if isinstance(made, Stateful):
            key = callback_state_key(made)
            if any(isinstance(other, Stateful) and callback_state_key(other) == key for other in self._callbacks):
                raise UsageError(
                    f"callbacks: two have the state_key {key!r}, so a checkpoint could keep one only; give one of "
                    "them a state_key of its own"
                )
        self._callbacks.append(made)
        self._index = None
        join = getattr(made, "join_bus", None)
        if callable(join):
            join(self)

    def pop(self, callback: object) -> object | None:
        """Removes one, or the first of a class. Gives it; None where there is none."""
        for at, known in enumerate(self._callbacks):
            if known is callback or (isinstance(callback, type) and isinstance(known, callback)):
                self._index = None
                return self._callbacks.pop(at)
        return None

    def remove(self, callback: object) -> None:
        """As `pop`; gives nothing."""
        self.pop(callback)

    # Events ----------------------------------------------------------------------------------------------------------

    def listens(self, event: str) -> bool:
        """Whether any callback has a handler of this event: what only it needs need not be made otherwise."""
        return bool(self._handlers(event) if self._index is None else self._index.get(event))

    def fire(self, event: str, *, control: TrainerControl, **context: Any) -> TrainerControl:
        """Calls every handler of `event`, in the callbacks' order. All are called although one fails.

        context: args=, state=, and what else the event gives; handlers get all of it, control= and ranks= by keyword.

        Gives what the last handler returned that was not None, copied into `control`, which the producer goes on
        with: there is one control in a run.
        Raises: a callback's own exception, in a world of one rank; RankFailed for a collective handler.
        """
        return self.dispatch(event, control, context)

    def dispatch(self, event: str, control: TrainerControl, context: dict[str, Any]) -> TrainerControl:
        """As `fire`, with a dictionary that the producer keeps for the events of a step: `control` and `ranks` are
        written into it. Making one for each event costs as much as the handlers (benchmarks/training_bus.py).
        """
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
        """The ranks' flags become one: what one asks for, all do. Every rank calls it, at the same places.

        Raises: what a callback of any rank has raised since the last time.
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
        """Calls `close()` of the callbacks that have one: for what must end with a run also where the run raises,
        files and profilers. A producer calls it last, in a `finally`; their errors are logged, not raised.
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
        """By `state_key`. Callbacks of Hugging Face's with `state()` (its ExportableState) are kept too."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, Stateful):
                found[callback_state_key(callback)] = callback.state_dict()
            elif _is_exportable(callback):
                found[callback_state_key(callback)] = cast("Any", callback).state()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """States whose callback is not here are left out, with a warning that names them."""
        by_key = {
            callback_state_key(callback): callback
            for callback in self._callbacks
            if isinstance(callback, Stateful) or _is_exportable(callback)
        }
        for key, state in state_dict.items():
            callback = by_key.get(key)
            if callback is None:
                _log.warning("the checkpoint has a state of the callback %r, which is not in this run", key)
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
            runs_here = getattr(callback, "runs_on", "every_rank") == "every_rank" or self.ranks.rank == 0
            if runs_here or is_collective:
                yield _Registration(callback, keyword_handler(callback, event), is_collective)

    def _together(self, entry: _Registration, context: Mapping[str, Any]) -> Any:
        """A collective handler's answer, when it has ended well on all ranks."""
        self._raise_broken(entry.callback)
        answer = entry.handler(**context)
        self.ranks.exchange(None)
        return answer

    def _failed(self, entry: _Registration, event: str, error: Exception) -> None:
        where = f"{callback_name(entry.callback)}.{event}"
        from_elsewhere = isinstance(error, RankFailed)
        if entry.is_collective and not from_elsewhere:
            self.ranks.fail(RankFailure.of(self.ranks.rank, error, where))
        if was_not_entered(error, __name__):
            error.add_note(f"{where} gets everything by keyword: name what it needs (args, state, ...), and **kwargs")
        policy: ErrorPolicy = getattr(entry.callback, "on_error", "raise")
        if policy == "disable":
            self._index = None
            if (
                not entry.is_collective
                and self.ranks.world_size > 1
                and getattr(entry.callback, "collective_events", None)
            ):
                # Left out on this rank only, it would leave the others waiting in its next collective handler.
                self._broken.append((entry.callback, error, where))
                return
            self._disabled.append(entry.callback)
            _log.warning("%s failed; it is left out from here on", where, exc_info=error)
            return
        error.add_note(f"raised in the callback {where} at rank {self.ranks.rank}")
        if self.ranks.world_size == 1 or entry.is_collective:
            raise error
        if self._kept is None:
            self._kept, self._kept_where = error, where

    def _raise_broken(self, callback: object) -> None:
        """What a callback has raised on this rank alone, at the first place where all ranks can hear of it."""
        for broken, error, where in self._broken:
            if broken is callback:
                error.add_note(f"raised in {where}")
                raise error

    def _raise_everywhere(self) -> None:
        kept = self._kept
        self._kept = None
        mine = None if kept is None else RankFailure.of(self.ranks.rank, kept, self._kept_where)
        others = self.ranks.exchange((mine,))
        if kept is not None:
            raise kept
        failure = next(failed for (failed,) in others if failed is not None)
        raise RankFailed(rank=failure.rank, error=failure.error, where=failure.where)


def callback_name(callback: object) -> str:
    """As messages call it."""
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else type(callback).__name__


def callback_state_key(callback: object) -> str:
    """What its state is called in a checkpoint."""
    key = getattr(callback, "state_key", None)
    return key if isinstance(key, str) else type(callback).__qualname__


def _copy(answer: object, control: TrainerControl) -> None:
    for field in fields(control):
        if hasattr(answer, field.name):
            setattr(control, field.name, bool(getattr(answer, field.name)))


def _is_exportable(callback: object) -> bool:
    """Hugging Face's ExportableState, which is no protocol to import: `state()` and the class's `from_state`."""
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


def _restore_exportable(callback: object, state: Mapping[str, Any]) -> None:
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)
