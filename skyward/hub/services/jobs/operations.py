"""Schemas of named operations, by msgspec: nodes, which run the operations, may lack it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from ....errors import UsageError
from ...model.operations import NamedOperation, advice


def schema_of(operation: NamedOperation) -> dict[str, Any]:
    """Return the JSON schema of an operation's parameters."""
    _, parts = msgspec.json.schema_components([operation.parameters])
    return dict(parts[operation.parameters.__name__])


def check_parameters(operation: NamedOperation, params: Mapping[str, Any]) -> Any:
    """Return parameters as the data class of the operation.

    Raises:
        UsageError: One is unknown, with the nearest known one, missing, or of the wrong type.
    """
    known = [one.name for one in fields(operation.parameters)]
    for name in params:
        if name not in known:
            raise UsageError(f"params.{str(name)[:40]}: unknown for {operation.name}; {advice(name, known)}")
    try:
        return msgspec.convert(dict(params), operation.parameters)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"params: {error}; see the schema of {operation.name} by `skyward job operations {operation.name}`"
        ) from None
