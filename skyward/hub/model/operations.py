"""Named operations: work that a hub knows by a name and a schema, and runs as a job.

A part of skyward registers one with `register_operation`. The hub checks the parameters when a job is submitted; the
function is imported on the job's node only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.spellings import suggestion
from ...errors import UsageError

_BUILT_IN = ("skyward.hub.standard.checkpoints",)
"""Modules that register operations when they are imported. They import nothing else of weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOperation:
    """A named operation.

    Attributes:
        name: Such as "checkpoint.verify".
        text: Purpose, for lists.
        parameters: Frozen data class. Its annotations are the schema, and fields without a default are required. Its
            `__post_init__` may raise ValueError. Its module runs on nodes, which have the core of skyward only.
        function: Dotted path `module:function` of the function that a node calls with the parameters. It returns plain
            data.
        type: Kind of job.

    Example:
        register_operation(
            NamedOperation(
                name="checkpoint.verify",
                text="Look for damage in a checkpoint.",
                parameters=VerifyCheckpoint,
                function="skyward.hub.standard.checkpoints:verify",
            )
        )
    """

    name: str
    text: str
    parameters: type[Any]
    function: str
    type: str = "other"

    def run(self, params: Mapping[str, Any]) -> Any:
        """Call the function with parameters that the hub has checked. It raises what the function raises."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(self.parameters(**params))


_registered: dict[str, NamedOperation] = {}


def register_operation(operation: NamedOperation) -> None:
    """Let jobs run an operation. The same one may be registered again.

    Raises:
        UsageError: Another operation has the name.
    """
    known = _registered.setdefault(operation.name, operation)
    if known != operation:
        raise UsageError(f"operation={operation.name!r}: is registered by {known.function}; choose another name")


def operations() -> list[NamedOperation]:
    """Return all operations, by name."""
    for module in _BUILT_IN:
        importlib.import_module(module)
    return [_registered[name] for name in sorted(_registered)]


def operation_named(name: str) -> NamedOperation:
    """Return an operation.

    Raises:
        UsageError: There is none of that name, with the nearest one.
    """
    known = {operation.name: operation for operation in operations()}
    if name not in known:
        raise UsageError(f"operation={name[:80]!r}: no such operation; {advice(name, known)}")
    return known[name]


def advice(name: Any, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown name."""
    near = suggestion(str(name), known)
    return f"did you mean {near}?" if near else f"use one of {', '.join(known)}"
