"""Refused requests. Services raise one exception; each face of the hub translates it to its own wire."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Kind of a refusal, with the HTTP status of the `/v1` API."""

    INVALID = 400
    UNAUTHENTICATED = 401
    FORBIDDEN = 403
    MISSING = 404
    CONFLICT = 409
    """The state of the thing forbids it: another writer was first, or a run is over."""
    TOO_LARGE = 413
    LIMITED = 429
    """A rate. A client may try again later."""
    UNSUPPORTED = 501
    UNAVAILABLE = 503
    """Passes by itself: the disk is full, the database restarts. Clients retry. Never use it for a permanent fault."""
    EXISTS = 4090
    """A name is taken. `status` is 409 on `/v1`; MLflow's API answers 400."""
    EXHAUSTED = 4030
    """A limit of the project. `status` is 403: MLflow's client would repeat a 429 for minutes."""

    @property
    def status(self) -> int:
        return self.value // 10 if self.value > 999 else self.value


class Refusal(Exception):
    """A request that the hub refuses.

    Args:
        reason: The kind, which decides the status.
        message: Sentence for a person: `field=value: problem; what to do`. It never holds SQL, paths or tokens.
        field: Name of the offending field, where one is to blame.
    """

    def __init__(self, reason: Reason, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
