"""Facts about workers and rounds, for people: speeds, traffic, losses, norms and angles.

The last rounds are kept, each with all its workers. So the memory is bounded by their number.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEPT_ROUNDS = 512
"""Number of rounds that are kept."""
MOST_FIGURES = 32
"""Most figures of a worker that are kept. A worker sends about eight."""
MOST_HOST_LETTERS = 255
"""Most letters of a machine's name that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRound:
    """Part of a worker in a round."""

    loss: float | None
    """Mean loss since its last update; None if it knows none."""
    norm: float | None
    """Norm of its delta; None if that is not finite."""
    cosine: float | None
    """Cosine of the angle between its delta and the mean. In asynchronous mode a round has one delta, and the cosine is
    that with the outer momentum, the running mean of the deltas before. None if there is no angle."""
    staleness: int
    """Rounds that were closed while the worker computed the delta. 0 in synchronous mode."""
    is_counted: bool
    """Whether its delta is in the mean; False if it was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFacts:
    """A closed round."""

    round: int
    fragment: int
    """Part of the model that was exchanged; 0 without streaming."""
    seconds: float | None
    """Time since the round before was closed; None for the first one since the server began."""
    loss: float | None
    """Mean of the losses that are known, weighted as the deltas."""
    gradient_norm: float | None
    """Norm of the mean of the deltas, which is the outer gradient; None if all were refused."""
    workers: Mapping[str, WorkerRound]


class ServerFacts:
    """Table of the workers that are present, and the last rounds. Any thread may use it; nothing waits for a round.

    Args:
        kept: Number of rounds that are kept.
    """

    def __init__(self, kept: int = KEPT_ROUNDS) -> None:
        self._rounds: deque[RoundFacts] = deque(maxlen=kept)
        self._figures: dict[str, dict[str, float]] = {}
        self._hosts: dict[str, str] = {}
        self._traffic: dict[str, list[int]] = {}
        """Bytes from each worker and to it."""
        self._all = [0, 0]
        self._lock = threading.Lock()

    def hear(self, worker: str, figures: Mapping[str, Any], *, host: str = "") -> None:
        """Note figures that a worker has sent, and the name of its machine. Only finite numbers count."""
        with self._lock:
            if host:
                self._hosts[worker] = host[:MOST_HOST_LETTERS]
            own = self._figures.setdefault(worker, {})
            for name, value in figures.items():
                if is_finite(value) and (name in own or len(own) < MOST_FIGURES):
                    own[name] = value

    def count_traffic(self, worker: str, *, received: int = 0, sent: int = 0) -> None:
        """Add bytes of parameters that came from a worker, or went to it."""
        with self._lock:
            for counts in (self._traffic.setdefault(worker, [0, 0]), self._all):
                counts[0] += received
                counts[1] += sent

    def keep(self, workers: Collection[str]) -> None:
        """Forget the figures of all other workers."""
        with self._lock:
            self._figures = {worker: own for worker, own in self._figures.items() if worker in workers}
            self._hosts = {worker: host for worker, host in self._hosts.items() if worker in workers}
            self._traffic = {worker: own for worker, own in self._traffic.items() if worker in workers}

    def close(self, facts: RoundFacts) -> None:
        """Add a closed round, and forget the oldest one if there are too many."""
        with self._lock:
            self._rounds.append(facts)

    def speed(self, worker: str) -> float:
        """Return a worker's steps per second; 0 if it has measured none."""
        with self._lock:
            return max(0.0, float(self._figures.get(worker, {}).get("steps_per_second", 0.0)))

    def of_worker(self, worker: str) -> dict[str, Any]:
        """Return what is known about a worker, as values for JSON."""
        with self._lock:
            received, sent = self._traffic.get(worker, (0, 0))
            last = next((facts.workers[worker] for facts in reversed(self._rounds) if worker in facts.workers), None)
            return {
                **_short(self._figures.get(worker, {})),
                "host": self._hosts.get(worker, ""),
                "received_bytes": received,
                "sent_bytes": sent,
                **({} if last is None else _short(asdict(last))),
            }

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of all workers since the server began, as values for JSON."""
        with self._lock:
            return {"received_bytes": self._all[0], "sent_bytes": self._all[1]}

    def last(self) -> dict[str, Any] | None:
        """Return the round that was closed last, as values for JSON; None if there is none."""
        with self._lock:
            return _short(asdict(self._rounds[-1])) if self._rounds else None

    def since(self, first: int) -> list[dict[str, Any]]:
        """Return the kept rounds from a number on, the oldest first, as values for JSON."""
        with self._lock:
            rounds = [facts for facts in self._rounds if facts.round >= first]
        return [_short(asdict(facts)) for facts in rounds]


def mean_loss(losses: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Return the mean of the losses that are known; None if there is none.

    Example:
        >>> mean_loss({"a": 1.0, "b": 4.0, "c": None}, {"a": 2, "b": 1, "c": 5})
        2.0
    """
    known = [(loss, weights[worker]) for worker, loss in losses.items() if loss is not None and worker in weights]
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if total else None


def figures_in(metadata: Mapping[str, str]) -> dict[str, float]:
    """Return the figures that a worker sends with its delta. Without legal ones there are none.

    Example:
        >>> figures_in({"figures": '{"loss": 2.5, "local_step": 30, "name": "berlin"}'})
        {'loss': 2.5, 'local_step': 30}
    """
    try:
        figures = json.loads(metadata.get("figures", "{}"))
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in figures.items() if is_finite(value)} if isinstance(figures, dict) else {}


def is_finite(value: object) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> Any:
    """Return values with as many digits as a chart needs, because a page fetches all rounds."""
    if isinstance(value, dict):
        return {name: _short(entry) for name, entry in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
