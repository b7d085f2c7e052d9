"""Description of the API as OpenAPI 3.1, made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ..._version import __version__
from ..model.access import NEEDED_ROLE, Right
from .faults import MlflowFault, WireFault
from .reply import Bytes, Document, Empty, ServerSentEvents, Text
from .routing import Route

_REFERENCE = "#/components/schemas/{name}"
_BINARY: dict[str, Any] = {"application/octet-stream": {}}
_MARKERS: dict[type, dict[str, Any]] = {
    Bytes: _BINARY,
    Document: {"application/json": {"schema": {"type": "object"}}},
    ServerSentEvents: {"text/event-stream": {"schema": {"type": "object"}}},
    Text: {"text/plain": {"schema": {"type": "string"}}},
}
_ERRORS = {
    "400": "The request is wrong",
    "401": "No valid token",
    "403": "The role does not suffice, or a limit of the project is reached",
    "404": "Not found in this project",
    "409": "The state of the thing forbids it",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "Too much waits already; try again",
    "503": "The database is away; try again",
}


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of `routes`."""
    listed = list(routes)
    structs = {part for route in listed for part in (route.request, route.answer) if part not in _MARKERS}
    ordered = sorted(structs | {MlflowFault, WireFault}, key=lambda struct: (struct.__module__, struct.__name__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "skyward hub", "version": __version__},
        "security": [{"bearer": []}, {"basic": []}, {"session": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
                "session": {"type": "apiKey", "in": "cookie", "name": "skyward_hub_session"},
            },
        },
    }


def _operation(route: Route, schemas: dict[type, Any], components: dict[str, Any]) -> dict[str, Any]:
    fault = schemas[MlflowFault if route.is_mlflow else WireFault]
    content = _MARKERS.get(route.answer) or {"application/json": {"schema": schemas[route.answer]}}
    responses: dict[str, Any] = {str(route.status): {"description": "Success", "content": content}}
    for status, text in _ERRORS.items():
        responses[status] = {"description": text, "content": {"application/json": {"schema": fault}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "tags": [route.resource],
        "parameters": _path_parameters(route),
        "responses": responses,
        "x-right": route.right.value,
    }
    if route.right is Right.NONE:
        operation["security"] = []
    else:
        operation["x-role"] = NEEDED_ROLE[route.right].name.lower()
    if route.request is Bytes and route.method in {"POST", "PUT"}:
        operation["requestBody"] = {"required": True, "content": _BINARY}
    elif route.method in {"GET", "DELETE"} and route.request not in _MARKERS:
        operation["parameters"] += _query_parameters(route, schemas, components)
    elif route.request not in _MARKERS:
        is_required = route.request is not Empty
        operation["requestBody"] = {
            "required": is_required,
            "content": {"application/json": {"schema": schemas[route.request]}},
        }
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)(?::path)?\}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names] + [
        {"name": name, "in": "query", "required": True, "schema": {"type": "string"}} for name in route.query
    ]


def _query_parameters(route: Route, schemas: dict[type, Any], components: dict[str, Any]) -> list[dict[str, Any]]:
    name = schemas[route.request]["$ref"].rpartition("/")[2]
    schema = components[name]
    required = set(schema.get("required", ()))
    return [
        {"name": field, "in": "query", "required": field in required, "schema": _without_null(content)}
        for field, content in schema["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave `null` out of a query's schema: a query cannot spell it."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if not kinds:
        return {key: value for key, value in schema.items() if key != "default" or value is not None}
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
