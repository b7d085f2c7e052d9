"""Termination of rented machines: request it, then look until they are gone. Leftovers are named in the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import NoReturn, TypeVar

from ..core.records import dataclass
from ..errors import AuthFailed, OutcomeUnknown, ProviderError, TerminateFailed, Throttled
from ..state.journal import Journal
from .clock import Clock, patiently
from .rented import ATTEMPT_TAG, JOURNAL_TAG, Cloud, Instance

T = TypeVar("T")

END_LIMIT_S = 600.0
"""Seconds for machines to end, and again for their shared resources; afterwards it is an error."""
_ASK_AGAIN_S = 60.0
"""Seconds after which a machine that still runs is asked to end again."""
_TRUST_S = 20.0
"""Seconds after which a machine is asked again that still runs although another process was about to ask it. That
process may have died before its request. Listings are out of date for less time."""
_FIRST_LOOK_S = 1.0
_LONGEST_LOOK_S = 10.0


def _everything(_id: str, _token: str) -> bool:
    return True


@dataclass
class MachineTermination:
    """Terminates the machines that a journal knows or that carry its tag. `run` may be called once.

    Args:
        cloud: the API.
        journal: the pool's journal.
        clock: source of time.
        is_meant: whether a machine of this id and attempt should end; others of the journal are left alone.
        on_gone: called with each id once it is known to be gone.
        command: what a person types to terminate the rest by hand.
        limit_s: seconds for machines to end.
    """

    cloud: Cloud
    journal: Journal
    clock: Clock
    is_meant: Callable[[str, str], bool] = _everything
    on_gone: Callable[[str], None] = lambda _id: None
    command: str = ""
    limit_s: float = END_LIMIT_S
    _seen: dict[str, tuple[float, Instance]] = field(default_factory=dict)
    """Time at which each machine was last listed, and its state then."""
    _asked: dict[str, float] = field(default_factory=dict)
    _inherited: dict[str, float] = field(default_factory=dict)
    _refusal: str = ""

    def run(self) -> bool:
        """Wait until all are gone. False: none is billed any longer, but some are not gone yet.

        Raises:
            TerminateFailed: the machines in `ids` may still be billed.
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
            # A create call of unknown outcome is settled after `settle_s`: by then its machines are listed.
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
        """Delete the shared resources once all machines are gone, and close the journal.

        Raises:
            TerminateFailed: the resources in `ids` are left. They cost nothing.
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
            self._fail(sorted(self.journal.living) or ["(machines with this tag) " + self.journal.id], error)
        now = self.clock.monotonic()
        self._seen.update({instance.id: (now, instance) for instance in instances})
        return {i.id: i for i in instances if self.is_meant(i.id, i.tags.get(ATTEMPT_TAG, ""))}

    def _sorted(self, listed: dict[str, Instance], began: float) -> tuple[list[str], list[str], list[str]]:
        """Sort machines into: billed, ending, and unlisted ones that may exist."""
        known = {i for i, attempt in self.journal.living.items() if self.is_meant(i, attempt.token)}
        gone = {i for i in listed if listed[i].state == "gone"}
        unlisted = sorted(i for i in known - set(listed) if self._may_exist(i, began))
        gone |= known - set(listed) - set(unlisted)
        self._note_gone(gone)
        billed = sorted(i for i in listed if listed[i].is_billed)
        return billed, sorted(set(listed) - gone - set(billed)), unlisted

    def _may_exist(self, i: str, began: float) -> bool:
        """Return whether an unlisted machine may exist.

        It may be too new for the listing, or this answer may be older than an earlier one; after `settle_s` neither is
        plausible. A machine that was seen ending is gone once it is no longer listed.
        """
        at, last = self._seen.get(i, (began, None))
        return (last is None or last.is_billed) and self.clock.monotonic() - at <= self.cloud.settle_s

    def _end_unseen(self) -> None:
        """Ask known machines to end once, although listing them is refused."""
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
            for i in due:  # one by one: a machine that cannot be ended yet must not keep the others alive
                self._ask([i], now)

    def _was_asked(self, i: str) -> bool:
        """Return whether an earlier process asked this one to end moments ago: the listing may be older than that."""
        return i not in self._asked and 0 <= self.clock.time() - self._inherited.get(i, -1e18) < _TRUST_S

    def _ask(self, ids: list[str], now: float) -> bool:
        try:
            self.cloud.terminate(ids)
        except Throttled as error:
            self._refusal = str(error)
            return False
        except OutcomeUnknown as error:  # the next listing will tell
            self._refusal = str(error)
        except AuthFailed as error:
            self._refusal = str(error)
            self._fail(sorted(self.journal.living) or ids, error)
        except ProviderError as error:  # one protected machine must not keep the others alive
            self._refusal = str(error)
            return False
        self._asked.update(dict.fromkeys(ids, now))
        return True

    def _patient(self, call: Callable[[], T], limit_s: float | None = None) -> T:
        again_on = (Throttled, OutcomeUnknown)
        return patiently(call, again_on=again_on, clock=self.clock, limit_s=limit_s or self.limit_s)

    def _fail(self, ids: list[str], cause: Exception | None = None, cost: str = "and cost money") -> NoReturn:
        why = f" (the provider answered: {self._refusal})" if self._refusal else ""
        raise TerminateFailed(
            f"{self.cloud.name}: these of pool {self.journal.pool} may still exist, {cost}: {', '.join(ids)}{why}; "
            f"terminate them by hand: {self.command}",
            ids=tuple(ids),
            command=self.command,
        ) from cause
