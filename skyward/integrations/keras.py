"""Keras 3 on any of its backends: choose the backend before Keras is imported, and initialise its runtime before use.

Keras reads KERAS_BACKEND once, on its first import, which may be at the top of the user's module. The variable is
therefore set before that module is loaded, and already in the process that imports Keras ahead of the ranks.
`distribution` decides whether the ranks train separately or together; see `keras_parallel`.
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
from .keras_parallel import data_parallel, warning_of_idle_devices
from .tensorflow import TensorFlowIntegration
from .torch import TorchIntegration

KerasBackend = Literal["jax", "torch", "tensorflow"]
Distribution = Literal["data_parallel"]
_RUNTIMES: dict[KerasBackend, type[IntegrationBase]] = {
    "jax": JaxIntegration,
    "torch": TorchIntegration,
    "tensorflow": TensorFlowIntegration,
}


@dataclass(frozen=True, kw_only=True)
class KerasIntegration(IntegrationBase):
    """Run the function as ranks that use Keras on the backend of your choice; use it bare or with options.

    The backend's runtime is initialised first, as by `sky.integrations.jax`, `torch` or `tensorflow`. `@ pool` starts
    ranks on all nodes, `>> pool` on one node. Every rank is a new process. Outside a pool, and in `.local(...)`, the
    function is called as it is. Write the decorator below `@sky.compute`; it stacks with other integrations and output
    decorators in any order.

    With `distribution=None` each rank trains a model of its own, usually on `sky.shard(x, y)`. On jax it then uses only
    the rank's first device, unless the function sets a `keras.distribution`.

    With `distribution="data_parallel"` all ranks train one model: every step starts from equal weights and applies the
    mean of all gradients. The input of `model.fit` depends on the backend:

    - jax and torch: pass the rank's own part, `sky.shard(x, y, drop_last=True)`, and the batch size of one rank. All
      ranks need the same number of batches, on jax also of the same size; otherwise `fit` raises UsageError.
    - tensorflow: pass the whole data in every rank, and the batch size of all ranks together. The strategy divides
      each batch. The function runs in the scope of a `tf.distribute.MultiWorkerMirroredStrategy`.

    Losses and metrics cover all ranks. On torch, `fit` averages them after each epoch, and `evaluate` on its own
    returns those of its rank.

    Args:
        backend: "jax", "torch" or "tensorflow". It overrides KERAS_BACKEND and Keras's configuration file.
        seed: in [0, 2**32). Passed to `keras.utils.set_random_seed` in every rank before the function is called. None:
            leaves the generators as they are, with one exception: with "data_parallel" on jax and torch, the ranks
            agree on a random seed, so that they start with equal weights.
        distribution: None or "data_parallel".
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, at least one.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function. In the rank: Keras uses
            another backend, because the function's module selected one itself.
        MissingDependency: in the rank: Keras or the backend is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

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
            raise UsageError(
                f'backend={self.backend!r}: must be "jax", "torch" or "tensorflow" for @keras; set backend="jax"'
            )
        check_seed(self.name, self.seed)
        if self.distribution not in (None, *get_args(Distribution)):
            raise UsageError(
                f'distribution={self.distribution!r}: must be "data_parallel" or None for @keras; '
                'set distribution="data_parallel"'
            )

    @property
    def runtime(self) -> IntegrationBase:
        """Integration of the backend."""
        return _RUNTIMES[self.backend](processes_per_node=self.processes_per_node)

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows the backend
        # Keras imports TensorFlow with any backend, if it is installed: to seed it, and for tf.data.
        others = TensorFlowIntegration.preload
        return (f"KERAS_BACKEND={self.backend}", *self.runtime.preload, *others, "keras")

    @property
    def sees_neighbours(self) -> bool:  # type: ignore[override]  # it follows the backend
        return self.runtime.sees_neighbours

    def environment(self, rank: Rank) -> dict[str, str]:
        return {**self.runtime.environment(rank), "KERAS_BACKEND": self.backend}

    def prepare(self, rank: Rank) -> None:
        self.runtime.prepare(rank)

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        if find_spec("keras") is None:  # importing it would use the backend before its runtime is initialised
            raise MissingDependency(
                "keras: not installed here; run `pip install 'skyward[keras]'`, or set Image(pip=['keras']) for "
                "remote nodes",
                name="keras",
            )
        with self.runtime.session(rank):
            framework = load_framework("keras", extra=self.extra)
            used = framework.config.backend()
            if used != self.backend:
                raise UsageError(
                    f"backend={self.backend!r}: keras already runs on {used}, because KERAS_BACKEND was set before its "
                    f"import; remove that setting, or write backend={used!r}",
                    field="backend",
                    value=self.backend,
                )
            if self.seed is not None:
                framework.utils.set_random_seed(self.seed)
            if self.distribution is None:
                with warning_of_idle_devices(framework) if self.backend == "jax" and not rank.rank else nullcontext():
                    yield
                return
            with data_parallel(framework, rank, is_seeded=self.seed is not None):
                yield


keras = decorator_of(KerasIntegration)
