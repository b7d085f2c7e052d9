"""Refusals of a worker's request. The server raises one exception; each transport translates it to its own wire."""

from __future__ import annotations

from enum import Enum


class RefusalKind(Enum):
    """Kind of a refusal, which tells a worker how to go on."""

    ID_TAKEN = "id_taken"
    """Another process trains under this id."""
    NOT_A_MEMBER = "not_a_member"
    """The worker was evicted, has left, or has never joined: it joins, and keeps its delta."""
    NOT_IN_ROUND = "not_in_round"
    """The worker is a member, and begins with the next round."""
    WRONG_ROUND = "wrong_round"
    """The delta belongs to a round that is closed or unknown: the worker loads the current parameters."""
    CONFLICT = "conflict"
    """The worker has sent another delta for the same round: it waits for that one's answer."""
    OTHERS_ENDED = "others_ended"
    """The round needs more workers, and those that could end it have ended their training: the worker goes on alone."""
    BAD_DELTA = "bad_delta"
    """The delta must not enter the mean: it does not fit the model, is not finite, or far too large."""


class WorkerRefused(Exception):
    """A request of a worker that the server refuses.

    Args:
        kind: The kind, which tells the worker how to go on.
        message: Sentence for a person: `field=value: problem; what to do`. It names the worker.
    """

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
