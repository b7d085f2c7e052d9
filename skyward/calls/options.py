"""Options of one call: values, checks and aliases."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..accelerators import Accelerator
from ..core.bounds import is_positive
from ..core.records import dataclass
from ..core.signatures import checked_options, repeated
from ..core.spellings import advice
from ..errors import UsageError
from ..schedule.resources import Need
from .needs import check_node_count, need_of


@checked_options
@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Options of one call: time limit, retries, restarts, name and resources.

    The keyword arguments of `@sky.compute(...)` and `.with_options(...)` are these fields.

    Args:
        timeout_s: Seconds that the call may run on its slot, > 0. None: no limit.
        retries: Retries after the loss of the node or slot, >= 0. With the default 0, a call runs at most once.
        retry_on: Exception class, or a tuple of them, for which the call is retried too.
        retry_delay_s: Seconds, >= 0, between a failure and the retry that `retries` pays for. The pause doubles with
            each retry, up to 5 minutes, and each is up to half longer by chance. The slot is free meanwhile. Restarts
            by `max_restarts` wait too.
        retries_on_loss: Further retries, >= 0, that only the loss of a node spends: a lost machine, or one that its
            provider took back. They are spent before `retries`, and start at once on another node or the replacement.
        max_restarts: Restarts of a gang (a function under an integration) after any failure of a rank, >= 0: an
            exception, a signal, a lost node, a hang. Failures that would repeat are not restarted: a UsageError, a
            timeout, a value that cannot be pickled. `instance_info().restart_count` counts the restarts.
        hang_timeout_s: Seconds, > 0, that ranks of a gang may wait for another rank in one collective. Then the gang
            is stopped with GangHung, which names the missing rank and holds each rank's Python stack. None: the gang
            is never stopped, and the stacks are logged once, after 5 minutes.
        name: Name of the call in logs and errors. Default: the function's name.
        cpus: Processors that the call books on its node, > 0, such as 2 or 0.5. None: none. It gets no more where the
            node enforces that: see `instance_info().enforced`. `concurrency` stays the upper bound of calls on a node.
        gpus: Devices that the call books and sees: a whole number, a share of one below 1, or 0 to hide all. None: the
            equal share of its slot, which is all of them with one slot. A gang books this number on each node, for all
            of its ranks there.
        memory_gib: Memory that the call books, in GiB, > 0. None: none. Where the node enforces it, a call that uses
            more is killed, and fails with OutOfMemory.
        accelerator: Kind of these devices, such as "A100"; for nodes that differ. Without `gpus`, it books one.
        nodes: Number of nodes, >= 1. The call then runs as a gang on any of them that are free, wherever it is sent,
            and its value is the list of theirs. None: one node, and one value.

    Raises:
        UsageError: An option is unknown or outside its range.

    Example:
        >>> CallOptions(retries=2, timeout_s=60.0).retries
        2
    """

    timeout_s: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    retry_delay_s: float = 0.0
    retries_on_loss: int = 0
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    name: str | None = None
    cpus: float | None = None
    gpus: float | None = None
    memory_gib: float | None = None
    accelerator: str | Accelerator | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        check_node_count(self.nodes)
        need_of(self.cpus, self.gpus, self.memory_gib, self.accelerator)
        for field_name, seconds in (("timeout_s", self.timeout_s), ("hang_timeout_s", self.hang_timeout_s)):
            if seconds is not None and not is_positive(seconds):
                raise UsageError(
                    f"{field_name}={seconds!r}: must be a number of seconds > 0; pass None for no limit",
                    field=field_name,
                    value=seconds,
                )
        if not is_positive(self.retry_delay_s, or_zero=True):
            raise UsageError(
                f"retry_delay_s={self.retry_delay_s!r}: must be a number of seconds >= 0; set retry_delay_s=2, for "
                "example",
                field="retry_delay_s",
                value=self.retry_delay_s,
            )
        for field_name in ("retries", "retries_on_loss", "max_restarts"):
            count = getattr(self, field_name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                hint = "; for a pause between retries, set retry_delay_s=2" if isinstance(count, Mapping) else ""
                raise UsageError(
                    f"{field_name}={count!r}: must be a whole number >= 0{hint}; set {field_name}=3, for example",
                    field=field_name,
                    value=count,
                )
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(
                    f"retry_on={kind!r}: not an exception class; pass a class such as OSError, or a tuple of classes",
                    field="retry_on",
                    value=kind,
                )
        object.__setattr__(self, "retry_on", kinds)

    @functools.cached_property  # read for every call
    def need(self) -> Need | None:
        """Return the resources that the call books; None if it says no numbers."""
        return need_of(self.cpus, self.gpus, self.memory_gib, self.accelerator)

    @property
    def allow_reruns(self) -> bool:
        """Return whether the call may run more than once."""
        return self.retries > 0 or self.retries_on_loss > 0


_ALIASES = {"timeout": "timeout_s"}


def proper_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Translate aliases to option names. Raises UsageError for an unknown or repeated option."""
    known = CallOptions.__dataclass_fields__
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        proper = _ALIASES.get(name, name)
        if proper not in known:
            raise UsageError(f"{name}: not an option of a call; {advice('a call', name, known)}", field=name)
        if proper in options:
            raise UsageError(repeated(name, proper), field=name)
        options[proper] = value
    return options
