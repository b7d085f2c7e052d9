"""Sources of model versions: URIs that a client gives, resolved to artifacts of its project.

The hub never opens one. A source is artifacts of a run or of a logged model, another version, or a URI of an object
store that clients read with their own credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ..model.access import Actor
from ..model.names import check_artifact_key, check_text
from ..model.refusal import Reason, Refusal
from ..model.registry import LATEST, SOURCE_LENGTH, ModelVersion, stage_of
from ..store import registry
from ..store.runs import load_run
from ..store.transaction import ReadSnapshot
from .calls import need_logged_model, need_run

_LOGGED = re.compile(r"models:/(m-[0-9a-f]{32})/?")
_NAMED = re.compile(r"models:/([^/@]+)(?:/([^/@]+)|@([^/@]+))")
_RUN = re.compile(r"runs:/([^/]+)(?:/(.*))?", re.DOTALL)
_ARTIFACTS = re.compile(r"mlflow-artifacts:/(?:/[^/]*/)?(.*)", re.DOTALL)
_REMOTE = frozenset({"s3", "gs", "wasb", "wasbs", "abfs", "abfss", "hdfs", "viewfs", "r2", "b2", "http", "https", "hf"})


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved source.

    Attributes:
        uri: Source as the version keeps it.
        location: URI that clients download.
        run_id: Run that made the model.
    """

    uri: str
    location: str
    run_id: str


def resolve_source(snapshot: ReadSnapshot, actor: Actor, source: str, run_id: str, model_id: str) -> ModelSource:
    """Resolve the source of a new version.

    Raises:
        Refusal: It leads out of the project, to a file, or does not belong to `run_id` or `model_id`.
    """
    _check_form(source)
    scheme = urlsplit(source).scheme.lower()
    if model_id:
        return _of_logged_model(snapshot, actor, source, run_id, model_id)
    if scheme == "runs":
        return _of_run(snapshot, actor, source, run_id)
    if scheme == "models":
        return _of_models(snapshot, actor, source, run_id)
    if scheme == "mlflow-artifacts":
        return _of_artifacts(snapshot, actor, source, run_id)
    if scheme in _REMOTE:
        return ModelSource(source, source, run_id)
    raise Refusal(
        Reason.INVALID,
        f"source: Invalid model version source: '{source[:80]}'. To use a local path as a model version source, the "
        "run_id request parameter has to be specified and the local path has to be contained within the artifact "
        "directory of the run specified by the run_id. This hub has no local paths; use runs:/<run_id>/<path>",
        field="source",
    )


def _check_form(source: str) -> None:
    check_text("source", source)
    plain = unquote(unquote(source))
    has_control = any(letter < " " or letter == "\x7f" for letter in plain)
    leads_up = ".." in re.split(r"[/\\;]", plain)
    if len(source) > SOURCE_LENGTH or has_control or leads_up or any(sign in plain for sign in "\\#?;"):
        raise Refusal(
            Reason.INVALID,
            f"source: Invalid model version source: '{source[:80]}'. If supplying a source as an http, https, local "
            "file path, ftp, objectstore, or mlflow-artifacts uri, an absolute path must be provided without relative "
            "path references present; provide an absolute path",
            field="source",
        )


def _not_within(source: str, name: str) -> Refusal:
    return Refusal(
        Reason.INVALID,
        f"source: Invalid model version source: '{source[:80]}'. The {name} request parameter must identify the "
        f"resource that contains the source; correct {name}",
        field="source",
    )


def _of_run(snapshot: ReadSnapshot, actor: Actor, source: str, run_id: str) -> ModelSource:
    match = _RUN.fullmatch(source)
    if match is None or match[1] != run_id:
        raise _not_within(source, "run_id")
    try:
        need_run(snapshot, actor, run_id)
    except Refusal:
        raise _not_within(source, "run_id") from None
    if match[2]:
        check_artifact_key(match[2].rstrip("/"))
    return ModelSource(source, source, run_id)


def _of_logged_model(snapshot: ReadSnapshot, actor: Actor, source: str, run_id: str, model_id: str) -> ModelSource:
    try:
        model = need_logged_model(snapshot, actor, model_id)
    except Refusal:
        raise _not_within(source, "model_id") from None
    match = _LOGGED.fullmatch(source)
    is_same = match is not None and match[1] == model_id
    is_within = _plain(source) == _plain(model.artifact_uri) or _plain(source).startswith(
        f"{_plain(model.artifact_uri)}/"
    )
    if not is_same and not is_within:
        raise _not_within(source, "model_id")
    return ModelSource(source, model.artifact_uri if is_same else source, run_id or model.run_id or "")


def _of_models(snapshot: ReadSnapshot, actor: Actor, source: str, run_id: str) -> ModelSource:
    match = _NAMED.fullmatch(source)
    if match is None or _LOGGED.fullmatch(source):
        raise _not_within(source, "model_id")
    version = _version_at(snapshot, actor, match[1], match[2], match[3])
    if run_id and run_id != (version.run_id or ""):
        raise Refusal(
            Reason.INVALID,
            f"source: Invalid model version source: '{source[:80]}'. The run_id and model_id request parameters must "
            "match the referenced model version; correct them",
            field="run_id",
        )
    return ModelSource(f"models:/{version.name}/{version.version}", version.location, version.run_id or "")


def _version_at(
    snapshot: ReadSnapshot, actor: Actor, name: str, version: str | None, alias: str | None
) -> ModelVersion:
    model = registry.load_model(snapshot, actor.project, name)
    if model is None:
        raise no_model(name)
    number: int | None = None
    if alias is not None and alias.lower() == LATEST:
        version, alias = LATEST, None
    if alias is not None:
        number = model.aliases.get(alias)
    elif version is not None and version.isascii() and version.isdigit():
        number = int(version[:18])
    elif version is not None:
        wanted = None if version.lower() == LATEST else stage_of(version)
        number = max((v.version for v in model.latest if wanted in (None, v.stage)), default=None)
    found = None if number is None else registry.find_version(snapshot, model, number)
    if found is None:
        raise no_version(name, alias or version or "")
    return found


def _of_artifacts(snapshot: ReadSnapshot, actor: Actor, source: str, run_id: str) -> ModelSource:
    run = load_run(snapshot, actor.project, run_id) if actor.run in (None, run_id) else None
    if run is None or not f"{_plain(source)}/".startswith(f"{_plain(run.artifact_uri)}/"):
        raise _not_within(source, "run_id")
    return ModelSource(source, source, run_id)


def _plain(uri: str) -> str:
    """Return a URI of the artifact proxy without the server's address and the workspace."""
    match = _ARTIFACTS.fullmatch(uri)
    path = match[1] if match else uri
    return re.sub(r"^workspaces/[^/]+/", "", path.strip("/")) if match else uri.rstrip("/")


def no_model(name: str) -> Refusal:
    return Refusal(
        Reason.MISSING,
        f"name: Registered Model with name={name[:80]} not found; search the models of this project",
        field="name",
    )


def no_version(name: str, version: object) -> Refusal:
    return Refusal(
        Reason.MISSING,
        f"version: Model Version (name={name[:80]}, version={str(version)[:80]}) not found; search the versions of the "
        "model",
        field="version",
    )
