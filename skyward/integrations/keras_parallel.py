"""Keras's `distribution="data_parallel"`: ranks that train one model together, on each of its backends.

Jax has it built in, `keras.distribution.DataParallel`, and TensorFlow its strategies. On torch, Keras up to 3.15 leaves
it to the user, and torch's DistributedDataParallel does not fit in: Keras calls the model, not the wrapper, so that its
gradients would stay each rank's own. There the optimizers take the mean of all ranks' gradients here, whoever calls
them: `fit`, `train_on_batch`, or a loop of the user's.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from ..errors import UsageError
from ..values.topology import Rank

__all__ = ["data_parallel", "telling_of_idle_devices"]

_BUCKET_BYTES = 25 * 1024 * 1024
"""Gradients are exchanged in parts of about this size, several at a time. As torch's DistributedDataParallel does."""


def data_parallel(keras: Any, rank: Rank, *, is_seeded: bool) -> AbstractContextManager[None]:
    """While it is open, models that are made, compiled and trained are those of all ranks. The backend's runtime has
    been initialised. Leaving waits for nobody.
    """
    backend = keras.config.backend()
    if backend == "tensorflow":
        return _strategy_scope()
    exchange = _torch_exchange(rank) if backend == "torch" else _jax_exchange(keras)
    return _together(keras, exchange, is_seeded=is_seeded, averages=backend == "torch" and rank.world_size > 1)


@contextmanager
def telling_of_idle_devices(keras: Any) -> Iterator[None]:
    """On jax: the first `fit` of a model that leaves devices of this rank idle says so."""
    fit, is_told = keras.Model.fit, False

    @wraps(fit)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_told
        count = import_module("jax").local_device_count()
        if count > 1 and not is_told and keras.distribution.distribution() is None:
            is_told = True
            warnings.warn(
                f"distribution=None: this rank has {count} devices, and the model trains on the first alone; write "
                '@sky.integrations.keras(distribution="data_parallel") to train on all of them',
                stacklevel=2,
            )
        return fit(self, *args, **kwargs)

    with _replaced(keras.Model, "fit", telling):
        yield


@contextmanager
def _strategy_scope() -> Iterator[None]:
    distribute = import_module("tensorflow").distribute
    with distribute.MultiWorkerMirroredStrategy().scope():
        yield


@contextmanager
def _together(keras: Any, exchange: Exchange, *, is_seeded: bool, averages: bool) -> Iterator[None]:
    if not is_seeded:
        keras.utils.set_random_seed(exchange.of_first(random.SystemRandom().randrange(2**32)))
    callback = _averaging_callback(keras) if averages else keras.callbacks.Callback
    with ExitStack() as stack:
        if averages:
            for kind in _kinds_of_optimizers(keras):
                stack.enter_context(_replaced(kind, "apply", _averaging_apply(kind.apply)))
        else:
            stack.enter_context(exchange.scope())
            for name in ("fit", "evaluate"):
                checked = _of_equal_samples(getattr(keras.Model, name), keras, exchange)
                stack.enter_context(_replaced(keras.Model, name, checked))
        stack.enter_context(_replaced(keras.Model, "fit", _watched_fit(keras.Model.fit, callback, exchange)))
        yield


