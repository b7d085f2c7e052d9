"""Requests and answers about registered models. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .wire import Tags


class ModelSearch(Struct):
    """Part of the models of a project, or of the versions of one, by the search grammar of MLflow."""

    filter: str = ""
    order_by: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    page_token: str | None = None
    project: str | None = None


class ModelVersionOut(Struct):
    """A version of a model. `stage` is "none", "staging", "production" or "archived".

    `source` is the URI that it was made of, and `location` the URI of its files. The hub keeps no copy of them.
    """

    name: str
    version: int
    stage: str
    source: str
    location: str
    run_id: str | None
    run_link: str | None
    description: str | None
    owner: str
    created_at: int
    updated_at: int
    tags: Tags
    aliases: list[str]


class ModelVersionsOut(Struct):
    versions: list[ModelVersionOut]
    next_page_token: str | None = None


class ModelOut(Struct):
    """A named series of versions. `aliases` name versions, and `latest` has the newest version of each stage."""

    name: str
    description: str | None
    owner: str
    created_at: int
    updated_at: int
    tags: Tags
    aliases: dict[str, int]
    latest: list[ModelVersionOut]


class ModelsOut(Struct):
    models: list[ModelOut]
    next_page_token: str | None = None
