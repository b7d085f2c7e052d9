"""Searches of registered models and of their versions, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.registry import PROMPT_TAG, ModelVersion, RegisteredModel
from ..model.search import Comparison, Entity, Order
from . import registry
from .search import Query
from .transaction import ReadSnapshot

_MODELS = {"name": "registered_model.name", "updated": "registered_model.updated_at"}
_VERSIONS = {
    "name": "registered_model.name",
    "version": "v.version",
    "run_id": "v.run_id",
    "source": "v.source",
    "created": "v.created_at",
    "updated": "v.updated_at",
}
_MODEL_TAGS = "FROM registered_model_tag t WHERE t.model = registered_model.id AND t.key = ?"
_VERSION_TAGS = "FROM model_version_tag t WHERE t.model = v.model AND t.version = v.version AND t.key = ?"


def search_models(
    snapshot: ReadSnapshot,
    project: int,
    comparisons: Sequence[Comparison],
    orders: Sequence[Order],
    limit: int,
    offset: int,
) -> list[RegisteredModel]:
    """Return a page of a project's models, by name where nothing else is asked."""
    query = Query(snapshot, source="registered_model")
    query.where("registered_model.project = ?", project)
    _filter(query, comparisons, _MODELS, _MODEL_TAGS)
    _order(query, orders, _MODELS)
    if all(order.key != "name" for order in orders):
        query.orders.append(f"registered_model.name{query.collation}")
    rows = snapshot.execute(*query.select(registry.MODEL_COLUMNS, limit, offset)).fetchall()
    return registry.load_models(snapshot, rows)


def search_versions(
    snapshot: ReadSnapshot,
    project: int,
    comparisons: Sequence[Comparison],
    orders: Sequence[Order],
    limit: int,
    offset: int,
    model: str | None = None,
) -> list[ModelVersion]:
    """Return a page of a project's or a model's versions, the last changed first where nothing else is asked."""
    query = Query(snapshot, source=registry.VERSIONS)
    query.where("v.project = ? AND v.deleted_at IS NULL", project)
    if model is not None:
        query.where("registered_model.name = ?", model)
    _filter(query, comparisons, _VERSIONS, _VERSION_TAGS, with_prompts=model is not None)
    _order(query, orders, _VERSIONS)
    if not orders:
        query.orders.append("v.updated_at DESC")
    if all(order.key != "name" for order in orders):
        query.orders.append(f"registered_model.name{query.collation}")
    if all(order.key != "version" for order in orders):
        query.orders.append("v.version DESC")
    rows = snapshot.execute(*query.select(registry.VERSION_COLUMNS, limit, offset)).fetchall()
    return [registry.version_of(row) for row in rows]


def _filter(
    query: Query, comparisons: Sequence[Comparison], columns: dict[str, str], tags: str, *, with_prompts: bool = False
) -> None:
    wants_prompts = False
    for comparison in comparisons:
        if comparison.entity is Entity.TAG and comparison.key == PROMPT_TAG:
            wants_prompts = wants_prompts or _asks_for_prompts(comparison)
            continue
        if comparison.entity is Entity.ATTRIBUTE:
            condition, values = query.compare(columns[comparison.key], comparison.operator, comparison.value)
            query.where(condition, *values)
        elif comparison.operator in {"IS NULL", "IS NOT NULL"}:
            negation = "NOT " if comparison.operator == "IS NULL" else ""
            query.where(f"{negation}EXISTS (SELECT 1 {tags})", comparison.key)
        else:
            condition, values = query.compare("t.value", comparison.operator, comparison.value)
            query.where(f"EXISTS (SELECT 1 {tags} AND {condition})", comparison.key, *values)
    if with_prompts and not wants_prompts:
        return
    negation = "" if wants_prompts else "NOT "
    query.where(f"{negation}EXISTS (SELECT 1 {_MODEL_TAGS} AND lower(t.value) = 'true')", PROMPT_TAG)


def _asks_for_prompts(comparison: Comparison) -> bool:
    """Report whether a clause selects prompts. Models lack the tag, so it cannot be compared like others."""
    wanted = {"=": "true", "!=": "false"}.get(comparison.operator)
    return wanted is not None and str(comparison.value).lower() == wanted


def _order(query: Query, orders: Sequence[Order], columns: dict[str, str]) -> None:
    for order in orders:
        text = query.collation if order.key == "name" else ""
        query.orders.append(f"{columns[order.key]}{text} {'DESC' if order.is_descending else 'ASC'}")
