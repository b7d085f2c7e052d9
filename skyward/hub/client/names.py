"""Names: rules for keys that users give, and names of runs that nobody named."""

from __future__ import annotations

import posixpath
import random

from ...errors import UsageError

KEY_LIMIT = 250
"""Longest key in characters. Source: MLflow, mlflow/utils/validation.py."""

_FIRST = ("amber", "bold", "brisk", "calm", "clever", "deft", "eager", "fair", "gentle", "keen", "mellow", "vivid")
_SECOND = ("badger", "cedar", "comet", "crane", "ember", "falcon", "fern", "heron", "maple", "otter", "raven", "reef")


def random_name() -> str:
    """Return a name such as `swift-heron-204`."""
    chance = random.Random()  # its own state: a seed that training sets must not repeat names
    return f"{chance.choice(_FIRST)}-{chance.choice(_SECOND)}-{chance.randrange(100, 1000)}"


def check_key(key: object, what: str = "key") -> str:
    """Return a key of a metric, parameter, tag or artifact.

    Raises:
        UsageError: it is no text, too long, or would be a path outside.
    """
    problem = None
    if not isinstance(key, str) or not key:
        problem = "is not a text"
    elif len(key) > KEY_LIMIT:
        problem = f"has more than {KEY_LIMIT} characters"
    elif key != posixpath.normpath(key) or key == "." or key.startswith(("..", "/")) or "\0" in key:
        problem = "is not a plain path"
    if problem is not None:
        raise UsageError(
            f"{what}={key!r:.60}: {problem}; use a name such as 'loss' or 'eval/loss'", field=what, value=key
        )
    assert isinstance(key, str)
    return key
