"""Schedule of faults: which fault strikes which node, and when. It is drawn from a seed and can be repeated."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["SEED_VARIABLE", "Fault", "Injector", "Struck", "plan", "seconds", "seeds"]

SEED_VARIABLE = "SKYWARD_CHAOS_SEED"
SECONDS_VARIABLE = "SKYWARD_CHAOS_SECONDS"


def seeds(default: Sequence[int]) -> list[int]:
    """Return the seed that the environment names, or else the default ones."""
    named = os.environ.get(SEED_VARIABLE)
    return [int(named)] if named else list(default)


def seconds(default: float) -> float:
    """Return the duration of one schedule: the one in the environment, or else the default."""
    return float(os.environ.get(SECONDS_VARIABLE, default))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its kind, the node that it strikes, and the seconds after the one before it."""

    kind: str
    node: int
    pause_s: float


def plan(seed: int, *, weights: Mapping[str, int], nodes: int, length: int, pause_s: float) -> list[Fault]:
    """Draw `length` faults. `weights` says how often each kind comes, relative to the others."""
    rng = random.Random(seed)
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    return [Fault(kind=kind, node=rng.randrange(nodes), pause_s=rng.uniform(0.3, 1.7) * pause_s) for kind in kinds]


@dataclass(kw_only=True)
class Struck:
    """Destroyed parts so far: the ground on which calls may be lost."""

    slots: int = 0
    """Processes that run calls, killed by themselves or with their zygote. Each loses at most the call it runs."""
    nodes: int = 0
    faults: list[str] = field(default_factory=list)


class Injector(threading.Thread):
    """Thread that carries out the faults of a plan, one after the other, until it is over or `stop` is set.

    `strike` carries one fault out, notes in `Struck` what it destroyed, and returns. An exception in it ends the
    injector and is kept in `error`: a schedule that was not carried out proves nothing.
    """

    def __init__(self, faults: Sequence[Fault], strike: Callable[[Fault, Struck], None], stop: threading.Event) -> None:
        super().__init__(name="chaos-injector", daemon=True)
        self.struck = Struck()
        self.error: BaseException | None = None
        self._faults = faults
        self._strike = strike
        self._stop_event = stop

    def run(self) -> None:
        began = time.monotonic()
        try:
            for fault in self._faults:
                if self._stop_event.wait(fault.pause_s):
                    return
                self.struck.faults.append(f"{time.monotonic() - began:.2f} s: {fault.kind} of node {fault.node}")
                self._strike(fault, self.struck)
        except BaseException as error:
            self.error = error
