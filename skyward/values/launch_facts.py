"""Launch of a gang as a process sees it that starts the gang and never loads the integrations."""

from __future__ import annotations

from typing import Protocol

from ..core.records import dataclass
from .launch import RanksPerNode, Returns


class GangLaunch(Protocol):
    """Launch of a gang as those see it who start it and cannot load the integrations."""

    @property
    def is_gang(self) -> bool: ...
    @property
    def ranks_per_node(self) -> RanksPerNode: ...
    @property
    def returns(self) -> Returns: ...
    @property
    def sees_neighbours(self) -> bool: ...
    @property
    def preload(self) -> tuple[str, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Plain facts of a launch: all that a process needs of it that never loads the integrations; see `GangLaunch`."""

    is_gang: bool
    ranks_per_node: RanksPerNode
    returns: Returns
    sees_neighbours: bool
    preload: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Names of the integrations, for messages."""

    @classmethod
    def of(cls, launch: GangLaunch) -> LaunchFacts:
        return cls(
            is_gang=launch.is_gang,
            ranks_per_node=launch.ranks_per_node,
            returns=launch.returns,
            sees_neighbours=launch.sees_neighbours,
            preload=launch.preload,
            names=launch.names,
        )
