"""Translation of refusals to the error shapes of `/v1` and of MLflow's API."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..model.refusal import Reason, Refusal

_MLFLOW: dict[Reason, tuple[int, str]] = {
    Reason.INVALID: (400, "INVALID_PARAMETER_VALUE"),
    Reason.UNAUTHENTICATED: (401, "UNAUTHENTICATED"),
    Reason.FORBIDDEN: (403, "PERMISSION_DENIED"),
    Reason.MISSING: (404, "RESOURCE_DOES_NOT_EXIST"),
    # Their 409 and 413 stop a client at once, as these must: neither passes by itself.
    Reason.CONFLICT: (409, "RESOURCE_CONFLICT"),
    Reason.TOO_LARGE: (413, "INVALID_PARAMETER_VALUE"),
    Reason.LIMITED: (429, "RESOURCE_EXHAUSTED"),
    Reason.EXHAUSTED: (403, "RESOURCE_EXHAUSTED"),  # with their own 429, their client would try again for minutes
    Reason.UNSUPPORTED: (501, "NOT_IMPLEMENTED"),
    Reason.UNAVAILABLE: (503, "TEMPORARILY_UNAVAILABLE"),
    Reason.EXISTS: (400, "RESOURCE_ALREADY_EXISTS"),
}
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")


class WireError(msgspec.Struct):
    """One error of `/v1`."""

    code: str
    message: str
    field: str | None = None
    fix: str | None = None


class WireFault(msgspec.Struct):
    """Body of an error of `/v1`."""

    error: WireError


class MlflowFault(msgspec.Struct):
    """Body of an error of MLflow's API."""

    error_code: str
    message: str


class HttpRefusal(Refusal):
    """A refusal that only HTTP knows, with a status of its own."""

    def __init__(self, reason: Reason, message: str, status: int, *, field: str | None = None) -> None:
        super().__init__(reason, message, field=field)
        self.http_status = status


class Invalid(Refusal):
    """A body that does not fit its schema. MLflow's API has texts of its own for it.

    Args:
        path: Path of the field, such as `metrics[0].step`.
        shown: The wrong value as JSON. None: the field is missing.
    """

    def __init__(self, path: str, shown: str | None, expected: str) -> None:
        self.path, self.shown = path, shown
        if shown is None:
            message = f"{path}: missing; give it a value"
        else:
            message = f"{path or 'body'}={shown}: {expected}; see /v1/openapi.json"
        super().__init__(Reason.INVALID, message, field=path or None)

    def mlflow_message(self) -> str:
        if self.shown is None:
            return f"Missing value for required parameter '{self.path}'."
        return f"Invalid value {self.shown} for parameter '{self.path}' supplied: {self.message}"


def v1_fault(refusal: Refusal) -> tuple[int, WireFault]:
    """Return the status and body of a refusal on `/v1`."""
    message, _, fix = refusal.message.rpartition("; ")
    if not message:
        message, fix = refusal.message, ""
    code = refusal.reason.name.lower()
    return refusal.reason.status, WireFault(WireError(code, message, refusal.field, fix or None))


def mlflow_fault(refusal: Refusal) -> tuple[int, MlflowFault]:
    """Return the status and body of a refusal on MLflow's API."""
    status, code = _MLFLOW[refusal.reason]
    message = refusal.mlflow_message() if isinstance(refusal, Invalid) else refusal.message
    return status, MlflowFault(code, message)


def invalid_body(error: msgspec.ValidationError, value: Any) -> Invalid:
    """Translate msgspec's complaint.

    Args:
        error: The complaint.
        value: The decoded body, in which the wrong value is looked up.
    """
    text = str(error)
    at = _AT.search(text)
    path = at[1] if at else ""
    expected = _AT.sub("", text)
    expected = expected[0].lower() + expected[1:]
    if missing := _MISSING_FIELD.search(text):
        return Invalid(f"{path}.{missing[1]}".lstrip("."), None, expected)
    found = _value_at(value, path)
    if path and (found is None or (found == "" and "length >= 1" in expected)):
        # `null` or an empty text for a required field is the same as no field, as in protobuf's JSON.
        return Invalid(path, None, expected)
    return Invalid(path, _shown(found), expected)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else text[:197] + "..."


def _value_at(value: Any, path: str) -> Any:
    for name, index in _STEP.findall(path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index.isdecimal() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value
