"""Secret values of environment variables, which reach the nodes and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from ..errors import UsageError

MASK = "***"
_SHORTEST_MASKED = 4
"""Characters. Shorter values occur in too many unrelated lines."""


class Secret:
    """Value of an environment variable that nobody may see, for `Image(env={"HF_TOKEN": sky.Secret("HF_TOKEN")})`.

    There are three sources. `Secret("NAME")` reads this process's environment when a pool opens.
    `Secret.from_env("NAME")` reads it now. `Secret("NAME", value=...)` takes the value itself, for example from a key
    store.

    The value appears in no repr, no pickle and no hash of the image. On the way to a node it is in no command line, no
    file and no user data. On the node it is a variable of the processes that run calls; their user and root can read
    it. Output lines that contain it show *** instead. Return values, exceptions and other encodings are not masked. An
    unpickled secret reads the environment.

    Args:
        name: Name of the environment variable.
        value: The value; None to read it from the environment when it is needed.

    Raises:
        UsageError: The name is not the name of a variable, or the value is empty.

    Example:
        >>> Secret("HF_TOKEN", value="hf_abcdef")
        Secret('HF_TOKEN')
    """

    __slots__ = ("_name", "_value")

    def __init__(self, name: str, *, value: str | None = None) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # The name is not shown: users who confuse the two pass the secret itself.
            raise UsageError(
                "Secret(name): not a variable name; pass the name of a variable, such as 'HF_TOKEN', not its value"
            )
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise UsageError(f"Secret({name!r}): illegal value; pass a string that is not empty and has no NUL")
        self._name = name
        self._value = value

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """Read the value now. Raises UsageError if the variable is unset or empty."""
        return cls(name, value=cls(name).reveal())

    @property
    def name(self) -> str:
        """Name of the environment variable."""
        return self._name

    def reveal(self) -> str:
        """Return the value in clear. Raises UsageError if the environment has none."""
        value = self._value if self._value is not None else os.environ.get(self._name)
        if not value:
            raise UsageError(
                f"Secret({self._name!r}): the environment variable {self._name} is not set here; set it, or pass "
                f"Secret({self._name!r}, value=...)"
            )
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self._name, self._value) == (other._name, other._value)

    def __hash__(self) -> int:
        return hash((Secret, self._name))

    def __repr__(self) -> str:
        return f"Secret({self._name!r})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self._name,)


def masking(secrets: Iterable[Secret]) -> Callable[[str], str]:
    """Return a function that replaces the secrets in a text with ***. Raises UsageError if a secret has no value."""
    values = sorted({s.reveal() for s in secrets}, key=len, reverse=True)
    parts = [re.escape(value) for value in values if len(value) >= _SHORTEST_MASKED]
    # Output arrives line by line, so each line of a longer value is masked too.
    parts += [re.escape(p) for v in values if "\n" in v for p in v.split("\n") if len(p) >= 2 * _SHORTEST_MASKED]
    if not parts:
        return lambda text: text
    pattern = re.compile("|".join(parts))
    return lambda text: pattern.sub(MASK, text)
