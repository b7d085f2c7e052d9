"""Named operations: what they take, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from skyward.errors import UsageError
from skyward.hub.model.operations import NamedOperation, operation_named, operations, register_operation
from skyward.hub.services.jobs.operations import check_parameters, schema_of
from skyward.hub.standard.checkpoints import VerifyCheckpoint


def test_schema_says_what_an_operation_takes() -> None:
    (verify,) = [operation for operation in operations() if operation.name == "checkpoint.verify"]
    assert schema_of(verify)["required"] == ["path"]
    assert schema_of(verify)["properties"]["digests"] == {"type": "boolean", "default": True}
    assert check_parameters(verify, {"path": "/out"}) == VerifyCheckpoint(path="/out")


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"pth": "/out"}, "params.pth: unknown for checkpoint.verify; did you mean path?"),
        ({}, "params: Object missing required field `path`"),
        ({"path": 3}, "params: Expected `str`, got `int` - at `$.path`"),
        ({"path": ""}, "params: path: empty or longer than 4096 characters"),
    ],
)
def test_wrong_parameters_are_refused_with_the_nearest_name(params: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError) as error:
        check_parameters(operation_named("checkpoint.verify"), params)
    assert str(error.value).startswith(problem)


def test_unknown_operation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"operation='checkpoint.verfy': .*; did you mean checkpoint.verify\?"):
        operation_named("checkpoint.verfy")


def test_name_belongs_to_one_operation() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    register_operation(operation_named("checkpoint.verify"))
    other = NamedOperation(name="checkpoint.verify", text="Another.", parameters=Nothing, function="elsewhere:run")
    with pytest.raises(UsageError, match="is registered by skyward.hub.standard.checkpoints:verify"):
        register_operation(other)
