"""Values of machine sets: machines that jobs may use, declared as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SetKindName = Literal["fixed", "elastic", "external"]

LEASES_S: Mapping[str, float] = {"local": 5.0, "ssh": 60.0}
"""Provider -> seconds after which its machines end by themselves once nobody renews their lease."""
CLOUD_LEASE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSetSpec:
    """A named set of equal machines, and the provider that has them.

    Attributes:
        name: Its name.
        provider: Provider as data: `{"type": "local"}`, or `{"type": "ssh", "hosts": ["a", "b"]}`. Credentials are
            never part of it; launchers have them.
        kind: "fixed": machines that are there. "elastic": rented for a job. "external": behind a queue of their own.
        nodes: Most nodes at once.
        devices: Devices of a node; 1 for a node without accelerators, which is then given as a whole. Jobs share the
            devices of a node only if they are NVIDIA's; declare 1 for those of others.
        accelerator: Type of the devices; empty if it has none.
        vcpus: Virtual CPUs of a node.
        memory_gib: Memory of a node.
        region: Region.
        labels: Labels that jobs may ask for.
        usd_per_hour: Price of a node.
        max_usd_per_hour: Most that all nodes may cost together; None for no limit.
        projects: Names of the projects that may use it; `["*"]` for all. By default all may use rented machines, and
            fixed ones only the project that declares them: projects that share them must trust one another.
        keep_s: Seconds for which machines wait for the next job that fits, where the job says nothing else.
    """

    name: str
    provider: Mapping[str, Any]
    kind: SetKindName = "fixed"
    nodes: int = 1
    devices: int = 1
    accelerator: str = ""
    vcpus: int = 0
    memory_gib: float = 0.0
    region: str = ""
    labels: Sequence[str] = ()
    usd_per_hour: float = 0.0
    max_usd_per_hour: float | None = None
    projects: Sequence[str] | None = None
    keep_s: float = 0.0

    @property
    def has_numbers(self) -> bool:
        """True if jobs get devices by their numbers. Rented machines are one job's alone."""
        return self.kind == "fixed" and (self.devices > 1 or bool(self.accelerator))

    @property
    def lease_s(self) -> float:
        """Seconds for which machines may live on, and write, after their runner is gone."""
        by_default = LEASES_S.get(str(self.provider.get("type")), CLOUD_LEASE_S)
        return float(self.provider.get("lease_s", by_default))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSetRecord:
    """A machine set and its use now.

    Attributes:
        is_draining: Running jobs end, and none begin.
        full_until: Time in milliseconds until which the provider is known to have no machines; 0 for none.
        older_until: Time in milliseconds until which its launchers are taken for too old for some jobs; 0 for none.
        jobs: Job of the project that asks -> number of its nodes here.
        used_nodes: Nodes that jobs of any project use.
        used_devices: Devices that jobs of any project use.
        kept_nodes: Nodes that are kept for the next job.
        kept_cost_usd: Cost of the idle time of those.
    """

    spec: MachineSetSpec
    is_draining: bool = False
    full_until: int = 0
    older_until: int = 0
    jobs: Mapping[str, int] = field(default_factory=dict)
    used_nodes: int = 0
    used_devices: int = 0
    kept_nodes: int = 0
    kept_cost_usd: float = 0.0

    @property
    def idle_nodes(self) -> int:
        """Nodes that are there and that no job uses. Rented machines are there for their job, and for the next one."""
        return max(0, self.spec.nodes - self.used_nodes) if self.spec.kind == "fixed" else self.kept_nodes

    @property
    def usd_per_hour(self) -> float:
        """Price of the nodes that are there now, used or idle."""
        return self.spec.usd_per_hour * (self.used_nodes + self.idle_nodes)
