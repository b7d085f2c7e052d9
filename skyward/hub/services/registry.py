"""Registry: named models, their versions, stages and aliases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..model.access import Actor, Right
from ..model.names import check_key, check_text
from ..model.pages import Page
from ..model.refusal import Reason, Refusal
from ..model.registry import (
    LATEST,
    SOURCE_LENGTH,
    ModelVersion,
    RegisteredModel,
    Stage,
    check_alias,
    check_description,
    check_model_name,
    check_new_alias,
    check_registry_tags,
    refuse_prompt,
)
from ..model.search import (
    MODEL_VERSION_ORDERS,
    MODEL_VERSIONS,
    REGISTERED_MODEL_ORDERS,
    REGISTERED_MODELS,
    parse_filter,
    parse_order,
)
from ..store import logged_models, registry, registry_search
from ..store.transaction import ReadSnapshot, Transaction
from .calls import need_logged_model, no_run, require_delete, require_no_run_token
from .logged_models import LoggedModels
from .model_sources import no_model, no_version, resolve_source
from .search import few_orders, legal_limit, offset_in, page_from

VERSIONS_TAG = "mlflow.modelVersions"
"""Tag of a logged model that lists the versions made of it, as in MLflow."""


class Registry(LoggedModels):
    """Registered models and logged models of all projects. Its calls are safe on any event loop.

    A run's token may register what its run made, and nothing else.
    """

    async def create_model(
        self, actor: Actor, name: str, tags: Mapping[str, str] | None = None, description: str | None = None
    ) -> RegisteredModel:
        """Make a registered model. Its name is unique in the project."""
        actor.require(Right.WRITE)
        check_model_name(name)
        refuse_prompt(tags or {})
        legal = check_registry_tags(tags or {})
        return await self.database.write(self._create_model, actor, name, legal, check_description(description))

    async def model(self, actor: Actor, name: str) -> RegisteredModel:
        """Return a registered model with its aliases and the newest version of each stage."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_load_model, actor, name)

    async def update_model(self, actor: Actor, name: str, description: str | None) -> RegisteredModel:
        """Set the description of a model."""
        require_change(actor)
        return await self.database.write(self._update_model, actor, name, check_description(description))

    async def rename_model(self, actor: Actor, name: str, new_name: str) -> RegisteredModel:
        """Rename a model with all its versions."""
        require_change(actor)
        check_model_name(new_name, "new_name")
        return await self.database.write(self._rename_model, actor, name, new_name)

    async def delete_model(self, actor: Actor, name: str) -> None:
        """Delete a model with its versions for good. Artifacts of runs stay."""
        require_change(actor)
        await self.database.write(self._delete_model, actor, name)

    async def search_models(
        self,
        actor: Actor,
        filter: str | None = None,  # noqa: A002 - the name that MLflow has
        order_by: Sequence[str] = (),
        limit: int = 100,
        page_token: str | None = None,
    ) -> Page[RegisteredModel]:
        """Return a page of models, filtered by name and tags."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        comparisons = parse_filter(filter, REGISTERED_MODELS)
        orders = parse_order(few_orders(order_by), REGISTERED_MODEL_ORDERS)
        offset = offset_in(page_token)
        found = await self.database.search(
            registry_search.search_models, actor.project, comparisons, orders, legal_limit(limit) + 1, offset
        )
        return page_from(found, limit, offset)

    async def set_model_tag(self, actor: Actor, name: str, key: str, value: str) -> None:
        """Set a tag of a model."""
        require_change(actor)
        await self.database.write(self._change_model_tags, actor, name, check_registry_tags({key: value}), ())

    async def delete_model_tag(self, actor: Actor, name: str, key: str) -> None:
        """Remove a tag of a model, if it is there."""
        require_change(actor)
        check_key("key", key)
        await self.database.write(self._change_model_tags, actor, name, {}, (key,))

    async def create_version(
        self,
        actor: Actor,
        name: str,
        source: str,
        *,
        run_id: str = "",
        model_id: str = "",
        tags: Mapping[str, str] | None = None,
        description: str | None = None,
        run_link: str | None = None,
    ) -> ModelVersion:
        """Make a version of a model.

        Args:
            actor: Who asks.
            name: A registered model.
            source: URI of artifacts of this project, see `model_sources`.
            run_id: Run that contains the source.
            model_id: Logged model that contains the source.
            tags: Its tags.
            description: Its description.
            run_link: Link that pages show. The hub never follows it.

        Raises:
            Refusal: The model is missing, or the source is not legal.
        """
        actor.require(Right.WRITE)
        refuse_prompt(tags or {})
        legal = check_registry_tags(tags or {})
        check_text("run_link", run_link or "")
        if run_link is not None and len(run_link) > SOURCE_LENGTH:
            raise Refusal(Reason.INVALID, f"run_link: is longer than {SOURCE_LENGTH}; shorten it", field="run_link")
        return await self.database.write(
            self._create_version, actor, name, source, run_id, model_id, legal, check_description(description), run_link
        )

    async def version(self, actor: Actor, name: str, version: int) -> ModelVersion:
        """Return a version with its aliases."""
        actor.require(Right.READ)
        return await self.database.read(_version, actor, name, version)

    async def version_by_alias(self, actor: Actor, name: str, alias: str) -> ModelVersion:
        """Return the version that an alias names. `latest` always names the newest."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_version_by_alias, actor, name, check_alias(alias))

    async def latest_versions(self, actor: Actor, name: str, stages: Sequence[Stage] = ()) -> list[ModelVersion]:
        """Return the newest version of each stage. No stages: of all."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_latest_versions, actor, name, tuple(stages) or tuple(Stage))

    async def update_version(self, actor: Actor, name: str, version: int, description: str | None) -> ModelVersion:
        """Set the description of a version."""
        require_change(actor)
        return await self.database.write(self._update_version, actor, name, version, check_description(description))

    async def move_version(
        self, actor: Actor, name: str, version: int, stage: Stage, *, archives_others: bool = False
    ) -> ModelVersion:
        """Move a version to a stage. Promotion is for admins.

        Args:
            actor: Who asks.
            name: A registered model.
            version: Number of the version.
            stage: Its new stage.
            archives_others: Whether the other versions of that stage are archived.
        """
        actor.require(Right.MANAGE)
        require_no_run_token(actor)
        if archives_others and stage not in {Stage.STAGING, Stage.PRODUCTION}:
            raise Refusal(
                Reason.INVALID,
                "archive_existing_versions: Model version transition cannot archive existing model versions because "
                f"'{stage.shown}' is not an Active stage; choose one of ['Staging', 'Production']",
                field="archive_existing_versions",
            )
        return await self.database.write(self._move_version, actor, name, version, stage, archives_others)

    async def delete_version(self, actor: Actor, name: str, version: int) -> None:
        """Delete a version for good. Its number is never used again."""
        require_change(actor)
        await self.database.write(self._delete_version, actor, name, version)

    async def search_versions(
        self,
        actor: Actor,
        filter: str | None = None,  # noqa: A002
        order_by: Sequence[str] = (),
        limit: int = 10_000,
        page_token: str | None = None,
        *,
        model: str | None = None,
    ) -> Page[ModelVersion]:
        """Return a page of versions, filtered by name, run, source, number and tags.

        With `model`, they are those of this model, also where it is a prompt.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        if model is not None:
            check_model_name(model)
        comparisons = parse_filter(filter, MODEL_VERSIONS)
        orders = parse_order(few_orders(order_by), MODEL_VERSION_ORDERS)
        offset = offset_in(page_token)
        found = await self.database.search(
            registry_search.search_versions, actor.project, comparisons, orders, legal_limit(limit) + 1, offset, model
        )
        return page_from(found, limit, offset)

    async def set_version_tag(self, actor: Actor, name: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""
        require_change(actor)
        legal = check_registry_tags({key: value})
        await self.database.write(self._change_version_tags, actor, name, version, legal, ())

    async def delete_version_tag(self, actor: Actor, name: str, version: int, key: str) -> None:
        """Remove a tag of a version, if it is there."""
        require_change(actor)
        check_key("key", key)
        await self.database.write(self._change_version_tags, actor, name, version, {}, (key,))

    async def set_alias(self, actor: Actor, name: str, alias: str, version: int) -> None:
        """Let an alias name a version."""
        require_change(actor)
        await self.database.write(self._set_alias, actor, name, check_new_alias(alias), version)

    async def delete_alias(self, actor: Actor, name: str, alias: str) -> None:
        """Remove an alias, if it is there."""
        require_change(actor)
        await self.database.write(self._delete_alias, actor, name, check_alias(alias))

    def _create_model(
        self, tx: Transaction, actor: Actor, name: str, tags: Mapping[str, str], description: str | None
    ) -> RegisteredModel:
        if registry.add_model(tx, actor.project, name, actor.user, description, tags) is None:
            raise _exists("name", name)
        self.on_change(tx, actor, "model.create", f"model/{name}", {"tags": dict(tags)})
        return _load_model(tx, actor, name)

    def _update_model(self, tx: Transaction, actor: Actor, name: str, description: str | None) -> RegisteredModel:
        model = _need_model(tx, actor, name)
        registry.change_model(tx, model.id, description=description)
        self.on_change(tx, actor, "model.update", f"model/{name}", {"description": description})
        return _load_model(tx, actor, name)

    def _rename_model(self, tx: Transaction, actor: Actor, name: str, new_name: str) -> RegisteredModel:
        model = _need_model(tx, actor, name)
        other = registry.find_model(tx, actor.project, new_name)
        if other is not None and other.id != model.id:
            raise _exists("new_name", new_name)
        registry.change_model(tx, model.id, name=new_name)
        registry.touch_versions(tx, model.id)
        self.on_change(tx, actor, "model.rename", f"model/{new_name}", {"name_before": name})
        return _load_model(tx, actor, new_name)

    def _delete_model(self, tx: Transaction, actor: Actor, name: str) -> None:
        model = _need_model(tx, actor, name)
        require_delete(actor, model.owner)
        registry.delete_model(tx, model.id)
        self.on_change(tx, actor, "model.delete", f"model/{name}", {})

    def _change_model_tags(
        self, tx: Transaction, actor: Actor, name: str, added: Mapping[str, str], removed: Sequence[str]
    ) -> None:
        registry.change_model_tags(tx, _need_model(tx, actor, name).id, added, removed)
        self.on_change(tx, actor, "model.tags", f"model/{name}", {"set": dict(added), "deleted": list(removed)})

    def _create_version(
        self,
        tx: Transaction,
        actor: Actor,
        name: str,
        source: str,
        run_id: str,
        model_id: str,
        tags: Mapping[str, str],
        description: str | None,
        run_link: str | None,
    ) -> ModelVersion:
        model = _need_model(tx, actor, name)
        if actor.run is not None and run_id not in ("", actor.run):
            raise no_run(run_id)
        resolved = resolve_source(tx, actor, source, run_id, model_id)
        if actor.run not in (None, resolved.run_id):
            require_no_run_token(actor)
        made = ModelVersion(
            name, 0, Stage.NONE, resolved.uri, resolved.location, tx.now, tx.now, actor.user, description,
            resolved.run_id, run_link, tags,
        )  # fmt: skip
        number = registry.add_version(tx, actor.project, model, made)
        registry.change_model(tx, model.id)
        if model_id:
            _note_version(tx, actor, model_id, name, number)
        detail = {"source": resolved.uri, "run_id": resolved.run_id, "tags": dict(tags)}
        self.on_change(tx, actor, "model_version.create", _resource(name, number), detail)
        return _version(tx, actor, name, number)

    def _update_version(
        self, tx: Transaction, actor: Actor, name: str, version: int, description: str | None
    ) -> ModelVersion:
        model, _ = _need_version(tx, actor, name, version)
        registry.change_version(tx, model.id, version, description=description)
        self.on_change(tx, actor, "model_version.update", _resource(name, version), {"description": description})
        return _version(tx, actor, name, version)

    def _move_version(
        self, tx: Transaction, actor: Actor, name: str, version: int, stage: Stage, archives_others: bool
    ) -> ModelVersion:
        model, before = _need_version(tx, actor, name, version)
        if archives_others:
            registry.archive_others(tx, model.id, version, stage)
        registry.change_version(tx, model.id, version, stage=stage.value)
        registry.change_model(tx, model.id)
        detail = {"stage": stage.value, "stage_before": before.stage.value, "archives_others": archives_others}
        self.on_change(tx, actor, "model_version.stage", _resource(name, version), detail)
        return _version(tx, actor, name, version)

    def _delete_version(self, tx: Transaction, actor: Actor, name: str, version: int) -> None:
        model, found = _need_version(tx, actor, name, version)
        require_delete(actor, found.owner)
        registry.delete_version(tx, model.id, version)
        registry.change_model(tx, model.id)
        self.on_change(tx, actor, "model_version.delete", _resource(name, version), {"source": found.source})

    def _change_version_tags(
        self, tx: Transaction, actor: Actor, name: str, version: int, added: Mapping[str, str], removed: Sequence[str]
    ) -> None:
        model, _ = _need_version(tx, actor, name, version)
        registry.change_version_tags(tx, model.id, version, added, removed)
        detail = {"set": dict(added), "deleted": list(removed)}
        self.on_change(tx, actor, "model_version.tags", _resource(name, version), detail)

    def _set_alias(self, tx: Transaction, actor: Actor, name: str, alias: str, version: int) -> None:
        model, _ = _need_version(tx, actor, name, version)
        before = registry.find_alias(tx, model.id, alias)
        registry.set_alias(tx, model.id, alias, version)
        detail = {"alias": alias, "version": version, "version_before": before}
        self.on_change(tx, actor, "model.alias", f"model/{name}", detail)

    def _delete_alias(self, tx: Transaction, actor: Actor, name: str, alias: str) -> None:
        registry.delete_alias(tx, _need_model(tx, actor, name).id, alias)
        self.on_change(tx, actor, "model.unalias", f"model/{name}", {"alias": alias})


def require_change(actor: Actor) -> None:
    """Check that the actor may change the registry."""
    actor.require(Right.WRITE)
    require_no_run_token(actor)


def _resource(name: str, version: int) -> str:
    return f"model/{name}/{version}"


def _need_model(snapshot: ReadSnapshot, actor: Actor, name: str) -> RegisteredModel:
    check_model_name(name)
    model = registry.find_model(snapshot, actor.project, name)
    if model is None:
        raise no_model(name)
    return model


def _load_model(snapshot: ReadSnapshot, actor: Actor, name: str) -> RegisteredModel:
    check_model_name(name)
    model = registry.load_model(snapshot, actor.project, name)
    if model is None:
        raise no_model(name)
    return model


def _need_version(
    snapshot: ReadSnapshot, actor: Actor, name: str, version: int
) -> tuple[RegisteredModel, ModelVersion]:
    check_model_name(name)
    model = registry.find_model(snapshot, actor.project, name)
    found = None if model is None else registry.find_version(snapshot, model, version)
    if model is None or found is None or actor.run not in (None, found.run_id):
        raise no_version(name, version)
    return model, found


def _version(snapshot: ReadSnapshot, actor: Actor, name: str, version: int) -> ModelVersion:
    return _need_version(snapshot, actor, name, version)[1]


def _exists(field: str, name: str) -> Refusal:
    text = f"{field}: Registered Model (name={name}) already exists. Names are unique; choose another"
    return Refusal(Reason.EXISTS, text, field=field)


def _version_by_alias(snapshot: ReadSnapshot, actor: Actor, name: str, alias: str) -> ModelVersion:
    if alias.lower() == LATEST:
        newest = max((version.version for version in _load_model(snapshot, actor, name).latest), default=None)
        if newest is None:
            raise no_version(name, alias)
        return _version(snapshot, actor, name, newest)
    number = registry.find_alias(snapshot, _need_model(snapshot, actor, name).id, alias)
    if number is None:
        raise Refusal(
            Reason.INVALID, f"alias: Registered model alias {alias} not found; read those of the model", field="alias"
        )
    return _version(snapshot, actor, name, number)


def _latest_versions(snapshot: ReadSnapshot, actor: Actor, name: str, stages: Sequence[Stage]) -> list[ModelVersion]:
    model = _load_model(snapshot, actor, name)
    return [_version(snapshot, actor, name, found.version) for found in model.latest if found.stage in stages]


def _note_version(tx: Transaction, actor: Actor, model_id: str, name: str, version: int) -> None:
    """Add a version to the tag of the logged model that it was made of."""
    model = need_logged_model(tx, actor, model_id)
    try:
        known = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
    except ValueError:  # anybody may set tags
        known = []
    text = json.dumps([*(known if isinstance(known, list) else []), {"name": name, "version": version}])
    logged_models.set_model_tags(tx, actor.project, model.pk, {VERSIONS_TAG: text})
