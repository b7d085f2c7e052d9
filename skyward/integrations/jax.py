"""JAX: one program over the devices of all ranks, met by `jax.distributed.initialize` before the user's code is loaded.

Before, not around the function as other frameworks are: the first array that is made, by a line at the top of the
user's module or by an argument that is unpickled, fixes which devices there are, and JAX refuses to meet after that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from ..errors import RendezvousFailed, UsageError
from ..node.slot.ports import PortLocks, port_behind
from ..values.topology import Rank
from .base import IntegrationBase, decorator_of, load_framework, numeric_threads
from .rendezvous import MEETING_LIMIT_S, listen_at_head, past_the_proxy, wait_for_head

__all__ = ["JaxIntegration", "jax"]

_LEAVING_LIMIT_S = 30 * 24 * 3600
"""Seconds that a rank which is done waits for the others. JAX aborts the process after five minutes; here a rank that
fails stops the rest, and one that works on, such as the one that evaluates, may take its time."""


@dataclass(frozen=True, kw_only=True)
class JaxIntegration(IntegrationBase):
    """Runs the function as the processes of one JAX program; use it bare or with options.

    With `@ pool` the processes are those of all nodes, with `>> pool` those of one node. `jax.devices()` are the
    devices of all of them, `jax.local_devices()` those of this process. They have met before the user's code is
    loaded, also for a world of one, and part when all functions have ended. Every rank is a new process that no call
    has used before. Outside a pool, and in `.local(...)`, the function is simply called. It stands below
    `@sky.compute`, and stacks with other integrations and output decorators in any order.

    Args:
        processes_per_node: ranks on each node, >= 1; they share its accelerators evenly. "auto" is one for each
            accelerator, at least one. JAX itself is at its best with 1: a process uses all devices of its node.
        local_device_count: devices that a process without accelerators has, >= 1; None: what JAX's own settings say,
            which is one.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: JAX is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

    Example:
        >>> @jax(processes_per_node=2)
        ... def rank_sum() -> float:
        ...     import jax
        ...     from jax.experimental.multihost_utils import process_allgather
        ...     return float(process_allgather(jax.process_index()).sum())
        >>> rank_sum.__name__
        'rank_sum'
    """

    name: ClassVar[str] = "jax"
    extra: ClassVar[str] = "jax"
    packages: ClassVar[tuple[str, ...]] = ("jax",)
    # Importing them starts no thread where OpenBLAS is told to have one (jax 0.10), and takes 0.45 s of each rank
    # otherwise. Devices are looked for later, when the first of them is asked for.
    preload: ClassVar[tuple[str, ...]] = ("jax", "jax.numpy", "numpy.random")

    local_device_count: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.local_device_count
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if count is not None and not is_count:
            raise UsageError(f"jax: local_device_count={count!r}; it is a whole number >= 1, or None")

    def environment(self, rank: Rank) -> dict[str, str]:
        """Where the ranks meet. What is the user's choice is only set where there is none."""
        rank = _at_own_port(rank)
        # The CPU backend else takes a thread for each core of the machine.
        chosen = {"PJRT_NPROC": str(numeric_threads(rank))}
        if rank.interface:
            chosen["NCCL_SOCKET_IFNAME"] = rank.interface
        if rank.shares_devices:  # else the first of two takes three quarters of the memory
            chosen["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        devices = _own_devices(rank)
        if devices:
            chosen["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
        # In the environment, where it holds whichever integration on the function makes JAX's processes meet.
        on_cpu = {} if self.local_device_count is None else {"JAX_NUM_CPU_DEVICES": str(self.local_device_count)}
        cpus = on_cpu.get("JAX_NUM_CPU_DEVICES") or os.environ.get("JAX_NUM_CPU_DEVICES") or "1"
        return {
            **on_cpu,
            "JAX_LOCAL_DEVICE_COUNT": str(len(devices) or rank.accelerators or cpus),
            "JAX_COORDINATOR_ADDRESS": _endpoint(rank.head_addr, rank.head_port),
            "JAX_NUM_PROCESSES": str(rank.world_size),
            "JAX_PROCESS_ID": str(rank.rank),
            **({**direct, "JAX_CHECK_PROXY_ENVS": "0"} if (direct := past_the_proxy([rank.head_addr])) else {}),
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    def prepare(self, rank: Rank) -> None:
        framework = load_framework("jax", extra=self.extra)
        if framework.distributed.is_initialized():  # by another integration that stands on this one
            return
        _read_environment(framework.config)
        _name_the_address(rank)
        rank = _at_own_port(rank)
        if rank.rank == 0:
            PortLocks(rank.local_addr).hold(rank.head_port)  # until the process ends
        _meet(framework, rank)

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        self.prepare(rank)
        framework = load_framework("jax", extra=self.extra)
        # A function that raises leaves at once: JAX parts when all ranks do, and the others may be gone. The process
        # ends next.
        yield
        _finish_computing(framework)
        framework.distributed.shutdown()  # does nothing if the function has done it


jax = decorator_of(JaxIntegration)


def _at_own_port(rank: Rank) -> Rank:
    """JAX meets before the gang's port: there torch meets, which may stand on the same function."""
    return replace(rank, head_port=port_behind(rank.head_port, -1))


def _meet(framework: Any, rank: Rank) -> None:
    """Returns when all ranks have met. Raises RendezvousFailed."""
    options: dict[str, Any] = {}
    if rank.rank == 0:
        # JAX would listen on all interfaces, and on a port that is shared with whoever else shares it.
        with listen_at_head(rank) as probe:
            options["coordinator_bind_address"] = _endpoint(*probe.getsockname()[:2])
    else:
        wait_for_head(rank)
    if "shutdown_timeout_seconds" in inspect.signature(framework.distributed.initialize).parameters:  # 0.9 and later
        options["shutdown_timeout_seconds"] = _LEAVING_LIMIT_S
    try:
        framework.distributed.initialize(
            coordinator_address=_endpoint(rank.head_addr, rank.head_port),
            num_processes=rank.world_size,
            process_id=rank.rank,
            cluster_detection_method="deactivate",  # we know; a Slurm job around us would know something else
            initialization_timeout=int(MEETING_LIMIT_S),
            **options,
        )
    except framework.errors.JaxRuntimeError as error:
        raise RendezvousFailed(
            f"rank {rank.rank} of {rank.world_size} could not meet the others at "
            f"{rank.head_addr}:{rank.head_port}: {error}"
        ) from error


def _finish_computing(framework: Any) -> None:
    """JAX computes behind the caller's back: what the function has begun, its value above all, may still need the
    other ranks. Raises what went wrong there.
    """
    framework.effects_barrier()
    # To ask for arrays would look for devices, which a function without any may do without.
    if import_module("jax._src.xla_bridge").backends_are_initialized():
        framework.block_until_ready([array for array in framework.live_arrays() if not array.is_deleted()])


def _read_environment(config: Any) -> None:
    """JAX reads its variables when it is imported. The process that this one was forked from has done so, before the
    variables of this rank stood.
    """
    for name, text in os.environ.items():
        option = name.lower()
        if name.startswith("JAX_") and option in config.values:
            value = _like(config.values[option], text)
            if value != config.values[option]:
                config.update(option, value)


def _like(current: object, text: str) -> bool | int | float | str:
    if isinstance(current, bool):
        return text.strip().lower() in ("1", "true", "yes", "y", "on", "t")
    if isinstance(current, int | float):
        return type(current)(text)
    return text


def _name_the_address(rank: Rank) -> None:
    """Gloo, which carries the collectives of CPUs, listens at the address of the machine's own name, and many systems
    say that this is 127.0.1.1: other machines would not find it. JAX has no option for it.
    """
    native = import_module("jax._src.lib")._jax
    make = native.make_gloo_tcp_collectives
    if not isinstance(make, partial):
        native.make_gloo_tcp_collectives = partial(make, hostname=rank.local_addr)


def _own_devices(rank: Rank) -> list[int]:
    """The rank's part of its node's accelerators, by their indexes; none: it sees all there are."""
    if rank.local_world_size == 1 or not rank.accelerators:
        return []
    share = rank.accelerators // rank.local_world_size
    if not share:  # ranks share them
        return [rank.local_rank % rank.accelerators]
    return list(range(rank.local_rank * share, (rank.local_rank + 1) * share))


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
