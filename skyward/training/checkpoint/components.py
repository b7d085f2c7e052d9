"""The parts of a checkpoint, and whether ranks hold the same of each. No framework is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..events import Stateful

__all__ = ["SharingPattern", "StateComponent"]


class SharingPattern(Enum):
    """Which ranks hold a state, and so which of them write it."""

    GLOBAL = "global"
    """One state for the world. Rank 0 writes it, all read it."""
    PER_RANK = "per_rank"
    """Every rank has its own."""
    REPLICATED = "replicated"
    """Every rank has the same. Rank 0 writes it, all read it."""
    PER_GROUP = "per_group"
    """The members of a named group, which are replicas of one another, have the same."""
    PER_NODE = "per_node"
    """The ranks of a node have the same."""


@dataclass(frozen=True, kw_only=True)
class StateComponent:
    """One part of a run's state.

    key: unique in a run; it is in the names of files.
    stateful: its `state_dict()` is called on every rank, in the order of the components, so it may be collective.
    required: whether a checkpoint without it cannot be loaded.
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool = False
    validation_level: str = "tensor"
    metadata: Mapping[str, Any] = field(default_factory=dict)
