"""What must stand in a process before the user's code is loaded there."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from .topology import Rank

__all__ = ["Integration", "ProcessLaunch", "RanksPerNode"]

RanksPerNode = int | Literal["auto"]


class Integration(Protocol):
    """The node half of a framework's support: picklable without the framework, imported lazily on the node.

    In the rank, `environment` is applied first, then `prepare` is called, and both before anything of the user's is
    unpickled, so an import at the top of the user's module already sees what they did; `session` is entered around
    the user's function, in the order of the decorators.
    """

    @property
    def name(self) -> str: ...

    @property
    def ranks_per_node(self) -> RanksPerNode:
        """Processes on each node; "auto" is one for each accelerator, at least one."""
        ...

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that a node may import once, before ranks are forked. Importing them must start no thread.

        Among them "NAME=value" sets a variable first, for modules that read it while they are imported, and
        "NAME?=value" does where there is none.
        """
        ...

    def environment(self, rank: Rank) -> dict[str, str]: ...

    def prepare(self, rank: Rank) -> None: ...

    def session(self, rank: Rank) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class ProcessLaunch:
    """How the processes of a call are made; plain data, applied first.

    A call without integrations runs in a slot that lives as long as the pool; one with integrations runs as a gang:
    new processes, one for each rank, started together and gone when the call ends.
    """

    integrations: tuple[Integration, ...] = ()

    @functools.cached_property  # asked for each call
    def is_gang(self) -> bool:
        return bool(self.integrations)

    @property
    def ranks_per_node(self) -> RanksPerNode:
        """The largest number any integration asks for; "auto" wins over 1."""
        asked = [i.ranks_per_node for i in self.integrations]
        numbers = [n for n in asked if n != "auto"]
        most = max(numbers, default=1)
        return "auto" if "auto" in asked and most == 1 else most

    @property
    def preload(self) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for integration in self.integrations:
            names.update(dict.fromkeys(integration.preload))
        # Variables first, and in one order: what is imported ahead for one order of the decorators does for another.
        return (*sorted(name for name in names if "=" in name), *(name for name in names if "=" not in name))
