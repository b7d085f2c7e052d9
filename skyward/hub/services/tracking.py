"""Tracking of experiments and runs: one object with all calls, which the faces of the hub share."""

from __future__ import annotations

from .experiments import Experiments
from .metrics import Metrics


class Tracking(Experiments, Metrics):
    """Experiments, runs, points and artifacts of all projects. Its calls are safe on any event loop.

    Each call takes the `Actor` who asks and raises `Refusal` only. Things of other projects are missing, not forbidden.
    """
