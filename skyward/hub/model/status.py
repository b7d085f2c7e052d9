"""Size and health of a hub, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatus:
    """Size of a hub.

    Attributes:
        version: Version of the program that counted.
        revision: Revision of the tables.
        database: `sqlite` or `postgresql`.
        projects: Projects that are not deleted.
        experiments: Experiments, those in the bin included.
        runs: Runs, those in the bin included.
        deleted_runs: Runs in the bin.
        lost_runs: Runs whose process went silent.
        points: Points of metrics.
        artifacts: Files of runs.
        bytes: Bytes of those files; equal ones count once.
    """

    version: str
    revision: str
    database: str
    projects: int
    experiments: int
    runs: int
    deleted_runs: int
    lost_runs: int
    points: int
    artifacts: int
    bytes: int
