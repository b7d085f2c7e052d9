"""Numbered records of the hub's own client, and the hub's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .runs import Command, RunState

Record = Sequence[Any]
"""A kind and its arguments, such as `["m", step, timestamp, {key: value}]`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one run from one client, numbered without gaps.

    Attributes:
        client: Id of the process that numbers them.
        first: Number of the first record, from 1.
        records: The records. None at all is a heartbeat.
    """

    client: str
    first: int
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that can never be accepted. The hub counts it as accepted, so that those behind it are not held up."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to a batch.

    Attributes:
        accepted: Number of the last record that the hub has from this client. Send the next one, whatever was sent.
        state: State of the run.
        commands: Commands that the run has not acknowledged.
        refused: Records of this batch that the hub cannot keep.
    """

    accepted: int
    state: RunState
    commands: Sequence[Command] = ()
    refused: Sequence[RefusedRecord] = ()
