"""PyTorch: the variables that torchrun sets, and a process group that is open while the user's function runs.

Which device belongs to a rank is as under torchrun: all devices of the node stay visible and `LOCAL_RANK` is the
index of the rank's own, made current before the function is called. One device for each process by
`CUDA_VISIBLE_DEVICES` was rejected: `cuda:{LOCAL_RANK}`, which scripts, Accelerate and Lightning compute, would then
name a device that the process does not see (Ray went the same way back, ray-project/ray#40803).
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
from .rendezvous import MEETING_LIMIT_S, listen_at_head, wait_for_head

__all__ = ["TorchIntegration", "torch"]

_LEAVING_LIMIT_S = 1.0
"""Seconds that leaving the group may take after the function raised; the process ends next, and with it the group."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class TorchIntegration(IntegrationBase):
    """Runs the function as the ranks of a `torch.distributed` process group; use it bare or with options.

    With `@ pool` the ranks are those of all nodes, with `>> pool` those of one node. The group is open before the
    function is called, also for a world of one, and destroyed when it ends. Every rank is a new process that no call
    has used before. Outside a pool, and in `.local(...)`, the function is simply called. It stands below
    `@sky.compute`, and stacks with other integrations and output decorators in any order.

    Args:
        backend: "nccl", "gloo" or what else `init_process_group` takes; None: nccl where each rank of the node has a
            GPU of its own, gloo otherwise.
        processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, at least one.
        seed: in [0, 2**32); seeds `random`, numpy and torch (CPU and GPUs) alike in every rank before the function
            is called. None: they are not touched.
        timeout_s: seconds, > 0, that a collective waits for the other ranks; None: torch's own (30 minutes for gloo,
            10 for nccl).

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

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
    # DistributedDataParallel and every optimizer load torch._dynamo when they are made: 1.8 s of the first step.
    preload: ClassVar[tuple[str, ...]] = ("torch", "torch.distributed", "torch._dynamo", "numpy.random")

    backend: str | None = None
    seed: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is not None and not (isinstance(self.backend, str) and self.backend):
            raise UsageError(f'{self.name}: backend={self.backend!r}; it is "nccl", "gloo", another name, or None')
        check_seed(self.name, self.seed)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"{self.name}: timeout_s={self.timeout_s!r}; it is a number of seconds > 0, or None")

    def environment(self, rank: Rank) -> dict[str, str]:
        """What torchrun sets, and where to listen. What is the user's choice is only set where there is none."""
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
        # Imported with one thread, so that the process could be forked.
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
        if dist.is_initialized():  # unless the function has destroyed it
            dist.destroy_process_group()

    def _check_shared_group(self, dist: Any) -> None:
        """The group is that of an integration further out, which also destroys it. Raises UsageError."""
        is_other = self.backend is not None and _devices_of(dist, self.backend) != dist.get_backend_config()
        if is_other or self.timeout_s is not None:
            option = f"backend={self.backend!r}" if is_other else f"timeout_s={self.timeout_s!r}"
            raise UsageError(
                f"{self.name}: {option} comes too late: an integration above it has opened the process group "
                f"({dist.get_backend_config()}); give the option to the uppermost of them"
            )

    def _open_group(self, framework: Any, rank: Rank, device: Any) -> None:
        """Returns when all ranks have met. Raises RendezvousFailed."""
        dist = framework.distributed
        backend = self.backend or ("nccl" if _each_has_a_gpu(framework, rank) else "gloo")
        if "nccl" in backend and not framework.cuda.is_available():
            raise UsageError(
                f"{self.name}: backend={backend!r}: node {rank.node} has no GPU that torch can use; leave backend out, "
                "which is nccl where each rank has a GPU of its own and gloo elsewhere",
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
                f"rank {rank.rank} of {rank.world_size} could not meet the others at "
                f"{rank.head_addr}:{rank.head_port}: {error}"
            ) from error
        # The store lives in rank 0. Without this, rank 0 could be done and gone before the others have what they
        # need of it; behind a barrier every rank is connected.
        dist.barrier()


torch = decorator_of(TorchIntegration)


def _open_store(dist: Any, rank: Rank) -> Any:
    """The store that the ranks meet at. Rank 0 listens, on the pool's private address only."""
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
    """The rank's GPU, made the current one; None on CPU. Ranks share GPUs where there are fewer of these."""
    if not framework.cuda.is_available():
        return None
    device = framework.device("cuda", rank.local_rank % framework.cuda.device_count())
    framework.cuda.set_device(device)
    return device


def _each_has_a_gpu(framework: Any, rank: Rank) -> bool:
    """Nccl refuses two ranks on one GPU. All ranks of a node answer alike."""
    if rank.shares_devices or not framework.cuda.is_available():
        return False
    return rank.local_world_size <= int(framework.cuda.device_count())


def _devices_of(dist: Any, backend: str) -> str:
    """Which backend serves which device, as `get_backend_config` writes it."""
    return str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))


def _seed_all(framework: Any, seed: int) -> None:
    random.seed(seed)
    with suppress(ModuleNotFoundError):  # torch works without numpy
        import_module("numpy.random").seed(seed)
    framework.manual_seed(seed)  # of the CPU and of every accelerator


def _leave_within_limit(dist: Any) -> None:
    """Destroy the group where it can be done: with ranks gone, a backend may wait for them."""

    def destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    leaving = threading.Thread(target=destroy, name="skyward-leave-group", daemon=True)
    leaving.start()
    leaving.join(_LEAVING_LIMIT_S)
