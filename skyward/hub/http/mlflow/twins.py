"""Routes of MLflow's API with their twins below `/ajax-api`."""

from __future__ import annotations

from ...model.access import Right
from ..routing import MIB, Handler, Route


def route(
    method: str,
    path: str,
    request: type,
    answer: type,
    right: Right,
    resource: str,
    handler: Handler,
    summary: str,
    *,
    version: str = "2.0",
    body_limit: int = 16 * MIB,
    status: int = 200,
) -> Route:
    """Make a route below `/api/<version>/` with its twin."""
    return Route(
        method,
        f"/api/{version}/{path}",
        request,
        answer,
        right,
        resource,
        handler,
        summary,
        body_limit,
        status,
        twins=(f"/ajax-api/{version}/{path}",),
    )
