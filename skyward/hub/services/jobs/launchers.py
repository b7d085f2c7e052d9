"""Launchers as the hub sees them: they ask what to start and to kill, and say which of their runners live."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ...model.access import Actor, Right
from ...model.jobs import PROTOCOL, JobState
from ...store import attempts, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service
from ..clock_watch import ClockWatch
from .kept import lose_kept
from .launches import Launch, claim
from .life import lease_s, lose_runner
from .protocol import check_protocol, explain_older, needs_newer, note_newest, understands

SILENT_S = 60.0
"""Seconds of silence after which the launcher of a runner is told to kill it."""
_LOOK_S = 1.0
_LINES = 500
"""Most characters of the end of a log."""
AttemptKey = tuple[str, int]
"""Id of a job, and number of an attempt."""
NO_LINES: Mapping[AttemptKey, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOrders:
    """Answer to a launcher.

    Attributes:
        start: Attempts whose runners it must start.
        kill: Runners that are silent, and must be killed.
        forget: Attempts that are over; when their process is gone, nothing needs their folder.
    """

    start: Sequence[Launch] = ()
    kill: Sequence[AttemptKey] = ()
    forget: Sequence[AttemptKey] = ()


class Launchers(Service):
    """Calls of launchers."""

    def __init__(
        self, *arguments: Any, bell: Bell, clock_watch: ClockWatch, grace_s: float = 300.0, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._bell, self._clock_watch = bell, clock_watch
        self._grace_s = grace_s
        self._polls: dict[str, object] = {}
        """Launcher -> its newest poll."""

    async def poll(
        self,
        actor: Actor,
        launcher: str,
        *,
        machines: Sequence[str] = (),
        providers: Sequence[str] = (),
        known: Collection[AttemptKey] = (),
        gone: Collection[AttemptKey] = (),
        last_lines: Mapping[AttemptKey, str] = NO_LINES,
        wait_s: float = 0.0,
        protocol: int = PROTOCOL,
    ) -> LauncherOrders:
        """Tell the hub which runners of a launcher live, and collect what it must do.

        Args:
            actor: An owner: launchers start jobs of all projects.
            launcher: Its name, which no other one has.
            machines: Names of the sets that it serves; without them and without `providers` all.
            providers: Providers whose sets it serves, too.
            known: Attempts whose process it has started, the dead ones among them.
            gone: Those of `known` whose process is gone.
            last_lines: End of the log of those, where there is one.
            wait_s: Seconds to wait for something to do.
            protocol: Version of its messages.
        """
        actor.require(Right.OWN)
        check_protocol(protocol)
        deadline = time.monotonic() + wait_s
        poll = self._polls[launcher] = object()
        while True:
            seen = self._bell.count
            await self._clock_watch.look()
            told = (launcher, machines, providers, protocol, set(known), set(gone))
            # A launcher that was killed left its poll here, which knows nothing of what the next one has started.
            if self._polls[launcher] is poll and await self.database.read(self._has_orders, *told):
                orders = await self.database.write(self._poll, actor, *told, last_lines)
                if orders.start or orders.kill or orders.forget:
                    return orders
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._bell.is_closed:
                return LauncherOrders()
            await self._bell.wait(seen, min(_LOOK_S, left_s))

    # Transactions -----------------------------------------------------------------------------------------------------

    def _has_orders(
        self,
        snapshot: ReadSnapshot,
        launcher: str,
        machines: Sequence[str],
        providers: Sequence[str],
        protocol: int,
        known: set[AttemptKey],
        gone: set[AttemptKey],
    ) -> bool:
        """Look whether a launcher has something to do, because most polls find nothing."""
        own: set[AttemptKey] = set()
        served = _served(snapshot, machines, providers)
        for job, attempt in attempts.active_attempts(snapshot):
            key = _runner_key(snapshot, job, attempt)
            if attempt.launcher == launcher:
                own.add(key)
                if key in gone or (key not in known) or self._is_silent(job, attempt, self.clock()):
                    return True
            elif _is_free(job, attempt, served) and (understands(protocol, job.decoded_spec()) or not needs_newer(job)):
                return True
        for job, runner in attempts.kept_attempts(snapshot):
            if runner.launcher == launcher:
                own.add(key := (job.id, runner.number))
                is_gone = key in gone or key not in known
                if runner.free_at is None and (is_gone or self._is_silent(job, runner, self.clock())):
                    return True
        return bool(known - own)

    def _poll(
        self,
        tx: Transaction,
        actor: Actor,
        launcher: str,
        machines: Sequence[str],
        providers: Sequence[str],
        protocol: int,
        known: set[AttemptKey],
        gone: set[AttemptKey],
        last_lines: Mapping[AttemptKey, str],
    ) -> LauncherOrders:
        start, kill, own = [], [], set()
        served = _served(tx, machines, providers)
        for job, attempt in attempts.active_attempts(tx, for_update=tx.for_update):
            key = _runner_key(tx, job, attempt)
            if attempt.launcher == launcher:
                own.add(key)
                is_gone = key in gone or (key not in known and attempt.heard_at is not None)
                if is_gone and job.state != JobState.LOST:
                    lose_runner(tx, job, attempt, _of_gone(last_lines.get(key, "")))
                    tx.after_commit(self._bell.ring)
                elif key not in known and attempt.heard_at is None:  # the answer with this attempt was lost
                    start.append(claim(tx, actor, launcher, job, attempt, self._grace_s))
                elif self._is_silent(job, attempt, tx.now):
                    kill.append(key)
            elif _is_free(job, attempt, served):
                if understands(protocol, job.decoded_spec()):
                    note_newest(tx, protocol, attempt.machines)
                    start.append(claim(tx, actor, launcher, job, attempt, self._grace_s))
                elif not needs_newer(job):
                    explain_older(tx, launcher, job, attempt)
        kill += self._kept_orders(tx, launcher, known, gone, own)
        return LauncherOrders(
            start=[launch for launch in start if launch is not None], kill=kill, forget=sorted(known - own)
        )

    def _kept_orders(
        self, tx: Transaction, launcher: str, known: set[AttemptKey], gone: set[AttemptKey], own: set[AttemptKey]
    ) -> list[AttemptKey]:
        """Look after the runners of a launcher that wait: add them to `own`, and return those that are silent."""
        silent = []
        for job, runner in attempts.kept_attempts(tx, for_update=tx.for_update):
            if runner.launcher != launcher:
                continue
            own.add(key := (job.id, runner.number))
            if key in gone or key not in known:
                lose_kept(tx, runner, lease_s(tx, runner.machines))
            elif runner.free_at is None and self._is_silent(job, runner, tx.now):
                silent.append(key)
        return silent

    def _is_silent(self, job: JobRow, attempt: AttemptRow, now: int) -> bool:
        if attempt.heard_at is None or job.state == JobState.LOST:
            return False
        return now - max(attempt.heard_at, self.listening_since) > SILENT_S * 1000


def _of_gone(last_lines: str) -> str:
    """Return why an attempt is lost whose runner is gone. Its log is on the launcher's machine, which few can read."""
    text = "runner: its process ended before its attempt did; see its log"
    return f"{text}, which ends with {last_lines[:_LINES]!r}" if last_lines else text


def _runner_key(snapshot: ReadSnapshot, job: JobRow, attempt: AttemptRow) -> AttemptKey:
    """Return the attempt for which the runner of this one was started: launchers know it by that."""
    found = None if attempt.runner is None else attempts.attempt_numbered(snapshot, attempt.runner)
    return (job.id, attempt.number) if found is None else (found[0].id, found[1].number)


def _served(snapshot: ReadSnapshot, machines: Sequence[str], providers: Sequence[str]) -> AbstractSet[str] | None:
    """Return the names of the sets that a launcher serves; None for all."""
    if not machines and not providers:
        return None
    sets = machine_sets.machine_sets(snapshot) if providers else []
    return {*machines, *(one.spec.name for one in sets if one.spec.provider.get("type") in providers)}


def _is_free(job: JobRow, attempt: AttemptRow, served: AbstractSet[str] | None) -> bool:
    """Return whether a launcher may take an attempt: its machines are free, and it serves them."""
    is_served = served is None or attempt.machines in served
    is_new = job.state == JobState.RESERVED and attempt.runner is None
    return is_new and is_served and not json.loads(attempt.waits_for)