@contextmanager
def _replaced(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """The class has this method until the block ends; then what it had, or inherited, before."""
    inherits = name not in vars(kind)
    before = getattr(kind, name)
    setattr(kind, name, method)
    try:
        yield
    finally:
        delattr(kind, name) if inherits else setattr(kind, name, before)


# What ranks tell one another --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Whole numbers between ranks; every rank has to call it."""

    of_all: Callable[[int], list[int]]
    """What each rank has, by rank; the number in [0, 2**32)."""
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
    """What Keras itself has for this."""

    def of_first(self, value: int) -> int:
        """What rank 0 has."""
        return self.of_all(value)[0]


def _torch_exchange(rank: Rank) -> Exchange:
    def gather(value: int) -> list[int]:
        values: list[Any] = [None] * rank.world_size
        import_module("torch.distributed").all_gather_object(values, value)
        return values

    return Exchange(gather)


def _jax_exchange(keras: Any) -> Exchange:
    def gather(value: int) -> list[int]:
        allgather = import_module("jax.experimental.multihost_utils").process_allgather
        return [int(number) for number in allgather(import_module("numpy").uint32(value)).reshape(-1)]

    # Ranks give their own parts: Keras divides only tf.data's data sets by itself.
    return Exchange(gather, lambda: keras.distribution.DataParallel(auto_shard_dataset=False).scope())


# Around model.fit -------------------------------------------------------------------------------------------------


def _watched_fit(fit: Callable[..., Any], kind: type, exchange: Exchange) -> Callable[..., Any]:
    """`fit` with one callback more, before those of the user."""
    signature = inspect.signature(fit)

    class Watch(kind):  # type: ignore[misc]  # a class of Keras
        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            # Ranks with fewer batches would leave the others waiting for ever.
            _check_equal(exchange, self.params.get("steps") or 0, "batches in an epoch")
            super().on_train_begin(logs)

    @wraps(fit)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        callbacks: Any = given.arguments.get("callbacks")
        if hasattr(callbacks, "callbacks"):  # a CallbackList, which is ready and knows its model
            watch = Watch()
            watch.set_model(self)
            watch.set_params(callbacks.params)
            callbacks.callbacks.insert(0, watch)
        else:
            own = [callbacks] if callbacks is not None and not isinstance(callbacks, list | tuple) else callbacks or []
            given.arguments["callbacks"] = [Watch(), *own]
        return fit(*given.args, **given.kwargs)

    return watched


def _of_equal_samples(method: Callable[..., Any], keras: Any, exchange: Exchange) -> Callable[..., Any]:
    """`fit` or `evaluate` for jax: it takes the ranks' batches for parts of equal size, and does not look. With others
    it computes nonsense, or never ends.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = signature.bind(self, *args, **kwargs).arguments.get("x")
        shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(x)]
        _check_equal(exchange, next((int(shape[0]) for shape in shapes if shape), 0), "samples")
        return method(self, *args, **kwargs)

    return checked


def _check_equal(exchange: Exchange, number: int, what: str) -> None:
    numbers = exchange.of_all(number)
    if len(set(numbers)) > 1:
        raise UsageError(
            f"the ranks have unequal numbers of {what}: {numbers}; give each the same number of samples, as "
            "sky.shard(..., drop_last=True) does",
            field="x",
            value=numbers,
        )


def _averaging_callback(keras: Any) -> type:
    """For torch: equal weights at the beginning, and what ranks have computed apart is averaged after each epoch."""
    torch = import_module("torch")
    dist = torch.distributed

    class GradientAverage(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            for variable in [*self.model.weights, *self.model.optimizer.variables]:
                dist.broadcast(variable.value.data, src=0)

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            # Of batch normalisation, which no gradient moves.
            moved = [v.value.data for v in self.model.non_trainable_weights if v.value.is_floating_point()]
            for value, mean in zip(moved, _means(torch, moved), strict=True):
                value.copy_(mean)
            if not logs:
                return
            # In place: the callbacks behind this one, which may stop the training, are given the same ones, and have
            # to decide alike in all ranks.
            names = sorted(name for name, value in logs.items() if isinstance(value, int | float))
            # Where the weights are: nccl exchanges nothing that is not on a GPU.
            device = self.model.weights[0].value.device
            values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device=device)
            (means,) = _means(torch, [values])
            logs.update(zip(names, means.tolist(), strict=True))

    return GradientAverage


# Gradients on torch -----------------------------------------------------------------------------------------------


def _kinds_of_optimizers(keras: Any) -> list[Any]:
    """Those that have an `apply` of their own; LossScaleOptimizer has one around that of the optimizer in it."""
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    base = keras.optimizers.Optimizer
    return [base, *(kind for kind in kinds if kind is not base and issubclass(kind, base) and "apply" in vars(kind))]


def _averaging_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    torch = import_module("torch")

    @wraps(apply)
    def averaging(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        if _Applying.is_inner:
            return apply(self, grads, trainable_variables)
        _Applying.is_inner = True
        try:
            with torch.no_grad():
                means = _mean_gradients(torch, list(grads), trainable_variables)
            return apply(self, means, trainable_variables)
        finally:
            _Applying.is_inner = False

    return averaging


class _Applying:
    """An optimizer within another is given gradients that are averaged already."""

    is_inner = False


def _mean_gradients(torch: Any, grads: list[Any], variables: Sequence[Any] | None) -> list[Any]:
    """A variable may have no gradient in this rank and one in another; it has none only if it has none anywhere."""
    if variables is None:
        return _means(torch, grads)
    filled = [torch.zeros_like(v.value) if g is None else g for g, v in zip(grads, variables, strict=True)]
    flags = torch.tensor([float(g is not None) for g in grads])
    *means, share = _means(torch, [*filled, flags.to(filled[0].device)])
    return [mean if has_any else None for mean, has_any in zip(means, (share > 0).tolist(), strict=True)]


def _means(torch: Any, tensors: list[Any]) -> list[Any]:
    """The mean over the ranks of each tensor; all ranks give the same shapes and types in the same order."""
    means: list[Any] = [None] * len(tensors)
    begun = []
    for places in _buckets(tensors):
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        begun.append((places, flat, torch.distributed.all_reduce(flat, async_op=True)))
    for places, flat, work in begun:
        work.wait()
        parts = flat.div_(torch.distributed.get_world_size()).split([tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            means[place] = part.view_as(tensors[place])
    return means


def _buckets(tensors: list[Any]) -> list[list[int]]:
    """The places of the tensors, cut into parts of one type and device each, of `_BUCKET_BYTES` or one tensor."""
    open_ones: dict[Any, tuple[list[int], int]] = {}
    buckets: list[list[int]] = []
    for place, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        bucket, filled = open_ones.get(kind, ([], 0))
        if not bucket or filled + size > _BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(place)
        open_ones[kind] = bucket, filled + size
    return buckets
