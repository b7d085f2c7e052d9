"""Which ranks are there, on which nodes, in which groups; and what follows: who writes which piece of a component.

A component is written as *pieces*: one state each, with the ranks that hold it and the one that writes it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .patterns import SharingPattern, StateComponent

__all__ = ["RankPlace", "Piece", "RankTopology", "ranks_of_groups"]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What a rank says of itself.

    host: tells machines apart, also two with one name. local_rank: None where nothing says it.
    groups: by name, the ranks of the group that it is in.
    """

    rank: int
    host: str
    local_rank: int | None
    groups: Mapping[str, tuple[int, ...]]

    @classmethod
    def here(cls, rank: int, groups: Mapping[str, tuple[int, ...]]) -> RankPlace:
        local = os.environ.get("LOCAL_RANK")
        # GROUP_RANK is torchrun's number of a node, and that of skyward's integrations.
        host = f"{platform.node()}/{_boot_id()}/{os.environ.get('GROUP_RANK', '')}"
        return cls(rank=rank, host=host, local_rank=int(local) if local else None, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One state of a component. index: among the component's; members: the ranks that hold it, ascending."""

    component: str
    index: int
    members: tuple[int, ...]
    filename: str

    @property
    def writer(self) -> int:
        return self.members[0]


@dataclass(frozen=True, kw_only=True)
class RankTopology:
    """world_size; nodes: the ranks of each; groups: by name, the ranks of each, in the order of their first."""

    world_size: int
    nodes: tuple[tuple[int, ...], ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[RankPlace]) -> RankTopology:
        """From what all ranks said, by rank. Raises: UsageError where they contradict one another."""
        return cls(world_size=len(members), nodes=_nodes(members), groups=_groups(members))

    def pieces(self, component: StateComponent) -> tuple[Piece, ...]:
        """Raises: UsageError for a group that is not known."""
        key, everyone = component.key, tuple(range(self.world_size))
        pattern, name = component.sharing_pattern, component.process_group_name or ""
        found: list[tuple[tuple[int, ...], str]]
        if pattern is SharingPattern.PER_RANK:
            found = [((rank,), f"{key}_state_rank_{rank}.pt") for rank in everyone]
        elif pattern is SharingPattern.PER_NODE:
            found = [(node, f"{key}_state_node_{at}_rank_{node[0]}.pt") for at, node in enumerate(self.nodes)]
        elif pattern is SharingPattern.PER_GROUP:
            if name not in self.groups:
                raise UsageError(
                    f"StateComponent {key!r}: process_group_name={name!r} is not one of process_groups: "
                    f"{sorted(self.groups)}"
                )
            found = [(group, f"{key}_state_group_{name}_grank_0_rank_{group[0]}.pt") for group in self.groups[name]]
        else:
            found = [(everyone, f"{key}_state.pt")]
        return tuple(
            Piece(component=key, index=at, members=members, filename=filename)
            for at, (members, filename) in enumerate(found)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": [list(node) for node in self.nodes],
            "groups": {name: [list(group) for group in groups] for name, groups in self.groups.items()},
        }


def ranks_of_groups(process_groups: Mapping[str, Any], rank: int) -> dict[str, tuple[int, ...]]:
    """By name, the ranks of the group that this one is in. Groups: torch's, lists of ranks, or lists of those.

    Raises: UsageError for what is neither.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, group in process_groups.items():
        if group is None:
            continue
        if isinstance(group, Sequence) and not isinstance(group, str):
            lists = group if group and isinstance(group[0], Sequence) else [group]
            ranks = next((tuple(sorted(group_ranks)) for group_ranks in lists if rank in group_ranks), ())
        else:
            ranks = _ranks_of_torch(name, group)
        if ranks:
            found[name] = ranks
    return found


def _ranks_of_torch(name: str, group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"process_groups[{name!r}]: {group!r} is no process group of torch.distributed, and no list of ranks"
        ) from error


def _nodes(members: Sequence[RankPlace]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host; a host whose local ranks begin again is another node (two on one machine, as in tests)."""
    nodes: list[list[RankPlace]] = []
    current: dict[str, list[RankPlace]] = {}
    for member in members:
        node = current.get(member.host)
        taken = [] if node is None else [other.local_rank for other in node]
        if node is None or member.local_rank == 0 or (member.local_rank is not None and member.local_rank in taken):
            node = current[member.host] = []
            nodes.append(node)
        node.append(member)
    return tuple(tuple(member.rank for member in node) for node in nodes)


def _groups(members: Sequence[RankPlace]) -> dict[str, tuple[tuple[int, ...], ...]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for member in members:
        for name, ranks in member.groups.items():
            for other in ranks:
                said = members[other].groups.get(name) if other < len(members) else None
                if said != ranks:
                    raise UsageError(
                        f"process_groups[{name!r}]: rank {member.rank} says that it is ranks {list(ranks)}, and rank "
                        f"{other} says {None if said is None else list(said)}; all members must give the same group"
                    )
            found.setdefault(name, set()).add(ranks)
    return {name: tuple(sorted(groups)) for name, groups in sorted(found.items())}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no /proc, as on macOS: the host name has to do
        return ""
