"""Components of a checkpoint, and which ranks hold the same state. This module imports no framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from ...errors import UsageError

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class SharingPattern(StrEnum):
    """Sharing of a state between ranks. It decides which of them write the state.

    Example:
        StateComponent("model", model, SharingPattern.REPLICATED)
    """

    GLOBAL = "global"
    """One state for the whole world. Rank 0 writes it, all ranks read it."""
    PER_RANK = "per_rank"
    """A state of its own on every rank."""
    REPLICATED = "replicated"
    """The same state on every rank. Rank 0 writes it, all ranks read it."""
    PER_GROUP = "per_group"
    """The same state on all members of a named group. The first member writes it, its group reads it.

    A save is refused if members differ, because all but one of their states would be lost.
    """
    PER_NODE = "per_node"
    """One state per node. The node's first rank writes it, the ranks of the node read it."""


class ValidationLevel(StrEnum):
    """How replicas are compared before one of them is written for all.

    Example:
        StateComponent("ema", ema, SharingPattern.REPLICATED, validate_replication=True,
                       validation_level=ValidationLevel.QUICK)
    """

    NONE = "none"
    """No comparison, not even of a group's members.

    Use it for replicas that differ without harm, such as an optimizer that a framework wraps in states of each rank.
    """
    QUICK = "quick"
    """Names, shapes, dtypes, and up to 1,024 elements spread over each tensor. It can miss a difference elsewhere."""
    TENSOR = "tensor"
    """Every byte, by a digest of each tensor."""
    FULL = "full"
    """Like TENSOR, but tensors with different bytes pass if they are close (rtol 1e-5, atol 1e-8; NaN equals NaN).

    They are sent to the group's first rank for that.
    """


@dataclass(frozen=True)
class StateComponent:
    """One part of a run's state.

    Args:
        key: name, unique in a run. It is part of file names: letters, digits, `_`, `-` and `.`.
        stateful: object with `state_dict()` and `load_state_dict()`. `state_dict()` is called on every rank, in the
            order of the components, so it may be collective. None on a rank that has no such state and does not
            write it.
        sharing_pattern: which ranks hold the state.
        process_group_name: with PER_GROUP: the coordinator's group of replicas.
        required: whether a strict load fails if the checkpoint lacks the component.
        validate_replication: with REPLICATED: compare the ranks at every save. Members of a group are always compared.
        validation_level: how replicas are compared. `ValidationLevel.NONE` overrides every other setting.
        metadata: plain values for the manifest. `{"format": "safetensors"}` writes a state that has only tensors as
            `<key>.safetensors`, which other libraries read. A component of DTensors is always written by
            torch.distributed.checkpoint.

    Raises:
        UsageError: an argument is out of range, or two contradict each other.

    Example:
        StateComponent("optimizer", optimizer, SharingPattern.REPLICATED, required=False)
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
                f"key={self.key!r}: cannot be part of file names; use letters, digits, '_', '-' and '.', and start "
                "with a letter or digit"
            )
        object.__setattr__(self, "sharing_pattern", self._one_of(SharingPattern, "sharing_pattern"))
        object.__setattr__(self, "validation_level", self._one_of(ValidationLevel, "validation_level"))
        is_by_group = self.sharing_pattern is SharingPattern.PER_GROUP
        if is_by_group and not self.process_group_name:
            raise self._wrong(
                "sharing_pattern=PER_GROUP: no group is named; set process_group_name= to the group of its replicas"
            )
        if not is_by_group and self.process_group_name:
            raise self._wrong(
                f"process_group_name={self.process_group_name!r}: has no effect with {self.sharing_pattern.name}; "
                "set sharing_pattern=PER_GROUP, or remove it"
            )
        if self.validate_replication and self.sharing_pattern not in (
            SharingPattern.REPLICATED,
            SharingPattern.PER_GROUP,
            SharingPattern.PER_NODE,
        ):
            raise self._wrong(
                f"validate_replication=True: {self.sharing_pattern.name} has no replicas to compare; "
                "set sharing_pattern=REPLICATED, or remove it"
            )
        for method in ("state_dict", "load_state_dict"):
            if self.stateful is not None and not callable(getattr(self.stateful, method, None)):
                raise self._wrong(
                    f"stateful={type(self.stateful).__name__!r}: has no {method}(); "
                    "pass an object with state_dict() and load_state_dict()"
                )

    @property
    def is_compared(self) -> bool:
        """Return whether its replicas are compared at every save."""
        is_by_group = self.sharing_pattern is SharingPattern.PER_GROUP
        return self.validation_level is not ValidationLevel.NONE and (is_by_group or self.validate_replication)

    def _one_of(self, kind: type[Enum], name: str) -> Enum:
        value = getattr(self, name)
        try:
            return kind(value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value)
        except ValueError:
            legal = ", ".join(repr(member.value) for member in kind)
            raise self._wrong(f"{name}={value!r}: unknown value; use one of {legal}") from None

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"StateComponent {self.key!r}: {what}")
