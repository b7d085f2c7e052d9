"""Import of logged models, of registered models, and of the versions that point to imported artifacts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from ..model.access import Actor
from ..model.foreign import ForeignLoggedModel, ForeignModel, ForeignRun, Imported
from ..model.names import PARAM_LENGTH, TAG_LENGTH, check_text, cut_values
from ..model.refusal import Reason, Refusal
from ..model.registry import (
    PROMPT_TAG,
    SOURCE_LENGTH,
    LoggedModel,
    ModelMetric,
    ModelStatus,
    ModelVersion,
    RegisteredModel,
    Stage,
    check_description,
    check_logged_name,
    check_model_name,
    check_new_alias,
    check_registry_tags,
)
from ..model.runs import Lifecycle
from . import logged_models, registry, runs
from .blobs import Blobs
from .database import Database
from .importing_files import import_files, record_import
from .points import GREATEST
from .transaction import ReadSnapshot, Transaction

_LOGGED_ID = re.compile(r"m-[0-9a-f]{32}")
_OF_RUN = re.compile(r"runs:/([^/]+)(?:/.*)?", re.DOTALL)
_OF_LOGGED = re.compile(r"models:/(m-[0-9a-f]{32})/?")
_PROXY = re.compile(r"mlflow-artifacts:/+(?:[^/]*:\d+/)?")
_ON_DISK = frozenset({"", "file"})
_OF_MLFLOW = frozenset({"runs", "models", "mlflow-artifacts"})


class ModelImport:
    """Import of models into one project. It knows where the artifacts of the source are in the hub.

    Args:
        database: An open database of the hub.
        blobs: Where bytes of artifacts are put.
        actor: Identity in the audit, and the project.
        outcome: Where things and problems are counted.
    """

    def __init__(self, database: Database, blobs: Blobs, actor: Actor, outcome: Imported) -> None:
        self._database, self._blobs, self._actor, self._outcome = database, blobs, actor, outcome
        self._places: dict[str, str] = {}

    def note_run(self, run: ForeignRun) -> None:
        """Remember that the artifacts of a run were imported."""
        if run.artifact_uri:
            self._places[_plain(run.artifact_uri)] = f"runs:/{run.id}"

    def import_logged_model(self, source: ForeignLoggedModel, experiment: int) -> None:
        """Copy a logged model with its metrics and files."""
        model, outcome, project = source.model, self._outcome, self._actor.project
        metrics = {(metric.key, metric.timestamp, metric.step, metric.run_id) for metric in model.metrics}
        outcome.source.update(
            logged_models=1, params=len(model.params), tags=len(model.tags), points=len(metrics)
        )  # fmt: skip
        try:
            pk = self._database.write_and_wait(_put_logged_model, self._actor, model, experiment)
        except Refusal as refusal:
            outcome.problems.append(f"logged model {model.id}: {refusal.message}")
            return
        owner = f"logged model {model.id}"
        has_files = import_files(source.files, owner, self._database, self._blobs, self._actor, -pk, outcome)
        stored = self._database.read_and_wait(logged_models.find_logged_model, project, model.id)
        assert stored is not None
        if has_files and model.artifact_uri:
            self._places[_plain(model.artifact_uri)] = stored.artifact_uri
        outcome.hub.update(
            logged_models=1,
            params=len(stored.params.keys() & model.params.keys()),
            tags=len(stored.tags.keys() & model.tags.keys()),
            points=len(
                metrics & {(metric.key, metric.timestamp, metric.step, metric.run_id) for metric in stored.metrics}
            ),
        )

    def import_registered_model(self, source: ForeignModel) -> None:
        """Copy a registered model with its versions and aliases."""
        model, outcome = source.model, self._outcome
        tags = len(model.tags) + sum(len(version.tags) for version in source.versions)
        outcome.source.update(
            registered_models=1, model_versions=len(source.versions), aliases=len(model.aliases), tags=tags
        )
        try:
            number = self._database.write_and_wait(_put_model, self._actor, model)
        except Refusal as refusal:
            outcome.problems.append(f"model {model.name}: {refusal.message}")
            return
        for version in source.versions:
            try:
                self._database.write_and_wait(self._put_version, number, model, version)
            except Refusal as refusal:
                outcome.problems.append(f"model {model.name}, version {version.version}: {refusal.message}")
        if source.last_number > max((version.version for version in source.versions), default=0):
            self._database.write_and_wait(_reserve_numbers, number, source.last_number)
        for alias, named in model.aliases.items():
            try:
                self._database.write_and_wait(_put_alias, number, alias, named)
            except Refusal as refusal:
                outcome.problems.append(f"model {model.name}: {refusal.message}")
        self._database.read_and_wait(self._count, source)

    def _put_version(self, tx: Transaction, number: int, model: RegisteredModel, version: ModelVersion) -> None:
        stored = registry.find_model(tx, self._actor.project, model.name)
        assert stored is not None
        tags = check_registry_tags(version.tags)
        made_at = registry.made_at(tx, number, version.version)
        if made_at is None:
            is_prompt = model.tags.get(PROMPT_TAG) == "true"
            source, location = (version.source, version.location) if is_prompt else self._pointer(tx, version)
            for text in (source, location, version.run_link or "", version.run_id or "", version.owner):
                _check_short(text)
            made = replace(
                version,
                source=source,
                location=location,
                owner=version.owner or self._actor.user,
                description=check_description(version.description),
                tags=tags,
            )
            registry.add_version(tx, self._actor.project, stored, made)
            record_import(tx, self._actor, f"model_version/{model.name}/{version.version}")
            return
        if made_at != version.created_at:
            raise _differs("the hub has another version of this number, which stays")
        known = registry.find_version(tx, stored, version.version)
        if known is None:
            raise _differs("it was deleted in the hub, and stays deleted")
        registry.change_version_tags(tx, number, version.version, _missing(tags, known.tags))
        if known.stage is not version.stage:
            raise _differs(f"its stage is {known.stage.shown} in the hub, which stays, and {version.stage.shown} there")

    def _pointer(self, tx: Transaction, version: ModelVersion) -> tuple[str, str]:
        """Return source and location of a version in the hub.

        Raises:
            Refusal: They would point to nothing.
        """
        project, source = self._actor.project, version.source
        if match := _OF_RUN.fullmatch(source):
            if runs.find_run(tx, project, match[1]) is None:
                raise _differs(f"its source {source[:200]!r} is of a run that was not imported")
            return source, source
        if match := _OF_LOGGED.fullmatch(source):
            logged = logged_models.find_logged_model(tx, project, match[1])
            if logged is None:
                raise _differs(f"its source {source[:200]!r} is a logged model that was not imported")
            return source, logged.artifact_uri
        location = self._place(version.location)
        scheme = urlsplit(version.location).scheme.lower()
        if location is None and scheme in _ON_DISK | _OF_MLFLOW:
            raise _differs(
                f"its source {version.location[:200]!r} is not among the imported artifacts; "
                "log the model to a run, and register it again"
            )
        if urlsplit(source).scheme.lower() == "models":
            return source, location or version.location
        return (location, location) if location else (source, version.location)

    def _place(self, uri: str) -> str | None:
        """Return where artifacts of the source are in the hub."""
        plain = path = _plain(uri)
        while path:
            if place := self._places.get(path):
                return place + plain[len(path) :]
            path = path.rpartition("/")[0]
        return None

    def _count(self, snapshot: ReadSnapshot, source: ForeignModel) -> None:
        """Count what the hub has of a model's things, by looking them up."""
        model, hub = source.model, self._outcome.hub
        stored = registry.load_model(snapshot, self._actor.project, model.name)
        assert stored is not None
        hub["registered_models"] += 1
        hub["tags"] += len(stored.tags.keys() & model.tags.keys())
        hub["aliases"] += len(stored.aliases.items() & model.aliases.items())
        for version in source.versions:
            known = registry.find_version(snapshot, stored, version.version)
            if known is not None and known.created_at == version.created_at:
                hub["model_versions"] += 1
                hub["tags"] += len(known.tags.keys() & version.tags.keys())


