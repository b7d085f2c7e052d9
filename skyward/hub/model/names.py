"""Names and values that clients give, with MLflow's limits."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import unquote

from .refusal import Reason, Refusal

KEY_LENGTH = 250
PARAM_LENGTH = 6_000
TAG_LENGTH = 8_000
EXPERIMENT_TAG_LENGTH = 20_000
EXPERIMENT_NAME_LENGTH = 500
RUN_NAME_LENGTH = 250
ARTIFACT_KEY_LENGTH = 1_000

NAME_TAG = "mlflow.runName"
"""Tag that always equals the name of its run, as in MLflow."""

_KEY = re.compile(r"[\w/.\- :]+")
_NOT_IN_ARTIFACT_KEYS = re.compile(r"[\x00-\x1f\x7f\\#?;]|^[A-Za-z]:")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._@-]{0,61}[a-z0-9])?")
_RUN_ID = re.compile(r"[A-Za-z0-9][\w-]{0,255}", re.ASCII)


def check_key(field: str, key: str) -> None:
    """Check the name of a metric, a parameter or a tag.

    Args:
        field: Name of the field that holds it, for the message.
        key: The name.

    Raises:
        Refusal: It is empty, too long, has forbidden characters, or looks like a path that leads elsewhere.
    """
    problem = _key_problem(key)
    if problem:
        raise Refusal(Reason.INVALID, f"{field}={_shown(key)}: {problem}", field=field)


@lru_cache(maxsize=16_384)
def _key_problem(key: str) -> str:
    if len(key) > KEY_LENGTH:
        return f"has {len(key)} characters; use at most {KEY_LENGTH}"
    if not _KEY.fullmatch(key):
        return "may only contain letters, digits, underscores, dashes, periods, spaces, colons and slashes; rename it"
    if posixpath.normpath(key) != key or key == "." or key.startswith(("..", "/")):
        return "must be a plain relative path, such as train/loss; drop empty parts, `.` and `..`"
    return ""


def check_name(field: str, name: str) -> str:
    """Return a name of a project or a user.

    Raises:
        Refusal: It has other characters than lower-case letters, digits, `.`, `_`, `@` and `-`.
    """
    if not _NAME.fullmatch(name):
        raise Refusal(
            Reason.INVALID,
            f"{field}={name[:80]}: not a name; use 1 to 63 lower-case letters, digits, '.', '_', '@' or '-'",
            field=field,
        )
    return name


def check_run_id(run_id: str) -> None:
    """Check the id of a run that a client made."""
    if not _RUN_ID.fullmatch(run_id):
        raise Refusal(
            Reason.INVALID,
            f"run_id={_shown(run_id)}: must be letters, digits, `_` and `-`, at most 256 and no `_` or `-` first; "
            "use 32 hexadecimal digits",
            field="run_id",
        )


def check_artifact_key(key: str) -> None:
    """Check the name of an artifact: a relative path with forward slashes that leads nowhere else.

    The hub never makes a path of it. Clients do when they download, so that it must be harmless there too.

    Raises:
        Refusal: It is none.
    """
    plain = unquote(unquote(key))
    is_legal = (
        0 < len(key) <= ARTIFACT_KEY_LENGTH
        and not _NOT_IN_ARTIFACT_KEYS.search(plain)
        and not any(part in {"", ".", ".."} for part in plain.split("/"))
    )
    if not is_legal:
        raise Refusal(
            Reason.INVALID,
            f"key={_shown(key)}: Invalid path; use a relative path such as plots/loss.png, without `..`, and without "
            "backslashes, `#`, `?`, `;`, drive letters and control characters",
            field="key",
        )
    check_text("key", key)


def check_experiment_name(name: object) -> str:
    """Check the name of an experiment, and return it."""
    if not isinstance(name, str) or not name.strip():
        raise Refusal(Reason.INVALID, f"name={name!r}: must be a text that is not empty; name it", field="name")
    if len(name) > EXPERIMENT_NAME_LENGTH:
        raise Refusal(
            Reason.INVALID,
            f"name={_shown(name)}: has {len(name)} characters; use at most {EXPERIMENT_NAME_LENGTH}",
            field="name",
        )
    return check_text("name", name)


def check_text(field: str, text: str) -> str:
    """Return a text that a database can hold: without NUL and without lone surrogates."""
    if "\0" in text or (not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)):
        raise Refusal(
            Reason.INVALID, f"{field}={_shown(text)}: has a character that is no text; remove it", field=field
        )
    return text


def cut_values(field: str, values: Mapping[str, str], length: int) -> dict[str, str]:
    """Check names, and cut values to `length` characters, as MLflow's server does by default."""
    cut: dict[str, str] = {}
    for key, value in values.items():
        check_key(f"{field}.key", key)
        cut[key] = check_text(f"{field}[{key}]", value[:length])
    return cut


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
