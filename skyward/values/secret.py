"""A value that goes to the nodes and nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from ..errors import UsageError

__all__ = ["Secret", "masking"]

MASK = "***"
_SHORTEST_MASKED = 4
"""Characters: what is shorter stands in too many lines that have nothing to do with it."""


class Secret:
    """The value of a variable that nobody is to see, for `Image(env={"HF_TOKEN": sky.Secret("HF_TOKEN")})`.

    `Secret("NAME")` takes the value of this process's environment variable when a pool is opened;
    `Secret.from_env("NAME")` takes it now; `Secret("NAME", value=...)` is given it, from a key store say.

    It is not in its repr, in no pickle (what is unpickled reads the environment), in no hash of the image, and on the
    way to a node in no argument, no file and no user data. There it is a variable of the processes that run calls,
    which their user and root can read. Lines of output that contain it are shown with *** in its place; what a
    function returns, puts into an exception or writes in another encoding is not looked at.

        >>> Secret("HF_TOKEN", value="hf_abcdef")
        Secret('HF_TOKEN')
    """

    __slots__ = ("_name", "_value")

    def __init__(self, name: str, *, value: str | None = None) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"Secret: {name!r}; expected the name of an environment variable, not its value")
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise UsageError(f"Secret({name!r}): its value is empty or no string without NUL")
        self._name = name
        self._value = value

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """The value as it is now. Raises UsageError if the variable is not set, or empty."""
        return cls(name, value=cls(name).reveal())

    @property
    def name(self) -> str:
        return self._name

    def reveal(self) -> str:
        """The value in clear. Raises UsageError if the environment has none."""
        value = self._value if self._value is not None else os.environ.get(self._name)
        if not value:
            raise UsageError(
                f"Secret({self._name!r}): the environment variable {self._name} is not set here; set it, or give "
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
    """A function that puts *** where a text has one of the values. Raises UsageError if one has none."""
    values = sorted({s.reveal() for s in secrets}, key=len, reverse=True)
    parts = [re.escape(value) for value in values if len(value) >= _SHORTEST_MASKED]
    # Of a value with several lines, output has one at a time.
    parts += [re.escape(p) for v in values if "\n" in v for p in v.split("\n") if len(p) >= 2 * _SHORTEST_MASKED]
    if not parts:
        return lambda text: text
    pattern = re.compile("|".join(parts))
    return lambda text: pattern.sub(MASK, text)
