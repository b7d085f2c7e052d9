"""TensorFlow: the cluster that `tf.distribute.MultiWorkerMirroredStrategy` reads from TF_CONFIG.

Every worker listens on a port of its own. A gang has a single port, that of rank 0; the ports of the workers are
computed from it. Each rank thus knows the whole cluster without communication, and TF_CONFIG is set before the user's
module is imported: a strategy may be created at its top. The port of a rank is locked on its machine while the function
runs. If a process takes the port nevertheless, the engine retries the gang once on other ports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

from ..errors import RendezvousFailed
from ..node.slot.ports import PortLocks, port_behind
from ..values.topology import Rank
from .base import IntegrationBase, decorator_of, load_framework, numeric_threads
from .rendezvous import leaving_together, past_the_proxy

_LOG_LEVEL = "2"
"""Log level of the C++ half unless the user sets one: errors only. An ordinary `fit` logs many needless warnings."""
_SERVER_FAILED = "Could not start gRPC server"
"""Part of the message that a strategy raises when its port is taken."""


@dataclass(frozen=True, kw_only=True)
class TensorFlowIntegration(IntegrationBase):
    """Run the function as the workers of a TensorFlow cluster; use it bare or with options.

    A `tf.distribute.MultiWorkerMirroredStrategy()` that the function creates finds the cluster by itself. `@ pool`
    starts workers on all nodes, `>> pool` on one node. Every rank is a new process. Outside a pool, and in
    `.local(...)`, the function is called as it is. Write the decorator below `@sky.compute`; it stacks with other
    integrations and output decorators in any order.

    While the function runs, Keras 3 can train under that strategy with `model.fit`. Without this integration it fails
    there, see keras-team/keras#20585.

    Args:
        processes_per_node: workers on each node, >= 1. "auto" starts one per accelerator, at least one. A single worker
            uses all GPUs of its node; several workers divide them.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: TensorFlow is not installed on the node.
        RendezvousFailed: in the rank: its port was taken, and so was the port of the retry.

    Example:
        >>> @tensorflow
        ... def workers() -> int:
        ...     import tensorflow as tf
        ...     return tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync
        >>> workers.__name__
        'workers'
    """

    name: ClassVar[str] = "tensorflow"
    extra: ClassVar[str] = "tensorflow"
    packages: ClassVar[tuple[str, ...]] = ("tensorflow",)
    # TensorFlow's C++ half reads the level when it is loaded.
    preload: ClassVar[tuple[str, ...]] = (f"TF_CPP_MIN_LOG_LEVEL?={_LOG_LEVEL}", "tensorflow", "numpy.random")

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return the cluster, this worker's place in it and its share of the node. Variables of the user win."""
        threads = str(numeric_threads(rank))
        chosen = {
            "OMP_NUM_THREADS": threads,
            "TF_NUM_INTRAOP_THREADS": threads,
            "TF_CPP_MIN_LOG_LEVEL": _LOG_LEVEL,
        }
        if rank.shares_devices:  # otherwise the first of two workers takes all of the memory
            chosen["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        config = {
            "cluster": {"worker": [f"{_in_url(host)}:{port}" for host, port in _addresses(rank)]},
            "task": {"type": "worker", "index": rank.rank},
        }
        return {
            "TF_CONFIG": json.dumps(config),
            **_own_devices(rank),
            **past_the_proxy(host for host, _ in _addresses(rank)),
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        framework = load_framework("tensorflow", extra=self.extra)
        if "reduce" in vars(framework.distribute.MultiWorkerMirroredStrategy):
            yield  # another integration builds on this one, and has already done all of the following
            return
        host, port = _addresses(rank)[rank.rank]
        locks = PortLocks(host)
        locks.hold(port)
        end = replace(rank, head_port=port_behind(rank.head_port, 1 + rank.world_size))  # behind those of the workers
        if rank.rank == 0:
            locks.hold(end.head_port)
        try:
            with leaving_together(end, is_needed=_has_cluster), _complete_reduce(framework):
                yield
        except framework.errors.UnknownError as error:
            if _SERVER_FAILED not in str(error):
                raise
            raise RendezvousFailed(
                f"rank {rank.rank} of {rank.world_size}: could not listen on {host}:{port} ({error}); check which "
                "program uses this port"
            ) from error
        finally:
            locks.release_all()


tensorflow = decorator_of(TensorFlowIntegration)


def _addresses(rank: Rank) -> list[tuple[str, int]]:
    """Return the address of each worker, by rank. The gang's own port stays free for another integration."""
    hosts = [peer.private_ip for peer in rank.peers for _ in range(rank.local_world_size)]
    return [(host, port_behind(rank.head_port, 1 + number)) for number, host in enumerate(hosts)]


def _has_cluster() -> bool:
    """Return whether a strategy has connected this worker to the others."""
    context = import_module("tensorflow.python.eager.context").context()
    return getattr(context, "_collective_ops_server_def", True) is not None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_devices(rank: Rank) -> dict[str, str]:
    """Hide the neighbours' GPUs, which another integration may want to see: a worker takes the memory of all."""
    if len(rank.devices) == rank.accelerators:
        return {}
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank.accelerators)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in rank.devices)}


@contextmanager
def _complete_reduce(framework: Any) -> Iterator[None]:
    """Make the strategy's `reduce` accept the arguments of Keras 3: a structure of values, and scalars with an axis.

    TensorFlow raises an error for both. Here a structure is reduced value by value, and a scalar, which has no axis, is
    reduced over the replicas alone. Source: keras/src/backend/tensorflow/trainer.py, `_maybe_symbolic_build`,
    `reduce_per_replica`.
    """
    strategy = framework.distribute.MultiWorkerMirroredStrategy
    original = strategy.reduce

    def reduce(self: Any, reduce_op: Any, value: Any, axis: int | None) -> Any:
        def one(part: Any) -> Any:
            first = self.experimental_local_results(part)[0]
            is_scalar = getattr(getattr(first, "shape", None), "rank", None) == 0
            return original(self, reduce_op, part, None if is_scalar else axis)

        return framework.nest.map_structure(one, value)

    strategy.reduce = reduce
    try:
        yield
    finally:
        del strategy.reduce
