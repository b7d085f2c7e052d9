"""Decisions about jobs: which one runs where, which one makes way, and why the others wait.

`decide` is a pure function of a `Snapshot`: no I/O, no clock, and the same answer whatever the order of the rows.
"""

from .decide import decide
from .values import (
    AttemptState,
    Decisions,
    End,
    EndCause,
    HubJob,
    JobAttempt,
    JobPlacement,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    Policy,
    PolicyName,
    Priority,
    ProjectState,
    Reservation,
    SetKind,
    Shape,
    Stranded,
    UserState,
)

__all__ = [
    "JobAttempt",
    "AttemptState",
    "Decisions",
    "End",
    "EndCause",
    "HubJob",
    "MachineSet",
    "JobPlacement",
    "Policy",
    "PolicyName",
    "Priority",
    "ProjectState",
    "JobQuota",
    "Reservation",
    "SetKind",
    "Shape",
    "JobsSnapshot",
    "Stranded",
    "UserState",
    "decide",
]
