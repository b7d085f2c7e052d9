"""All routes of the hub, in one table. It decides who may call what, and the reference is made from it."""

from __future__ import annotations

from . import pages
from .mlflow import table as mlflow
from .routing import Route
from .v1 import table as v1

ROUTES: tuple[Route, ...] = (*v1.ROUTES, *mlflow.ROUTES, *pages.ROUTES)
