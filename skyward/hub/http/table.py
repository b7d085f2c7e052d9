"""All routes of the hub, in one table. It decides who may call what, and the reference is made from it."""

from __future__ import annotations

from functools import cache

import msgspec

from ..model.access import Right
from . import pages
from .mlflow import table as mlflow
from .openapi import describe
from .reply import Document, Empty, HttpReply
from .routing import Call, Route
from .v1 import table as v1


async def openapi(_call: Call, _request: Empty) -> HttpReply:
    return HttpReply(_description())


@cache
def _description() -> bytes:
    return msgspec.json.encode(describe(ROUTES))


DESCRIPTION = Route("GET", "/v1/openapi.json", Empty, Document, Right.NONE, "server", openapi, "Describe this API.")

ROUTES: tuple[Route, ...] = (*v1.ROUTES, DESCRIPTION, *mlflow.ROUTES, *pages.ROUTES)
