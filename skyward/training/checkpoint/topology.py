"""Ranks, their nodes and groups, and which rank writes which piece of a component.

A component is written as *pieces*. A piece is one state, with the ranks that hold it and the one that writes it.
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


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Place of a rank, as the rank itself reports it.

    Args:
        rank: number of the rank.
        host: identity of the machine, different for two machines with the same name.
        local_rank: number on the node; None if unknown.
        groups: ranks of the groups that this rank is in, by name.
    """

    rank: int
    host: str
    local_rank: int | None
    groups: Mapping[str, tuple[int, ...]]

    @classmethod
    def here(cls, rank: int, groups: Mapping[str, tuple[int, ...]]) -> RankPlace:
        """Return the place of this process."""
        local = os.environ.get("LOCAL_RANK")
        # GROUP_RANK is the number of a node, set by torchrun and by the integrations.
        host = f"{platform.node()}/{_boot_id()}/{os.environ.get('GROUP_RANK', '')}"
        return cls(rank=rank, host=host, local_rank=int(local) if local else None, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One state of a component.

    Args:
        component: key of the component.
        index: number of the piece among the component's.
        members: ranks that hold it, ascending; the first one writes it.
        filename: name of its file.
    """

    component: str
    index: int
    members: tuple[int, ...]
    filename: str

    @property
    def writer(self) -> int:
        return self.members[0]


@dataclass(frozen=True, kw_only=True)
class RankTopology:
    """Nodes and groups of a world.

    Args:
        world_size: number of ranks.
        nodes: ranks of each node.
        groups: ranks of each group, by name, ordered by the first rank.
    """

    world_size: int
    nodes: tuple[tuple[int, ...], ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[RankPlace]) -> RankTopology:
        """Build the topology from the reports of all ranks, by rank.

        Raises:
            UsageError: the reports contradict each other.
        """
        return cls(world_size=len(members), nodes=_nodes(members), groups=_groups(members))

    def pieces(self, component: StateComponent) -> tuple[Piece, ...]:
        """Divide a component into pieces.

        Raises:
            UsageError: the component names an unknown group.
        """
        key, everyone = component.key, tuple(range(self.world_size))
        pattern, name = component.sharing_pattern, component.process_group_name or ""
        parts: list[tuple[tuple[int, ...], str]]
        if pattern is SharingPattern.PER_RANK:
            parts = [((rank,), f"{key}_state_rank_{rank}.pt") for rank in everyone]
        elif pattern is SharingPattern.PER_NODE:
            parts = [(node, f"{key}_state_node_{at}_rank_{node[0]}.pt") for at, node in enumerate(self.nodes)]
        elif pattern is SharingPattern.PER_GROUP:
            if name not in self.groups:
                raise UsageError(
                    f"process_group_name={name!r}: StateComponent {key!r} names an unknown group; "
                    f"use one of process_groups: {sorted(self.groups)}"
                )
            parts = [(group, f"{key}_state_group_{name}_grank_0_rank_{group[0]}.pt") for group in self.groups[name]]
        else:
            parts = [(everyone, f"{key}_state.pt")]
        return tuple(
            Piece(component=key, index=at, members=members, filename=filename)
            for at, (members, filename) in enumerate(parts)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": [list(node) for node in self.nodes],
            "groups": {name: [list(group) for group in groups] for name, groups in self.groups.items()},
        }


def ranks_of_groups(process_groups: Mapping[str, Any], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of this rank's groups, by name.

    Args:
        process_groups: by name: a group of torch, a list of ranks, or a list of such lists.
        rank: number of this rank.

    Raises:
        UsageError: a value is none of these.
    """
    own_groups: dict[str, tuple[int, ...]] = {}
    for name, group in process_groups.items():
        if group is None:
            continue
        if isinstance(group, Sequence) and not isinstance(group, str):
            lists = group if group and isinstance(group[0], Sequence) else [group]
            ranks = next((tuple(sorted(group_ranks)) for group_ranks in lists if rank in group_ranks), ())
        else:
            ranks = _ranks_of_torch(name, group)
        if ranks:
            own_groups[name] = ranks
    return own_groups


def _ranks_of_torch(name: str, group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"process_groups[{name!r}]={group!r}: not a process group of torch.distributed; "
            "pass such a group, or a list of ranks"
        ) from error


def _nodes(members: Sequence[RankPlace]) -> tuple[tuple[int, ...], ...]:
    """Divide ranks into nodes by host. A host whose local ranks start again is another node, as in tests."""
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
    groups_by_name: dict[str, set[tuple[int, ...]]] = {}
    for member in members:
        for name, ranks in member.groups.items():
            for other in ranks:
                answer = members[other].groups.get(name) if other < len(members) else None
                if answer != ranks:
                    raise UsageError(
                        f"process_groups[{name!r}]={list(ranks)}: rank {member.rank} reports this, but rank {other} "
                        f"reports {None if answer is None else list(answer)}; pass the same group on all its members"
                    )
            groups_by_name.setdefault(name, set()).add(ranks)
    return {name: tuple(sorted(groups)) for name, groups in sorted(groups_by_name.items())}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no /proc, as on macOS: the hostname has to suffice
        return ""
