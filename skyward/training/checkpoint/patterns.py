"""The parts of a checkpoint, and which ranks hold the same of each. No framework is imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from ...errors import UsageError

__all__ = ["SharingPattern", "StateComponent", "ValidationLevel"]

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class SharingPattern(StrEnum):
    """Which ranks hold a state, and so which of them write it."""

    GLOBAL = "global"
    """One state for the world. Rank 0 writes it, all read it."""
    PER_RANK = "per_rank"
    """Every rank has its own."""
    REPLICATED = "replicated"
    """Every rank has the same. Rank 0 writes it, all read it."""
    PER_GROUP = "per_group"
    """The members of a named group are replicas of one another. The first of each writes it, its group reads it.
    Members whose states differ are refused: the group would lose all but one of them."""
    PER_NODE = "per_node"
    """One state for each node. Its first rank writes it, the ranks of the node read it."""


class ValidationLevel(StrEnum):
    """How replicas are compared before one of them is written for all."""

    NONE = "none"
    """Not at all, members of a group neither: for replicas that differ and of which any one will do, such as an
    optimizer that a framework has wrapped in states of each rank's own."""
    QUICK = "quick"
    """Names, shapes, dtypes, and up to 1,024 elements spread over each tensor: may miss a difference elsewhere."""
    TENSOR = "tensor"
    """Every byte, by a digest of each tensor."""
    FULL = "full"
    """As TENSOR; tensors whose bytes differ are sent to the group's first rank, and pass if they are close to its
    own (rtol 1e-5, atol 1e-8; NaN equals NaN)."""


@dataclass(frozen=True)
class StateComponent:
    """One part of a run's state.

    key: unique in a run; it is in the names of files: letters, digits, `_`, `-` and `.`.
    stateful: has `state_dict()` and `load_state_dict()`. Its `state_dict()` is called on every rank, in the order of
        the components, so it may be collective. None on a rank that has no such state and does not write it.
    process_group_name: of PER_GROUP: which of the coordinator's groups holds its replicas.
    required: whether a checkpoint without it cannot be loaded strictly.
    validate_replication: of REPLICATED: compare the ranks at every save. Members of a group are compared in any case.
    validation_level: how. `ValidationLevel.NONE` compares nothing, whatever else is said.
    metadata: kept in the manifest: plain values. `{"format": "safetensors"}` writes a state of tensors only as
        `<key>.safetensors`, which other libraries read; a component of DTensors is written by
        torch.distributed.checkpoint on its own accord.

    Raises: UsageError.
    """

    key: str
    stateful: Any
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool = False
    validation_level: ValidationLevel = ValidationLevel.TENSOR
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not _KEY.fullmatch(self.key):
            raise UsageError(
                f"StateComponent(key={self.key!r}): it becomes part of file names; use letters, digits, '_', '-' and "
                "'.', and begin with a letter or digit"
            )
        object.__setattr__(self, "sharing_pattern", self._one_of(SharingPattern, "sharing_pattern"))
        object.__setattr__(self, "validation_level", self._one_of(ValidationLevel, "validation_level"))
        is_by_group = self.sharing_pattern is SharingPattern.PER_GROUP
        if is_by_group and not self.process_group_name:
            raise self._wrong("sharing_pattern=PER_GROUP needs process_group_name, the group of its replicas")
        if not is_by_group and self.process_group_name:
            raise self._wrong(
                f"process_group_name={self.process_group_name!r} goes with sharing_pattern=PER_GROUP only, not "
                f"{self.sharing_pattern.name}"
            )
        if self.validate_replication and self.sharing_pattern not in (
            SharingPattern.REPLICATED,
            SharingPattern.PER_GROUP,
            SharingPattern.PER_NODE,
        ):
            raise self._wrong(
                f"validate_replication=True compares replicas, and {self.sharing_pattern.name} has none; use "
                "sharing_pattern=REPLICATED, or leave it out"
            )
        for method in ("state_dict", "load_state_dict"):
            if self.stateful is not None and not callable(getattr(self.stateful, method, None)):
                raise self._wrong(f"stateful={type(self.stateful).__name__!r} has no {method}()")

    @property
    def is_compared(self) -> bool:
        """Whether its replicas are compared at every save."""
        is_by_group = self.sharing_pattern is SharingPattern.PER_GROUP
        return self.validation_level is not ValidationLevel.NONE and (is_by_group or self.validate_replication)

    def _one_of(self, kind: type[Enum], name: str) -> Enum:
        value = getattr(self, name)
        try:
            return kind(value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value)
        except ValueError:
            legal = ", ".join(repr(member.value) for member in kind)
            raise self._wrong(f"{name}={value!r} is not one of {legal}") from None

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"StateComponent {self.key!r}: {what}")