def _put_logged_model(tx: Transaction, actor: Actor, model: LoggedModel, experiment: int) -> int:
    if not _LOGGED_ID.fullmatch(model.id):
        raise Refusal(Reason.INVALID, f"model_id={model.id[:80]!r}: is not m- and 32 hexadecimal digits; mend it")
    params = cut_values("params", model.params, PARAM_LENGTH)
    tags = cut_values("tags", model.tags, TAG_LENGTH)
    known = logged_models.find_logged_model(tx, actor.project, model.id)
    if known is None:
        is_deleted = model.lifecycle is Lifecycle.DELETED
        made = replace(
            model,
            experiment_id=str(experiment),
            name=check_logged_name(model.name),
            kind=None if model.kind is None else check_text("model_type", model.kind[:TAG_LENGTH]),
            owner=model.owner or actor.user,
            updated_at=tx.now if is_deleted else model.updated_at,  # so that it stays in the bin for its time
            params=params,
            tags=tags,
        )
        logged_models.add_logged_model(tx, actor.project, made)
        record_import(tx, actor, f"logged_model/{model.id}")
        known = logged_models.find_logged_model(tx, actor.project, model.id)
        assert known is not None
    elif known.status is ModelStatus.PENDING and model.status is not ModelStatus.PENDING:
        logged_models.change_logged_model(tx, known.pk, status=model.status.value)
    logged_models.set_model_params(tx, actor.project, known.pk, _missing(params, known.params))
    logged_models.set_model_tags(tx, actor.project, known.pk, _missing(tags, known.tags))
    if model.metrics:
        logged_models.add_model_metrics(tx, actor.project, known.pk, [_finite(metric) for metric in model.metrics])
    return known.pk


