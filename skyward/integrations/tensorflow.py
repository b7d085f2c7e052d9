"""TensorFlow: the cluster that `tf.distribute.MultiWorkerMirroredStrategy` reads from TF_CONFIG.

Every worker listens on a port of its own. The gang has one port, of rank 0; the workers' ports are counted from it,
so each rank knows the whole cluster without asking anybody, and TF_CONFIG stands before the user's module is imported:
a strategy may be made at its top. The port of a rank is locked on its machine while the function runs. Should it be
taken all the same, the gang is started once more on other ports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import RendezvousFailed
from ..node.slot.ports import PortLocks, port_behind
from ..values.topology import Rank
from .base import IntegrationBase, decorator_of, load_framework, numeric_threads
from .rendezvous import past_the_proxy

__all__ = ["TensorFlowIntegration", "tensorflow"]

_LOG_LEVEL = "2"
"""Of the C++ half, unless the user has chosen one: errors. What it tells and warns of in an ordinary `fit` is noise."""
_SERVER_FAILED = "Could not start gRPC server"
"""What a strategy raises when its port is taken."""


@dataclass(frozen=True, kw_only=True)
class TensorFlowIntegration(IntegrationBase):
    """Runs the function as the workers of a TensorFlow cluster; use it bare or with options.

    `tf.distribute.MultiWorkerMirroredStrategy()`, made in the function, finds the cluster by itself: with `@ pool` the
    workers are the ranks of all nodes, with `>> pool` those of one node. Every rank is a new process that no call has
    used before. Outside a pool, and in `.local(...)`, the function is simply called. It stands below `@sky.compute`,
    and stacks with other integrations and output decorators in any order.

    While the function runs, Keras 3 trains under that strategy with `model.fit`: without us it fails there, see
    keras-team/keras#20585.

    Args:
        processes_per_node: workers on each node, >= 1; "auto" is one for each accelerator, at least one. One worker
            uses all GPUs of its node; several share them out.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: tensorflow is not installed on the node.
        RendezvousFailed: in the rank: its port was taken, twice.

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
    # Its C++ half reads the level when it is loaded.
    preload: ClassVar[tuple[str, ...]] = (f"TF_CPP_MIN_LOG_LEVEL?={_LOG_LEVEL}", "tensorflow", "numpy.random")

    def environment(self, rank: Rank) -> dict[str, str]:
        """The cluster, this worker's place in it, and its share of the node. What the user has chosen stays."""
        threads = str(numeric_threads(rank))
        chosen = {
            "OMP_NUM_THREADS": threads,
            "TF_NUM_INTRAOP_THREADS": threads,
            "TF_CPP_MIN_LOG_LEVEL": _LOG_LEVEL,
        }
        if rank.shares_devices:  # else the first of two takes all of the memory
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
            yield  # another integration stands on this one, and has done all that follows
            return
        host, port = _addresses(rank)[rank.rank]
        locks = PortLocks(host)
        locks.hold(port)
        try:
            with _complete_reduce(framework):
                yield
        except framework.errors.UnknownError as error:
            if _SERVER_FAILED not in str(error):
                raise
            raise RendezvousFailed(
                f"rank {rank.rank} of {rank.world_size} could not listen on {host}:{port}: {error}"
            ) from error
        finally:
            locks.release_all()


tensorflow = decorator_of(TensorFlowIntegration)


def _addresses(rank: Rank) -> list[tuple[str, int]]:
    """Where each worker listens, by rank. Not on the gang's own port: another integration may meet there."""
    hosts = [peer.private_ip for peer in rank.peers for _ in range(rank.local_world_size)]
    return [(host, port_behind(rank.head_port, 1 + number)) for number, host in enumerate(hosts)]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_devices(rank: Rank) -> dict[str, str]:
    """A worker takes the whole memory of every GPU that it sees, so neighbours may not see the same ones."""
    if rank.local_world_size == 1 or not rank.accelerators:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank.accelerators)))
    devices = visible.split(",")
    first, last = (len(devices) * number // rank.local_world_size for number in (rank.local_rank, rank.local_rank + 1))
    own = devices[first:last] or [devices[rank.local_rank % len(devices)]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


@contextmanager
def _complete_reduce(framework: Any) -> Iterator[None]:
    """Let the strategy's `reduce` take what Keras 3 gives it: a structure of values, and scalars with an axis.

    Both are errors otherwise. A structure is reduced value by value; a scalar has no axis, and is reduced over the
    replicas alone. Source: keras/src/backend/tensorflow/trainer.py, `_maybe_symbolic_build`, `reduce_per_replica`.
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
