"""Tracking of experiments and runs: one object with all calls, which the faces of the hub share."""

from __future__ import annotations

from .artifacts import Artifacts
from .batches import Batches
from .experiments import Experiments
from .search import Searches


class Tracking(Experiments, Searches, Batches, Artifacts):
    """Experiments, runs, points and artifacts of all projects. Its calls are safe on any event loop.

    Each call takes the `Actor` who asks and raises `Refusal` only. Things of other projects are missing, not forbidden.
    """
