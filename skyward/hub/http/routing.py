"""Routes: what each demands, and how a request finds its route."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model.access import Actor, Right
from ..model.refusal import Reason, Refusal
from .faults import HttpRefusal

if TYPE_CHECKING:
    from ..services.hub import Hub

KIB = 1024
MIB = 1024 * KIB
RESOURCES = frozenset(
    {
        "server",
        "session",
        "sweep",
        "organization",
        "pool",
        "project",
        "experiment",
        "run",
        "artifact",
        "model",
        "blob",
        "event",
        "job",
        "capacity",
        "token",
        "user",
        "audit",
        "page",
    }
)
"""Kinds of resources on which a right is checked."""

_NAME = re.compile(r"\{(\w+)(:path)?\}")
NO_HEADERS: Mapping[bytes, bytes] = {}


@dataclass(slots=True)
class Call:
    """One request, as handlers see it.

    Attributes:
        hub: Services.
        actor: Identity that asks. On routes for anybody it is the actor `NOBODY`.
        path: Values of the names in the route's path.
        query: Raw query string.
        headers: Headers by lower-case name. Of a repeated header, the last.
        chunks: Body in pieces, for routes that read it themselves.
        origin: Scheme and host by which the client reached the hub.
    """

    hub: Hub
    actor: Actor
    path: Mapping[str, str]
    query: bytes
    headers: Mapping[bytes, bytes]
    chunks: AsyncIterator[bytes]
    origin: str
    size: int | None = None
    """Size of the body in bytes. None: the client did not say."""

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


Handler = Callable[[Call, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the HTTP API.

    Attributes:
        path: With names in braces; `{name:path}` takes slashes too and ends the path.
        request: Struct of the body, or of the query for GET and DELETE without a body. `Bytes`: the handler reads.
        answer: Struct of the answer, or a marker of `reply`.
        right: Right that the caller needs.
        resource: Kind of resource on which the right is checked, see `RESOURCES`.
        handler: Coroutine function `(call, request) -> answer`.
        summary: One sentence for the reference.
        body_limit: Largest body in bytes that is read.
        twins: Further paths of the same operation.
    """

    method: str
    path: str
    request: type
    answer: type
    right: Right
    resource: str
    handler: Handler
    summary: str
    body_limit: int = 16 * MIB
    status: int = 200
    twins: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    """Fields that a route with a raw body reads from its query."""

    @property
    def is_mlflow(self) -> bool:
        return self.path.startswith(("/api/", "/ajax-api/"))


class RouteIncomplete(ValueError):
    """A route of the table lacks what it must say. The program does not start."""


def check(routes: Iterable[Route]) -> None:
    """Raise `RouteIncomplete` unless every route says all that it must, once."""
    seen: set[tuple[str, str]] = set()
    for route in routes:
        name = f"{route.method} {route.path}"
        for part in ("request", "answer", "handler", "summary", "right"):
            if not getattr(route, part, None):
                raise RouteIncomplete(f"route={name}: lacks {part}; add it to the table")
        if route.resource not in RESOURCES:
            raise RouteIncomplete(f"route={name}: unknown resource {route.resource!r}; add it to RESOURCES")
        if not isinstance(route.right, Right):
            raise RouteIncomplete(f"route={name}: right={route.right!r} is no Right; choose one of {[*Right]}")
        for path in (route.path, *route.twins):
            if (route.method, path) in seen:
                raise RouteIncomplete(f"route={route.method} {path}: stands twice; remove one")
            seen.add((route.method, path))


Match = tuple[Route, Mapping[str, str]]
_NO_NAMES: Mapping[str, str] = {}


class Table:
    """Routes, found by method and path.

    Fixed paths are one look in a dictionary, because MLflow's hot routes are all fixed. Paths with names are tried in
    order, the longest fixed beginning first.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        check(self.routes)
        self._fixed: dict[tuple[str, str], Match] = {}
        named: list[tuple[str, re.Pattern[str], Route]] = []
        self._fixed_paths: set[str] = set()
        for route in self.routes:
            for path in (route.path, *route.twins):
                if "{" in path:
                    named.append((path.partition("{")[0], _pattern(path), route))
                else:
                    self._fixed[route.method, path] = route, _NO_NAMES
                    self._fixed_paths.add(path)
        self._named = sorted(named, key=lambda entry: -len(entry[0]))

    def match(self, method: str, path: str) -> Match:
        """Return the route of a request and the values of the names in its path.

        Raises:
            Refusal: There is no such path, or it has no such method.
        """
        if found := self._fixed.get((method, path)):
            return found
        is_known = path in self._fixed_paths
        for beginning, pattern, route in self._named:
            if path.startswith(beginning) and (matched := pattern.fullmatch(path)):
                if route.method == method:
                    return route, matched.groupdict()
                is_known = True
        if is_known:
            raise MethodNotAllowed(method)
        raise NoSuchPath


class NoSuchPath(Refusal):
    """No route has this path. The message does not echo it."""

    def __init__(self) -> None:
        super().__init__(Reason.MISSING, "path: no such route; see /v1/openapi.json")


class MethodNotAllowed(HttpRefusal):
    """The path has routes, but none of this method."""

    def __init__(self, method: str) -> None:
        super().__init__(Reason.INVALID, f"method={method[:16]}: not here; see /v1/openapi.json", 405)


def _pattern(path: str) -> re.Pattern[str]:
    pieces, last = [], 0
    for name in _NAME.finditer(path):
        pieces += [re.escape(path[last : name.start()]), f"(?P<{name[1]}>{'.+' if name[2] else '[^/]+'})"]
        last = name.end()
    return re.compile("".join([*pieces, re.escape(path[last:])]), re.DOTALL)