def _put_model(tx: Transaction, actor: Actor, model: RegisteredModel) -> int:
    check_model_name(model.name)
    tags = check_registry_tags(model.tags)
    known = registry.find_model(tx, actor.project, model.name)
    if known is not None:
        registry.change_model_tags(tx, known.id, _missing(tags, known.tags))
        return known.id
    description = check_description(model.description)
    number = registry.add_model(tx, actor.project, model.name, model.owner or actor.user, description, tags)
    assert number is not None
    registry.change_model(tx, number, created_at=model.created_at, updated_at=model.updated_at)
    record_import(tx, actor, f"model/{model.name}")
    return number


def _reserve_numbers(tx: Transaction, model: int, last: int) -> None:
    """Keep the numbers of versions that were deleted in the source from being used again."""
    if registry.last_number(tx, model) >= last:
        return
    project, name = tx.execute("SELECT project, name FROM registered_model WHERE id = ?", (model,)).fetchone()
    stored = registry.find_model(tx, project, name)
    assert stored is not None
    registry.add_version(tx, project, stored, ModelVersion(name, last, Stage.NONE, "", "", tx.now, tx.now))
    registry.delete_version(tx, model, last)


def _put_alias(tx: Transaction, model: int, alias: str, version: int) -> None:
    check_new_alias(alias)
    known = registry.find_alias(tx, model, alias)
    if registry.made_at(tx, model, version) is None:
        raise _differs(f"its alias {alias!r} names version {version}, which was not imported")
    if known is None:
        registry.set_alias(tx, model, alias, version)
    elif known != version:
        raise _differs(f"its alias {alias!r} names version {known} in the hub, which stays, and {version} there")


def _finite(metric: ModelMetric) -> ModelMetric:
    return replace(metric, value=math.copysign(GREATEST, metric.value)) if math.isinf(metric.value) else metric


def _missing(values: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key not in known}


def _check_short(text: str) -> None:
    check_text("version", text)
    if len(text) > SOURCE_LENGTH:
        raise Refusal(Reason.INVALID, f"{text[:80]!r}: has more than {SOURCE_LENGTH} characters; shorten it")


def _differs(problem: str) -> Refusal:
    return Refusal(Reason.CONFLICT, problem)  # words: ok, a line of the report of an import


def _plain(uri: str) -> str:
    """Return an address in one spelling, for comparisons."""
    return _PROXY.sub("mlflow-artifacts:/", uri.removeprefix("file://")).rstrip("/")
