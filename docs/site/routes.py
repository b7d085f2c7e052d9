"""Reference of the hub's HTTP routes, made from the table by which the hub itself answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

_INTRODUCTION = """\
# Routes of the hub

Every path that a hub answers, made from the table by which it answers. A running hub describes the same table as
OpenAPI 3.1 at `/v1/openapi.json`, without a token.

- Requests and answers are JSON. Times are milliseconds since 1970.
- A token goes in `Authorization: Bearer TOKEN`, or in Basic as the password. The pages' cookie counts on `/v1` only.
- `X-SKYWARD-PROJECT` names the project on `/v1`, `X-MLFLOW-WORKSPACE` on MLflow's routes. Other projects' things are
  404.
- An error is `{"error": {"code": ..., "message": ..., "field": ..., "fix": ...}}`; on MLflow's routes it is as MLflow
  has it.
- The column "role" names the least role that may call the route. A field in **bold** is required.
"""

_PARTS = (
    ("## `/v1`", lambda path: path.startswith("/v1/")),
    ("## MLflow", lambda path: path.startswith("/api/")),
    ("## Server and pages", lambda path: not path.startswith(("/v1/", "/api/"))),
)


def routes_page() -> str:
    """Return the reference of all routes, and of the structs that they take and give."""
    from skyward.hub.http.openapi import describe
    from skyward.hub.http.table import ROUTES

    described = describe(ROUTES)
    lines = [_INTRODUCTION]
    for title, is_here in _PARTS:
        lines += [title, ""]
        if "MLflow" in title:
            lines += ["Each path has a twin below `/ajax-api`, for MLflow's own pages.", ""]
        routes = sorted((route for route in ROUTES if is_here(route.path)), key=lambda route: route.resource)
        for resource, group in groupby(routes, key=lambda route: route.resource):
            lines += [f"### {title.removeprefix('## ')}: {resource}", "", *_table(group, described["paths"])]
    return "\n".join([*lines, "## Structs", "", *_structs(described["components"]["schemas"])])


def _table(routes: Iterable[Any], paths: dict[str, Any]) -> Iterator[str]:
    yield "| route | | takes | gives | role |"
    yield "|---|---|---|---|---|"
    for route in routes:
        operation = paths[route.path.replace(":path}", "}")][route.method.lower()]
        names = " or ".join(f"`{path}`" for path in _paths_of(route))
        cells = (route.summary, _taken(operation), _given(operation, route.status), operation.get("x-role", "anybody"))
        yield f"| `{route.method}` {names} | {' | '.join(cells)} |"
    yield ""


def _paths_of(route: Any) -> list[str]:
    return [route.path, *(twin for twin in route.twins if not twin.startswith("/ajax-api/"))]


def _taken(operation: dict[str, Any]) -> str:
    fields = [
        f"**`{one['name']}`**" if one["required"] else f"`{one['name']}`"
        for one in operation["parameters"]
        if one["in"] == "query"
    ]
    return ", ".join([*_contents(operation.get("requestBody", {})), *fields])


def _given(operation: dict[str, Any], status: int) -> str:
    return ", ".join(_contents(operation["responses"][str(status)]))


def _contents(body: dict[str, Any]) -> list[str]:
    listed = []
    for media_type, content in body.get("content", {}).items():
        reference = content.get("schema", {}).get("$ref")
        listed.append(_link(reference) if reference else f"`{media_type}`")
    return listed


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return f"[{name}](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return f"struct-{name}"


def _structs(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'### <a id="{_anchor(name)}"></a>{name}'
        yield ""
        if schema.get("description"):
            yield schema["description"].replace("\n", " ")
            yield ""
        required = set(schema.get("required", ()))
        if schema.get("properties"):
            yield "| field | type |"
            yield "|---|---|"
            for field, kind in schema["properties"].items():
                yield f"| {f'**`{field}`**' if field in required else f'`{field}`'} | {_type(kind)} |"
        else:
            yield "No fields."
        yield ""


def _type(schema: dict[str, Any]) -> str:
    if reference := schema.get("$ref"):
        return _link(reference)
    if choices := schema.get("anyOf"):
        return " or ".join(_type(choice) for choice in choices)
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if values else "object"
    return str(kind)
