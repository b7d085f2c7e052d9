"""Words for people about a server, its workers and its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from ...console.words import duration, size_of

WORKER_COLUMNS = ("worker", "state", "steps", "steps/s", "H", "loss", "cosine", "stale", "up", "down", "heard")
"""Titles of `worker_cells`. H is the number of inner steps in a round. Up and down are the worker's."""
_NONE = "-"


def server_line(status: Mapping[str, Any]) -> str:
    """Return the state of a server in one line."""
    saved = "not saved" if status["saved_round"] is None else f"saved in round {status['saved_round']}"
    workers = counted(len(status["workers"]), "worker")
    return f"round {status['round']}, {workers}, {status['parameters']:,} parameters, {saved}"


def worker_cells(worker: Mapping[str, Any]) -> list[str]:
    """Return the facts about a worker, by the columns of `WORKER_COLUMNS`."""
    is_refused = worker.get("is_counted") is False
    return [
        str(worker["worker"]),
        "refused" if is_refused else "trains" if worker["is_awaited"] else "waits",
        str(worker.get("local_step", _NONE)),
        number(worker.get("steps_per_second")),
        number(worker.get("sync_every")),
        number(worker.get("loss")),
        number(worker.get("cosine")),
        number(worker.get("staleness")),
        size_of(worker["received_bytes"]),
        size_of(worker["sent_bytes"]),
        f"{worker['silent_s']:.0f} s ago",
    ]


def round_line(facts: Mapping[str, Any]) -> str:
    """Return a closed round in one line.

    Example:
        >>> part = {"loss": None, "norm": 0.5, "cosine": 1.0, "staleness": 0, "is_counted": True}
        >>> facts = {"round": 3, "fragment": 0, "seconds": 4.2, "loss": None, "gradient_norm": 0.5}
        >>> round_line(facts | {"workers": {"a": part, "b": part | {"is_counted": False, "cosine": None}}})
        'round 3: loss -, outer gradient 0.5, cosine 1, 1 worker, 4.2 s, refused: b'
    """
    parts = facts["workers"]
    refused = sorted(worker for worker, part in parts.items() if not part["is_counted"])
    pieces = [
        f"loss {number(facts['loss'])}",
        f"outer gradient {number(facts['gradient_norm'])}",
        f"cosine {number(agreement(facts))}",
        counted(len(parts) - len(refused), "worker"),
        "" if facts["seconds"] is None else duration(facts["seconds"]),
        f"refused: {' '.join(refused)}" if refused else "",
    ]
    return f"round {facts['round']}: {', '.join(filter(None, pieces))}"


def agreement(facts: Mapping[str, Any]) -> float | None:
    """Return the mean cosine of a round; None if there is none."""
    cosines = [part["cosine"] for part in facts["workers"].values() if part["cosine"] is not None]
    return mean(cosines) if cosines else None


def number(value: float | None) -> str:
    """Return a number in at most three digits, or a whole one in full.

    >>> [number(value) for value in (None, 0.123456, 500, 12.0)]
    ['-', '0.123', '500', '12']
    """
    return _NONE if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "worker"), counted(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{count} {noun}{'s' * (count != 1)}"
