"""Registered models, their versions, and logged models. Times are milliseconds since 1970."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .names import check_key, check_text
from .refusal import Reason, Refusal
from .runs import Lifecycle

MODEL_NAME_LENGTH = 256
ALIAS_LENGTH = 255
REGISTRY_TAG_LENGTH = 100_000
DESCRIPTION_LENGTH = 100_000
SOURCE_LENGTH = 2_000
LATEST = "latest"
"""Alias, in any case, of the newest version of each model. None can be set."""
PROMPT_TAG = "mlflow.prompt.is_prompt"
"""Tag of MLflow's prompts, which share its registry with models. Searches leave them out."""

_ALIAS = re.compile(r"[\w\-]+")
_VERSION_ALIAS = re.compile(r"[vV]\d+")
_NOT_IN_LOGGED_NAMES = ("/", ":", ".", "%", '"', "'")


class Stage(StrEnum):
    """Stage of a version. MLflow's API spells it with a capital, see `title`."""

    NONE = "none"
    STAGING = "staging"
    PRODUCTION = "production"
    ARCHIVED = "archived"

    @property
    def shown(self) -> str:
        """Spelling of MLflow's API."""
        return self.value.capitalize()


class ModelStatus(StrEnum):
    """Progress of the upload of a logged model."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a registered model: a pointer to weights, never the weights."""

    name: str
    version: int
    stage: Stage
    source: str
    location: str
    created_at: int
    updated_at: int
    owner: str = ""
    description: str | None = None
    run_id: str | None = None
    run_link: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    aliases: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A named series of versions."""

    id: int
    name: str
    owner: str
    created_at: int
    updated_at: int
    description: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)
    latest: Sequence[ModelVersion] = ()
    """Newest version of each stage."""


@dataclass(frozen=True, slots=True)
class ModelMetric:
    """One point of a metric that was measured on a logged model."""

    key: str
    value: float
    timestamp: int
    step: int
    run_id: str
    model_id: str
    dataset_name: str | None = None
    dataset_digest: str | None = None


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """A model that a run made, with its parameters and the metrics that were measured on it."""

    pk: int
    id: str
    experiment_id: str
    name: str
    status: ModelStatus
    lifecycle: Lifecycle
    owner: str
    created_at: int
    updated_at: int
    artifact_uri: str
    kind: str | None = None
    run_id: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[ModelMetric] = ()


def _invalid(name: str, problem: str) -> Refusal:
    """Return the refusal of a field. The problem begins with MLflow's own words, because its clients match them."""
    return Refusal(Reason.INVALID, f"{name}: {problem}", field=name)


def check_model_name(name: str, name_of_field: str = "name") -> str:
    """Check the name of a registered model, and return it."""
    if not name.strip():
        raise _invalid(name_of_field, f"Missing value for required parameter '{name_of_field}'; name the model")
    if "/" in name or ":" in name:
        raise _invalid(name_of_field, f"Invalid model name '{name[:80]}'. Names cannot contain '/' or ':'; rename it")
    if len(name) > MODEL_NAME_LENGTH or name in {".", ".."} or posixpath.normpath(name) != name:
        raise _invalid(
            name_of_field,
            f"Invalid value {name[:80]!r} for parameter '{name_of_field}' supplied, because a name has at most "
            f"{MODEL_NAME_LENGTH} characters and is no path; choose another",
        )
    return check_text(name_of_field, name)


def check_logged_name(name: str) -> str:
    """Check the name of a logged model, and return it."""
    if not name or any(character in name for character in _NOT_IN_LOGGED_NAMES):
        raise _invalid(
            "name",
            f"Invalid model name ({name[:80]!r}) provided. Model name must be a non-empty string and cannot contain "
            f"the following characters: {_NOT_IN_LOGGED_NAMES}; rename it",
        )
    return check_text("name", name)


def check_alias(alias: str) -> str:
    """Check the form of an alias, and return it."""
    if not _ALIAS.fullmatch(alias):
        raise _invalid(
            "alias",
            f"Invalid alias name: '{alias[:80]}'. Names may only contain alphanumerics, underscores (_), and dashes "
            "(-); rename it",
        )
    if len(alias) > ALIAS_LENGTH:
        raise _invalid("alias", _too_long("Registered model alias name", alias, ALIAS_LENGTH))
    return alias


def check_new_alias(alias: str) -> str:
    """Check an alias that is about to be set: the names of versions are reserved."""
    check_alias(alias)
    if alias.lower() == LATEST:
        raise _invalid("alias", "'latest' alias name (case insensitive) is reserved; choose another")
    if _VERSION_ALIAS.fullmatch(alias):
        raise _invalid("alias", f"Version alias name '{alias}' is reserved; choose another")
    return alias


def check_registry_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Check tags of a registered model or of a version, and return them. Nothing is cut, as in MLflow."""
    for key, value in tags.items():
        check_key("key", key)
        if len(value) > REGISTRY_TAG_LENGTH:
            raise _invalid("value", _too_long("value", value, REGISTRY_TAG_LENGTH))
        check_text("value", value)
    return dict(tags)


def refuse_prompt(tags: Mapping[str, str]) -> None:
    """Refuse a new prompt of MLflow. An imported one can be read.

    Raises:
        Refusal: The tags say that it is one.
    """
    if tags.get(PROMPT_TAG, "").lower() == "true":
        text = "prompts: skyward.hub makes no prompts; use MLflow's own server for them"
        raise Refusal(Reason.UNSUPPORTED, text, field="tags")


def check_description(description: str | None) -> str | None:
    """Check a description, and return it."""
    if description is None:
        return None
    if len(description) > DESCRIPTION_LENGTH:
        raise _invalid("description", _too_long("description", description, DESCRIPTION_LENGTH))
    return check_text("description", description)


def version_number(version: str) -> int:
    """Convert the version of a request to its number."""
    try:
        number = int(version)
    except ValueError:
        raise _invalid(
            "version", f"Parameter 'version' must be an integer, got '{version[:80]}'; take one of its versions"
        ) from None
    return number if 0 <= number < 2**31 else 0  # 0 is no version


def stage_of(stage: str) -> Stage:
    """Return the stage of this name, in any spelling."""
    try:
        return Stage(stage.lower())
    except ValueError:
        names = ", ".join(item.shown for item in Stage)
        raise _invalid("stage", f"Invalid Model Version stage: {stage[:80]}. Value is unknown; use {names}") from None


def _too_long(name: str, value: str, limit: int) -> str:
    return f"{name} '{value[:80]}' had length {len(value)}, which exceeded length limit of {limit}; shorten it"
