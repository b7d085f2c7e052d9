"""What options of evaluation must be, said alike wherever they are given."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, get_args

from ...core.spellings import advice
from ...errors import UsageError, WrongArguments

__all__ = ["check_at_least", "check_names", "check_one_of"]


def check_one_of(field: str, value: object, kind: Any) -> None:
    """kind: a Literal. Raises: UsageError."""
    if value not in get_args(kind):
        raise UsageError(f"{field}: {value!r}; it is one of {', '.join(map(repr, get_args(kind)))}")


def check_at_least(field: str, value: object, least: int) -> None:
    """Raises: UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{field}: {value!r}; it is a whole number >= {least}")


def check_names(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check options that a class passes on. Raises: WrongArguments, with the name that was meant."""
    for name in names:
        if name not in known:
            raise WrongArguments(f"{name}: not an option of {place}; {advice(place, name, known)}", field=name)
