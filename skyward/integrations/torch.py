"""PyTorch: torchrun's variables, and a process group that is open while the user's function runs.

Devices are assigned as under torchrun. The ranks of a gang on one node see the gang's devices there, and no others.
`LOCAL_RANK` is the index of the rank's own device, and that one is made current before the function is called. Hiding
the neighbours' devices too was rejected: scripts, Accelerate and Lightning compute `cuda:{LOCAL_RANK}`, and FSDP's
hybrid sharding counts the devices of the node (Ray hid them and went back, ray-project/ray#40803).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar

from ..errors import RendezvousFailed, UsageError
from ..values.topology import Rank
from .base import IntegrationBase, check_seed, decorator_of, load_framework, numeric_threads
from .rendezvous import MEETING_LIMIT_S, OPEN_PORTS, listen_at_head, wait_for_head

_LEAVING_LIMIT_S = 1.0
"""Seconds that leaving the group may take after an exception. The process ends next anyway, and its group with it."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class TorchIntegration(IntegrationBase):
    """Run the function as the ranks of a `torch.distributed` process group; use it bare or with options.

    `@ pool` starts ranks on all nodes, `>> pool` on one node. The group is open before the function is called, even if
    there is a single rank, and is destroyed when the function ends. Every rank is a new process. Outside a pool, and in
    `.local(...)`, the function is called as it is. Write the decorator below `@sky.compute`; it stacks with other
    integrations and output decorators in any order.

    Args:
        backend: "nccl", "gloo" or another backend of `init_process_group`. None: nccl if each rank of the node has a
            GPU of its own, otherwise gloo.
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, at least one.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.
        seed: in [0, 2**32). Seeds `random`, numpy and torch (CPU and GPUs) with the same value in every rank before the
            function is called. None: leaves the generators as they are.
        timeout_s: seconds, > 0, that a collective waits for the other ranks. None: torch's default (30 minutes with
            gloo, 10 with nccl).

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

    Example:
        >>> @torch(backend="gloo", seed=0)
        ... def rank_sum() -> float:
        ...     import torch, torch.distributed as dist
        ...     ranks = torch.tensor(float(dist.get_rank()))
        ...     dist.all_reduce(ranks)
        ...     return ranks.item()
        >>> rank_sum.__name__
        'rank_sum'
    """

    name: ClassVar[str] = "torch"
    extra: ClassVar[str] = "torch"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    sees_neighbours: ClassVar[bool] = True
    # DistributedDataParallel and every optimizer import torch._dynamo when they are created: 1.8 s of the first step.
    preload: ClassVar[tuple[str, ...]] = ("torch", "torch.distributed", "torch._dynamo", "numpy.random")

    backend: str | None = None
    seed: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is not None and not (isinstance(self.backend, str) and self.backend):
            raise UsageError(
                f"backend={self.backend!r}: @{self.name} takes the name of a torch backend, or None; "
                'set backend="nccl" or "gloo"'
            )
        check_seed(self.name, self.seed)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(
                f"timeout_s={self.timeout_s!r}: @{self.name} takes a number of seconds > 0, or None; set timeout_s=600"
            )

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return torchrun's variables and the interface to listen on. Variables that the user has set win."""
        chosen = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // rank.local_world_size))}
        if rank.interface:
            chosen.update(dict.fromkeys(_INTERFACE_VARIABLES, rank.interface))
        return {
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(rank.world_size),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(rank.local_world_size),
            "NODE_RANK": str(rank.node_rank),
            "GROUP_RANK": str(rank.node_rank),
            "GROUP_WORLD_SIZE": str(rank.nodes),
            "ROLE_RANK": str(rank.rank),
            "ROLE_WORLD_SIZE": str(rank.world_size),
            "MASTER_ADDR": rank.head_addr,
            "MASTER_PORT": str(rank.head_port),
            "TORCHELASTIC_RESTART_COUNT": str(rank.restart_count),
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        framework = load_framework("torch", extra=self.extra)
        # The module was imported with one thread, so that the node could fork this process.
        framework.set_num_threads(numeric_threads(rank))
        device = _own_device(framework, rank)
        if self.seed is not None:
            _seed_all(framework, self.seed)
        dist = framework.distributed
        if dist.is_initialized():
            self._check_shared_group(dist)
            yield
            return
        self._open_group(framework, rank, device)
        try:
            yield
        except BaseException:
            _leave_within_limit(dist)
            raise
        if dist.is_initialized():  # the function may have destroyed it
            dist.destroy_process_group()

    def _check_shared_group(self, dist: Any) -> None:
        """Check that the group of an outer integration, which also destroys it, fits these options.

        Raises:
            UsageError: this integration asks for another backend, or for a timeout.
        """
        is_other = self.backend is not None and _devices_of(dist, self.backend) != dist.get_backend_config()
        if is_other or self.timeout_s is not None:
            option = f"backend={self.backend!r}" if is_other else f"timeout_s={self.timeout_s!r}"
            raise UsageError(
                f"{option}: @{self.name} cannot apply it, because an integration above has opened the process group "
                f"({dist.get_backend_config()}); pass the option to the topmost integration"
            )

    def _open_group(self, framework: Any, rank: Rank, device: Any) -> None:
        """Open the process group, and return when all ranks have connected.

        Raises:
            RendezvousFailed: the ranks could not connect to each other.
            UsageError: the backend is nccl, and this node has no GPU, or fewer than ranks.
        """
        dist = framework.distributed
        backend = self.backend or ("nccl" if _each_has_a_gpu(framework, rank) else "gloo")
        if "nccl" in backend and not framework.cuda.is_available():
            raise UsageError(
                f"backend={backend!r}: node {rank.node} has no GPU that torch can use; remove backend=: the default is "
                "nccl if each rank has a GPU of its own, otherwise gloo",
                field="backend",
                value=backend,
            )
        if "nccl" in backend and not _each_has_a_gpu(framework, rank):
            raise UsageError(
                f"backend={backend!r}: ranks of node {rank.node} share a GPU, which nccl refuses; remove backend=, or "
                "start one rank for each GPU",
                field="backend",
                value=backend,
            )
        options: dict[str, Any] = {}
        if self.timeout_s is not None:
            options["timeout"] = timedelta(seconds=self.timeout_s)
        if device is not None and "nccl" in backend:
            options["device_id"] = device
        try:
            store = _open_store(dist, rank)
            dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, **options)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RendezvousFailed(
                f"rank {rank.rank} of {rank.world_size}: could not connect to the others at "
                f"{rank.head_addr}:{rank.head_port} ({error}); {OPEN_PORTS}"
            ) from error
        # Rank 0 hosts the store. Without a barrier it could finish and exit before the others have read all that they
        # need from the store. Behind the barrier every rank is connected, and the store is no longer needed.
        dist.barrier()


