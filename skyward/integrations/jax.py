"""JAX: one program over the devices of all ranks, joined by `jax.distributed.initialize` before user code is loaded.

Other frameworks can be initialised around the function; JAX cannot. The first array fixes the set of devices, and JAX
refuses to join after that. A line at the top of the user's module can create it, and so can an unpickled argument.
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
from .rendezvous import MEETING_LIMIT_S, OPEN_PORTS, listen_at_head, past_the_proxy, wait_for_head

_LEAVING_LIMIT_S = 30 * 24 * 3600
"""Seconds that a finished rank waits for the others. JAX's own limit of five minutes aborts the process. Here a rank
that fails stops the rest anyway, and a rank that works longer, for example on an evaluation, may take its time."""
_ONE_PROCESS_FOR_EACH_GPU = (
    "skyward: ranks share a GPU, and JAX communicates only between processes that have GPUs of their own; "
    "start one process for each GPU, or set JAX_PLATFORMS=cpu"
)


@dataclass(frozen=True, kw_only=True)
class JaxIntegration(IntegrationBase):
    """Run the function as the processes of one JAX program; use it bare or with options.

    `@ pool` starts processes on all nodes, `>> pool` on one node. `jax.devices()` lists the devices of all processes,
    `jax.local_devices()` those of the current one. The processes join before user code is loaded, even if there is only
    one, and separate when all functions have ended. Every rank is a new process. Outside a pool, and in `.local(...)`,
    the function is called as it is. Write the decorator below `@sky.compute`; it stacks with other integrations and
    output decorators in any order.

    Args:
        processes_per_node: ranks on each node, >= 1; they share its accelerators evenly. "auto" starts one per
            accelerator, at least one. JAX works best with 1, because one process can use all devices of its node.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.
        local_device_count: number of devices, >= 1, of a process without accelerators. None: JAX's own settings decide;
            their default is one.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: JAX is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

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
    # Preloading saves 0.45 s in each rank. It starts no thread if OpenBLAS is limited to one (jax 0.10), and looks for
    # no device: JAX does so when the first one is used.
    preload: ClassVar[tuple[str, ...]] = ("jax", "jax.numpy", "numpy.random")

    local_device_count: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.local_device_count
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if count is not None and not is_count:
            raise UsageError(
                f"local_device_count={count!r}: @jax takes a whole number >= 1, or None; "
                "set local_device_count=1 or more"
            )

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return the address of the rendezvous and the rank's share of the node. The user's own variables win."""
        rank = _at_own_port(rank)
        # By default the CPU backend starts one thread for each core of the machine.
        chosen = {"PJRT_NPROC": str(numeric_threads(rank))}
        if rank.interface:
            chosen["NCCL_SOCKET_IFNAME"] = rank.interface
        if rank.shares_devices:  # otherwise the first of two ranks takes three quarters of the memory
            chosen["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if len(rank.devices) < rank.accelerators:  # beside an integration that sees its neighbours' devices
            chosen["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, rank.devices))
        # Passed by the environment, so that it also holds if another integration on the function initialises JAX.
        on_cpu = {} if self.local_device_count is None else {"JAX_NUM_CPU_DEVICES": str(self.local_device_count)}
        cpus = on_cpu.get("JAX_NUM_CPU_DEVICES") or os.environ.get("JAX_NUM_CPU_DEVICES") or "1"
        return {
            **on_cpu,
            "JAX_LOCAL_DEVICE_COUNT": str(len(rank.devices) or cpus),
            "JAX_COORDINATOR_ADDRESS": _endpoint(rank.head_addr, rank.head_port),
            "JAX_NUM_PROCESSES": str(rank.world_size),
            "JAX_PROCESS_ID": str(rank.rank),
            **({**direct, "JAX_CHECK_PROXY_ENVS": "0"} if (direct := past_the_proxy([rank.head_addr])) else {}),
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    def prepare(self, rank: Rank) -> None:
        framework = load_framework("jax", extra=self.extra)
        if framework.distributed.is_initialized():  # by another integration that builds on this one
            return
        _read_environment(framework.config)
        _name_the_address(rank)
        rank = _at_own_port(rank)
        if rank.rank == 0:
            PortLocks(rank.local_addr).hold(rank.head_port)  # until the process exits
        _meet(framework, rank)

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        self.prepare(rank)
        framework = load_framework("jax", extra=self.extra)
        # A function that raises skips the shutdown: JAX separates only together with all ranks, and the others may be
        # gone. The process exits next.
        try:
            yield
        except framework.errors.JaxRuntimeError as error:
            if rank.shares_devices and "Duplicate GPU" in str(error):
                error.add_note(_ONE_PROCESS_FOR_EACH_GPU)
            raise
        _finish_computing(framework)
        framework.distributed.shutdown()  # does nothing if the function has called it


jax = decorator_of(JaxIntegration)


def _at_own_port(rank: Rank) -> Rank:
    """Return the rank with a port of JAX's own: torch, which may be on the same function, meets at the gang's port."""
    return replace(rank, head_port=port_behind(rank.head_port, -1))


def _meet(framework: Any, rank: Rank) -> None:
    """Join the JAX program, and return when all ranks have.

    Raises:
        RendezvousFailed: the ranks could not connect to each other.
    """
    options: dict[str, Any] = {}
    if rank.rank == 0:
        # By itself JAX would listen on all interfaces, on a port that other processes can share.
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
            cluster_detection_method="deactivate",  # the address is known; a Slurm job around us would name another one
            initialization_timeout=int(MEETING_LIMIT_S),
            **options,
        )
    except framework.errors.JaxRuntimeError as error:
        raise RendezvousFailed(
            f"rank {rank.rank} of {rank.world_size}: could not connect to the others at "
            f"{rank.head_addr}:{rank.head_port} ({error}); {OPEN_PORTS}"
        ) from error


def _finish_computing(framework: Any) -> None:
    """Wait for computations that the function has started, and raise their errors.

    JAX computes asynchronously. Those computations, above all the returned value, may still need the other ranks.
    """
    framework.effects_barrier()
    # Listing arrays would initialise the devices, which a function without arrays does not need.
    if import_module("jax._src.xla_bridge").backends_are_initialized():
        framework.block_until_ready([array for array in framework.live_arrays() if not array.is_deleted()])


def _read_environment(config: Any) -> None:
    """Apply the rank's JAX_ variables to JAX's configuration.

    JAX reads them on import. The process that this one was forked from imported it before they were set.
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
    """Make Gloo, which carries the collectives of CPUs, listen at the rank's address.

    By default it uses the address of the machine's own hostname. Many systems resolve that to 127.0.1.1, where other
    machines cannot connect. JAX has no option for it, so its private factory is replaced.
    """
    native = import_module("jax._src.lib")._jax
    make = native.make_gloo_tcp_collectives
    if not isinstance(make, partial):
        native.make_gloo_tcp_collectives = partial(make, hostname=rank.local_addr)


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
