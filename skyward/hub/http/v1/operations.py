"""Handlers of named operations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ...model.operations import operations
from ...services.jobs.operations import schema_of
from ..routing import Call
from . import wire


class OperationOut(Struct):
    """A named operation. `schema` is the JSON schema of its parameters."""

    name: str
    text: str
    type: str
    schema: dict[str, Any]


class OperationsOut(Struct):
    operations: list[OperationOut]


async def search(_call: Call, _request: wire.Nothing) -> OperationsOut:
    return OperationsOut([OperationOut(one.name, one.text, one.type, schema_of(one)) for one in operations()])