torch = decorator_of(TorchIntegration)


def _open_store(dist: Any, rank: Rank) -> Any:
    """Open the store of the rendezvous. Rank 0 listens, on the pool's private address only."""
    listener = None
    if rank.rank == 0:
        listener = listen_at_head(rank)
    else:
        wait_for_head(rank)
    return dist.TCPStore(
        rank.head_addr,
        rank.head_port,
        rank.world_size,
        is_master=rank.rank == 0,
        timeout=timedelta(seconds=MEETING_LIMIT_S),
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _own_device(framework: Any, rank: Rank) -> Any:
    """Make the rank's GPU the current one and return it; None on the CPU. Ranks share GPUs if there are too few."""
    if not framework.cuda.is_available():
        return None
    device = framework.device("cuda", rank.local_rank % framework.cuda.device_count())
    framework.cuda.set_device(device)
    return device


def _each_has_a_gpu(framework: Any, rank: Rank) -> bool:
    """Return whether each rank has a GPU of its own: nccl refuses two ranks on one. All ranks of a node agree."""
    if rank.shares_devices or not framework.cuda.is_available():
        return False
    return rank.local_world_size <= int(framework.cuda.device_count())


def _devices_of(dist: Any, backend: str) -> str:
    """Return which backend serves which device, in the format of `get_backend_config`."""
    return str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))


def _seed_all(framework: Any, seed: int) -> None:
    random.seed(seed)
    with suppress(ModuleNotFoundError):  # torch works without numpy
        import_module("numpy.random").seed(seed)
    framework.manual_seed(seed)  # the CPU and every accelerator


def _leave_within_limit(dist: Any) -> None:
    """Destroy the group if that succeeds in time: a backend may wait forever for ranks that are gone."""

    def destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    leaving = threading.Thread(target=destroy, name="skyward-leave-group", daemon=True)
    leaving.start()
    leaving.join(_LEAVING_LIMIT_S)
