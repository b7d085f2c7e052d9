"""Keras 3 on any of its backends: the backend is chosen before Keras can be imported, and the backend's own runtime
stands before Keras uses it.

Keras reads KERAS_BACKEND once, when it is first imported, which may be at the top of the user's module; so it is set
before that is loaded, and already where Keras is imported ahead of the ranks. What the ranks have to do with one
another is `distribution`: nothing, or training one model together, see `keras_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal, get_args

from ..errors import MissingDependency, UsageError
from ..values.topology import Rank
from .base import IntegrationBase, check_seed, decorator_of, load_framework
from .jax import JaxIntegration
from .keras_parallel import data_parallel, telling_of_idle_devices
from .tensorflow import TensorFlowIntegration
from .torch import TorchIntegration

__all__ = ["KerasBackend", "KerasIntegration", "keras"]

KerasBackend = Literal["jax", "torch", "tensorflow"]
Distribution = Literal["data_parallel"]
_RUNTIMES: dict[KerasBackend, type[IntegrationBase]] = {
    "jax": JaxIntegration,
    "torch": TorchIntegration,
    "tensorflow": TensorFlowIntegration,
}


@dataclass(frozen=True, kw_only=True)
class KerasIntegration(IntegrationBase):
    """Runs the function as ranks with Keras on the backend of your choice; use it bare or with options.

    The runtime of the backend is initialised first, as `sky.integrations.jax`, `torch` or `tensorflow` does it: with
    `@ pool` its ranks are those of all nodes, with `>> pool` those of one node. Every rank is a new process that no
    call has used before. Outside a pool, and in `.local(...)`, the function is simply called. It stands below
    `@sky.compute`, and stacks with other integrations and output decorators in any order.

    With `distribution=None` each rank trains a model of its own, usually on `sky.shard(x, y)`; on jax it uses the
    first device of the rank alone, unless the function sets a `keras.distribution`. With "data_parallel"
    all ranks train one: they begin each step with equal weights and take it with the mean of their gradients. What
    `model.fit` is given follows the backend:

    - jax and torch: the rank's own part, `sky.shard(x, y, drop_last=True)`, and the batch size of one rank. All ranks
      need equally many batches, on jax of equal sizes; `fit` says so if they have not.
    - tensorflow: the whole data in every rank, and the batch size of all ranks together; the strategy divides each
      batch. The function runs in the scope of a `tf.distribute.MultiWorkerMirroredStrategy`.

    Losses and metrics are those of all ranks; on torch they are averaged after each epoch of `fit`, `evaluate` alone
    gives those of its rank.

    Args:
        backend: "jax", "torch" or "tensorflow". It wins over KERAS_BACKEND and over Keras's configuration file.
        seed: in [0, 2**32), given to `keras.utils.set_random_seed` in every rank before the function is called. None:
            nothing is seeded, except that with "data_parallel" ranks on jax and torch agree on a seed, so that they
            begin with equal weights.
        distribution: None or "data_parallel".
        processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, at least one.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be; in the rank: Keras runs on another backend,
            because the function's module chose one itself.
        MissingDependency: in the rank: Keras or the backend is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

    Example:
        >>> @keras(backend="torch", seed=0, distribution="data_parallel")
        ... def train(x, y, model) -> float:
        ...     import skyward as sky
        ...     model.compile("adam", "mse")
        ...     x, y = sky.shard(x, y, drop_last=True)
        ...     return model.fit(x, y, batch_size=32, epochs=3).history["loss"][-1]
        >>> train.__name__
        'train'
    """

    name: ClassVar[str] = "keras"
    extra: ClassVar[str] = "keras"
    packages: ClassVar[tuple[str, ...]] = ("keras",)

    backend: KerasBackend = "jax"
    seed: int | None = None
    distribution: Distribution | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in get_args(KerasBackend):
            raise UsageError(f'keras: backend={self.backend!r}; it is "jax", "torch" or "tensorflow"')
        check_seed(self.name, self.seed)
        if self.distribution not in (None, *get_args(Distribution)):
            raise UsageError(f'keras: distribution={self.distribution!r}; it is "data_parallel" or None')

    @property
    def runtime(self) -> IntegrationBase:
        """The integration of the backend."""
        return _RUNTIMES[self.backend](processes_per_node=self.processes_per_node)

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows the backend
        # Whatever the backend, Keras imports TensorFlow where it is installed: to seed it, and for tf.data.
        others = TensorFlowIntegration.preload
        return (f"KERAS_BACKEND={self.backend}", *self.runtime.preload, *others, "keras")

    def environment(self, rank: Rank) -> dict[str, str]:
        return {**self.runtime.environment(rank), "KERAS_BACKEND": self.backend}

    def prepare(self, rank: Rank) -> None:
        self.runtime.prepare(rank)

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        if find_spec("keras") is None:  # to import it would be to use the backend before its runtime stands
            raise MissingDependency(
                "keras is not installed here; install it with `pip install 'skyward[keras]'`, on remote nodes with "
                "`Image(pip=['keras'])`",
                name="keras",
            )
        with self.runtime.session(rank):
            framework = load_framework("keras", extra=self.extra)
            used = framework.config.backend()
            if used != self.backend:
                raise UsageError(
                    f"keras runs on {used} here, not on {self.backend}: something has set KERAS_BACKEND before it was "
                    f"imported; take that out, or write backend={used!r}",
                    field="backend",
                    value=self.backend,
                )
            if self.seed is not None:
                framework.utils.set_random_seed(self.seed)
            if self.distribution is None:
                with telling_of_idle_devices(framework) if self.backend == "jax" and not rank.rank else nullcontext():
                    yield
                return
            with data_parallel(framework, rank, is_seeded=self.seed is not None):
                yield


keras = decorator_of(KerasIntegration)
