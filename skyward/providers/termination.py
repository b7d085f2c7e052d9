"""The end of rented machines: asked for, then looked at until they are gone. What could not be ended is named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from ..errors import AuthFailed, OutcomeUnknown, ProviderError, TerminateFailed, Throttled
from ..state.journal import Journal
from .clock import Clock, patiently
from .rented import ATTEMPT_TAG, JOURNAL_TAG, Cloud, Instance

__all__ = ["END_LIMIT_S", "MachineTermination", "shielded"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

END_LIMIT_S = 600.0
"""Seconds that machines get to end, and then again what they shared; afterwards it is an error, loud."""
_ASK_AGAIN_S = 60.0
"""A machine that was asked to end and still runs after so long is asked once more."""
_MOST_SIGNALS = 3
_FIRST_LOOK_S = 1.0
_LONGEST_LOOK_S = 10.0


def _everything(_id: str, _token: str) -> bool:
    return True


@dataclass
class MachineTermination:
    """Ends what a journal knows of and what carries its tag. `run` may be called once.

    Args:
        is_meant: whether a machine of this id and attempt is to end; others of the journal are left alone.
        on_gone: called with each id once it is known to be gone.
        command: what a person types to end the rest by hand.
    """

    cloud: Cloud
    journal: Journal
    clock: Clock
    is_meant: Callable[[str, str], bool] = _everything
    on_gone: Callable[[str], None] = lambda _id: None
    command: str = ""
    limit_s: float = END_LIMIT_S
    _seen: dict[str, tuple[float, Instance]] = field(default_factory=dict)
    """When each one was listed last, and how."""
    _asked: dict[str, float] = field(default_factory=dict)
    _inherited: dict[str, float] = field(default_factory=dict)
    _refusal: str = ""

    def run(self) -> bool:
        """Until all of them are gone. False: none costs money any more, but some are not gone yet.

        Raises:
            TerminateFailed: some may still cost money; `ids` are those.
        """
        began = self.clock.monotonic()
        pause_s = _FIRST_LOOK_S
        self._inherited = dict(self.journal.asked)
        while True:
            now = self.clock.monotonic()
            listed = self._listed(began)
            open_tokens = [a.token for a in self.journal.open_attempts if self.is_meant("", a.token)]
            billed, ending, unlisted = self._sorted(listed, began)
            self._end(billed, now)
            # A create call of unknown outcome: what it made shows within `settle_s`.
            if not (billed or ending or unlisted) and (not open_tokens or now - began > self.cloud.settle_s):
                for token in open_tokens:
                    self.journal.settle(token, [])
                return True
            if now - began > self.limit_s:
                if not (billed or unlisted):
                    return False
                self._fail([*billed, *unlisted])
            self.clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_LOOK_S)

    def clean_up(self) -> None:
        """Remove what the machines shared, when all are gone, and close the journal.

        Raises:
            TerminateFailed: something is left; `ids` name it. It costs nothing.
        """
        tags = {JOURNAL_TAG: self.journal.id}
        deadline = self.clock.monotonic() + self.limit_s
        pause_s = _FIRST_LOOK_S
        while True:
            left = self._patient(lambda: self.cloud.clean_up(tags))
            if not left:
                self.journal.close(at=self.clock.time())
                return
            if self.clock.monotonic() > deadline:
                self._fail(left, cost="and cost nothing")
            self.clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_LOOK_S)

    def _listed(self, began: float) -> dict[str, Instance]:
        left_s = max(1.0, self.limit_s - (self.clock.monotonic() - began))
        try:
            instances = self._patient(lambda: self.cloud.describe({JOURNAL_TAG: self.journal.id}), left_s)
        except ProviderError as error:
            self._refusal = str(error)
            self._end_unseen()
            self._fail(sorted(self.journal.living) or ["(those with this tag) " + self.journal.id], error)
        now = self.clock.monotonic()
        self._seen.update({instance.id: (now, instance) for instance in instances})
        return {i.id: i for i in instances if self.is_meant(i.id, i.tags.get(ATTEMPT_TAG, ""))}

    def _sorted(self, listed: dict[str, Instance], began: float) -> tuple[list[str], list[str], list[str]]:
        """Those that cost money, those that are ending, those that may exist though they are not listed."""
        known = {i for i, attempt in self.journal.living.items() if self.is_meant(i, attempt.token)}
        gone = {i for i in listed if listed[i].state == "gone"}
        unlisted = sorted(i for i in known - set(listed) if self._may_exist(i, began))
        gone |= known - set(listed) - set(unlisted)
        self._note_gone(gone)
        billed = sorted(i for i in listed if listed[i].is_billed)
        return billed, sorted(set(listed) - gone - set(billed)), unlisted

    def _may_exist(self, i: str, began: float) -> bool:
        """Of one that is not listed. It may be too new for that, or whoever answered knows less than who did before;
        after a while it is one that is long gone. One that was seen to end is gone when it is listed no more.
        """
        at, last = self._seen.get(i, (began, None))
        return (last is None or last.is_billed) and self.clock.monotonic() - at <= self.cloud.settle_s

    def _end_unseen(self) -> None:
        """Where nobody may look: those that are known are asked to end all the same, once."""
        known = {i for i, attempt in self.journal.living.items() if self.is_meant(i, attempt.token)}
        self._end(sorted(known - set(self._asked) - set(self._inherited)), self.clock.monotonic())

    def _note_gone(self, gone: set[str]) -> None:
        new = sorted(gone - self.journal.gone)
        self.journal.ended(new)
        for i in new:
            self.on_gone(i)

    def _end(self, billed: list[str], now: float) -> None:
        due = [i for i in billed if now - self._asked.get(i, float("-inf")) >= _ASK_AGAIN_S and not self._was_asked(i)]
        if not due:
            return
        self.journal.asking(due, at=self.clock.time())
        if not self._ask(due, now) and len(due) > 1:
            for i in due:  # one that cannot be ended yet must not keep the others alive
                self._ask([i], now)

    def _was_asked(self, i: str) -> bool:
        """By a process before this one, a moment ago: what is listed may be older than that."""
        return i not in self._asked and 0 <= self.clock.time() - self._inherited.get(i, -1e18) < _ASK_AGAIN_S

    def _ask(self, ids: list[str], now: float) -> bool:
        try:
            self.cloud.terminate(ids)
        except Throttled as error:
            self._refusal = str(error)
            return False
        except OutcomeUnknown as error:  # looking at it will tell
            self._refusal = str(error)
        except AuthFailed as error:
            self._refusal = str(error)
            self._fail(sorted(self.journal.living) or ids, error)
        except ProviderError as error:  # one that is protected must not keep the others alive
            self._refusal = str(error)
            return False
        self._asked.update(dict.fromkeys(ids, now))
        return True

    def _patient(self, call: Callable[[], T], limit_s: float | None = None) -> T:
        again_on = (Throttled, OutcomeUnknown)
        return patiently(call, again_on=again_on, clock=self.clock, limit_s=limit_s or self.limit_s)

    def _fail(self, ids: list[str], cause: Exception | None = None, cost: str = "and cost money") -> NoReturn:
        why = f" (it said: {self._refusal})" if self._refusal else ""
        raise TerminateFailed(
            f"{self.cloud.name}: of pool {self.journal.pool} these may still be there, {cost}: "
            f"{', '.join(ids)}{why}. End them by hand: {self.command}",
            ids=tuple(ids),
            command=self.command,
        ) from cause


def shielded(action: Callable[[], T]) -> T:
    """What `action` returns or raises. A signal does not break it off: what its handler raises is raised afterwards.

    Only the third signal leaves at once, and then the keeper, another process, goes on. The thread is ours, so that
    an interrupt, which comes to the main thread, cannot hit the action in the middle.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    outcome: list[T] = []
    failure: list[BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act, name="skyward-ending", daemon=True)
    raised: list[BaseException] = []
    try:
        thread.start()
    except RuntimeError:  # no more threads: then in this one
        return action()
    while thread.is_alive():
        try:
            thread.join(1.0)
        except BaseException as error:  # by a signal handler: Ctrl-C, SIGTERM, a time limit
            raised.append(error)
            if len(raised) == _MOST_SIGNALS:
                raise
            _log.warning("machines are being ended; twice more Ctrl-C leaves that to the keeper")
    if failure:
        raise failure[0]
    if raised:
        raise raised[0]
    return outcome[0]
