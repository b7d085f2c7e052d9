"""Logged models: made by runs, finished, tagged, measured, searched, deleted."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence

from ..model.access import Actor, Right
from ..model.names import PARAM_LENGTH, TAG_LENGTH, check_text, cut_values
from ..model.pages import Page
from ..model.refusal import Reason, Refusal
from ..model.registry import LoggedModel, ModelMetric, ModelStatus, check_logged_name
from ..model.runs import Lifecycle
from ..model.search import LOGGED_MODELS, Entity, Order, parse_filter, parse_order
from ..store import logged_models
from ..store.logged_models import Dataset
from ..store.transaction import Transaction
from .calls import (
    Service,
    experiment_number,
    need_active_experiment,
    need_logged_model,
    need_run,
    no_run,
    require_delete,
    require_no_run_token,
)
from .runs import choose_name
from .search import few_orders, legal_limit, offset_in, page_from

LARGEST = 1.7976931348623157e308


class LoggedModels(Service):
    """Calls about logged models. Their artifacts are in `Artifacts`."""

    async def create_logged_model(
        self,
        actor: Actor,
        experiment_id: str,
        *,
        name: str | None = None,
        kind: str | None = None,
        run_id: str | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> LoggedModel:
        """Make a logged model, whose upload is pending.

        Args:
            actor: Who asks.
            experiment_id: An experiment that is not in the bin.
            name: Its name, which others may have too. None: one is made up.
            kind: Kind of the model, in words of the client.
            run_id: Run that makes it.
            params: Its first parameters.
            tags: Its first tags.
        """
        actor.require(Right.WRITE)
        if actor.run not in (None, run_id):
            raise no_run(run_id or "")
        model = LoggedModel(
            pk=0,
            id=f"m-{uuid.uuid4().hex}",
            experiment_id=experiment_id,
            name=choose_name(None, {}) if name is None else check_logged_name(name),
            status=ModelStatus.PENDING,
            lifecycle=Lifecycle.ACTIVE,
            owner=actor.user,
            created_at=0,
            updated_at=0,
            artifact_uri="",
            kind=None if kind is None else check_text("model_type", kind[:TAG_LENGTH]),
            run_id=run_id,
            params=cut_values("params", params or {}, PARAM_LENGTH),
            tags=cut_values("tags", tags or {}, TAG_LENGTH),
        )
        return await self.database.write(self._create_logged_model, actor, model)

    async def logged_model(self, actor: Actor, model_id: str, *, allow_deleted: bool = False) -> LoggedModel:
        """Return a logged model."""
        actor.require(Right.READ)
        return await self.database.read(need_logged_model, actor, model_id, allow_deleted=allow_deleted)

    async def finalize_logged_model(self, actor: Actor, model_id: str, status: ModelStatus) -> LoggedModel:
        """Set the status of the upload."""
        actor.require(Right.WRITE)
        return await self.database.write(self._finalize, actor, model_id, status)

    async def delete_logged_model(self, actor: Actor, model_id: str) -> None:
        """Move a logged model into the bin, if it is not there: a client repeats a call whose answer was lost."""
        await self.database.write(self._delete_logged_model, actor, model_id)

    async def set_logged_model_tags(self, actor: Actor, model_id: str, tags: Mapping[str, str]) -> None:
        """Set tags."""
        actor.require(Right.WRITE)
        legal = cut_values("tags", tags, TAG_LENGTH)
        await self.database.write(self._set_logged_model_tags, actor, model_id, legal)

    async def delete_logged_model_tag(self, actor: Actor, model_id: str, key: str) -> None:
        """Remove a tag."""
        actor.require(Right.WRITE)
        await self.database.write(self._delete_logged_model_tag, actor, model_id, key)

    async def log_logged_model_params(self, actor: Actor, model_id: str, params: Mapping[str, str]) -> None:
        """Add parameters. One that is there already must have the same value."""
        actor.require(Right.WRITE)
        legal = cut_values("params", params, PARAM_LENGTH)
        await self.database.write(self._log_model_params, actor, model_id, legal)

    async def log_model_metrics(self, actor: Actor, metrics: Sequence[ModelMetric]) -> None:
        """Add points that runs measured on logged models. Those of unknown models are left out, as in MLflow."""
        actor.require(Right.WRITE)
        await self.database.write(self._log_model_metrics, actor, tuple(metrics))

    async def search_logged_models(
        self,
        actor: Actor,
        experiment_ids: Sequence[str],
        filter: str | None = None,  # noqa: A002 - the name that MLflow has
        datasets: Sequence[Dataset] = (),
        order_by: Sequence[tuple[str, bool, Dataset | None]] = (),
        limit: int = 100,
        page_token: str | None = None,
    ) -> Page[LoggedModel]:
        """Return a page of logged models.

        Args:
            actor: Who asks.
            experiment_ids: Experiments to search; unknown ones have no models.
            filter: Such as `metrics.acc > 0.9 AND params.depth = '3'`.
            datasets: Metrics must be of one of these.
            order_by: Names of attributes or `metrics.key`; whether ascending; dataset of the metric.
            limit: Models on a page.
            page_token: Token of a page before.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        comparisons = parse_filter(filter, LOGGED_MODELS)
        few_orders([name for name, _, _ in order_by])
        orders = [(_order(name, is_ascending), dataset) for name, is_ascending, dataset in order_by]
        numbers = sorted({experiment_number(number) for number in experiment_ids})
        offset = offset_in(page_token)
        found = await self.database.search(
            logged_models.search_logged_models,
            actor.project,
            numbers,
            comparisons,
            datasets,
            orders,
            legal_limit(limit) + 1,
            offset,
        )
        return page_from(found, limit, offset)

    def _create_logged_model(self, tx: Transaction, actor: Actor, model: LoggedModel) -> LoggedModel:
        need_active_experiment(tx, actor, model.experiment_id)
        if model.run_id:
            need_run(tx, actor, model.run_id)
        logged_models.add_logged_model(tx, actor.project, model)
        detail = {"name": model.name, "experiment_id": model.experiment_id, "run_id": model.run_id}
        self.on_change(tx, actor, "logged_model.create", f"logged_model/{model.id}", detail)
        return need_logged_model(tx, actor, model.id)

    def _finalize(self, tx: Transaction, actor: Actor, model_id: str, status: ModelStatus) -> LoggedModel:
        model = need_logged_model(tx, actor, model_id)
        logged_models.change_logged_model(tx, model.pk, status=status.value)
        self.on_change(tx, actor, "logged_model.finalize", f"logged_model/{model_id}", {"status": status.value})
        return need_logged_model(tx, actor, model_id)

    def _delete_logged_model(self, tx: Transaction, actor: Actor, model_id: str) -> None:
        model = need_logged_model(tx, actor, model_id, allow_deleted=True)
        require_delete(actor, model.owner)
        if model.lifecycle is Lifecycle.DELETED:
            return
        logged_models.change_logged_model(tx, model.pk, lifecycle=Lifecycle.DELETED.value)
        self.on_change(tx, actor, "logged_model.delete", f"logged_model/{model_id}", {"name": model.name})

    def _set_logged_model_tags(self, tx: Transaction, actor: Actor, model_id: str, tags: Mapping[str, str]) -> None:
        model = need_logged_model(tx, actor, model_id)
        logged_models.set_model_tags(tx, actor.project, model.pk, tags)
        self.on_change(tx, actor, "logged_model.tags", f"logged_model/{model_id}", {"tags": dict(tags)})

    def _delete_logged_model_tag(self, tx: Transaction, actor: Actor, model_id: str, key: str) -> None:
        model = need_logged_model(tx, actor, model_id)
        if not logged_models.delete_model_tag(tx, actor.project, model.pk, key):
            raise Refusal(
                Reason.MISSING,
                f"key={key[:80]}: No tag with key '{key[:80]}' found for model with ID '{model_id}'; read its tags",
                field="key",
            )
        self.on_change(tx, actor, "logged_model.untag", f"logged_model/{model_id}", {"key": key})

    def _log_model_params(self, tx: Transaction, actor: Actor, model_id: str, params: Mapping[str, str]) -> None:
        model = need_logged_model(tx, actor, model_id)
        for key, value in params.items():
            if model.params.get(key, value) != value:
                raise Refusal(
                    Reason.INVALID,
                    f"params[{key}]={value[:80]!r}: was logged with another value; log a tag instead",
                    field="params",
                )
        logged_models.set_model_params(tx, actor.project, model.pk, params)
        self.on_change(tx, actor, "logged_model.params", f"logged_model/{model_id}", {"params": dict(params)})

    def _log_model_metrics(self, tx: Transaction, actor: Actor, metrics: Sequence[ModelMetric]) -> None:
        for model_id in dict.fromkeys(metric.model_id for metric in metrics):
            model = logged_models.find_logged_model(tx, actor.project, model_id)
            if model is not None:
                chosen = [_finite(metric) for metric in metrics if metric.model_id == model_id]
                logged_models.add_model_metrics(tx, actor.project, model.pk, chosen)


def _finite(metric: ModelMetric) -> ModelMetric:
    if not math.isinf(metric.value):
        return metric
    value = math.copysign(LARGEST, metric.value)
    return ModelMetric(
        metric.key, value, metric.timestamp, metric.step, metric.run_id, metric.model_id, metric.dataset_name,
        metric.dataset_digest,
    )  # fmt: skip


def _order(name: str, is_ascending: bool) -> Order:
    prefix, dot, key = name.partition(".")
    if dot and prefix == "metrics" and key:
        return Order(Entity.METRIC, key, not is_ascending)
    if dot:
        raise Refusal(
            Reason.INVALID,
            f"order_by: Invalid order by field name: {name[:80]}. Only metrics are supported; use metrics.KEY",
            field="order_by",
        )
    try:
        (order,) = parse_order([name], LOGGED_MODELS)
    except Refusal:
        problem = f"order_by: Invalid order by field name: {name[:80]}; use a field of a logged model, or metrics.KEY"
        raise Refusal(Reason.INVALID, problem, field="order_by") from None
    return Order(order.entity, order.key, not is_ascending)
