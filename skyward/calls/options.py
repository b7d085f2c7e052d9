"""The options of one call: their values, their checks and their other spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.bounds import is_positive
from ..core.signatures import checked_options
from ..core.spellings import advice
from ..errors import UsageError

__all__ = ["CallOptions", "proper_options"]


@checked_options
@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How one call is run.

    timeout_s: seconds from when the call begins on its slot, > 0; None: no limit.
    retries: how often the call may be run again after the loss of its node or slot, >= 0. With 0 (the default) a
        call runs at most once.
    retry_on: exception types of the user's own for which a retry is spent too.
    max_restarts: how often a gang (a function under an integration) is started again after any failure of a rank,
        >= 0: an exception, a signal, a lost node, a hang. What would fail the same way again is not: a UsageError, a
        timeout, a value that cannot be pickled. `instance_info().restart_count` says which start it is.
    hang_timeout_s: of a gang: seconds, > 0, that a rank may wait in one collective for the others, after which the
        gang is stopped with GangHung, which names the rank that does not come and has each rank's Python stack.
        None: it is never stopped; after 5 minutes the stacks are logged, once.
    name: what logs and errors call it; the function's name by default.
    """

    timeout_s: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for field_name, seconds in (("timeout_s", self.timeout_s), ("hang_timeout_s", self.hang_timeout_s)):
            if seconds is not None and not is_positive(seconds):
                raise UsageError(f"{field_name}: {seconds!r}; it is a number of seconds > 0, or None for no limit")
        for field_name, count in (("retries", self.retries), ("max_restarts", self.max_restarts)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                hint = "; a pause between tries does not exist yet" if isinstance(count, Mapping) else ""
                raise UsageError(f"{field_name}: {count!r}; it is a whole number >= 0{hint}")
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(f"retry_on: {kind!r} is not an exception class; give one, or a tuple of them")
        object.__setattr__(self, "retry_on", kinds)


_ALIASES = {"timeout": "timeout_s"}


def proper_options(given: dict[str, Any]) -> dict[str, Any]:
    """Translate other spellings of options to their names; raise UsageError for an unknown or repeated one."""
    known = CallOptions.__dataclass_fields__
    options: dict[str, Any] = {}
    for name, value in given.items():
        proper = _ALIASES.get(name, name)
        if proper not in known:
            raise UsageError(f"{name}: not an option of a call; {advice('a call', name, known)}", field=name)
        if proper in options:
            raise UsageError(f"{name}: given twice ({proper} is the same option)")
        options[proper] = value
    return options
