"""Keras's `distribution="data_parallel"`: ranks that train one model together, on each backend.

JAX has `keras.distribution.DataParallel` for it, and TensorFlow has its strategies. On torch, Keras up to 3.15 leaves
it to the user. torch's DistributedDataParallel does not fit: Keras calls the model and not the wrapper, so each rank
would keep its own gradients. Here the optimizers take the mean of all ranks' gradients instead. That covers every
caller: `fit`, `train_on_batch`, and loops that the user writes.
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

_BUCKET_BYTES = 25 * 1024 * 1024
"""Approximate size of the parts in which gradients are exchanged, several at a time.

Source: torch's DistributedDataParallel.
"""


def data_parallel(keras: Any, rank: Rank, *, is_seeded: bool) -> AbstractContextManager[None]:
    """Return a context in which all ranks train each model together.

    The backend's runtime must be initialised. Leaving the context does not wait for other ranks.
    """
    backend = keras.config.backend()
    if backend == "tensorflow":
        return _strategy_scope()
    exchange = _torch_exchange(rank) if backend == "torch" else _jax_exchange(keras)
    return _together(keras, exchange, is_seeded=is_seeded, averages=backend == "torch" and rank.world_size > 1)


@contextmanager
def warning_of_idle_devices(keras: Any) -> Iterator[None]:
    """Warn on the first `fit` on jax whose model leaves devices of this rank idle."""
    fit, has_warned = keras.Model.fit, False

    @wraps(fit)
    def fit_with_warning(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        count = import_module("jax").local_device_count()
        if count > 1 and not has_warned and keras.distribution.distribution() is None:
            has_warned = True
            warnings.warn(
                f"distribution=None: the model trains on one of this rank's {count} devices; write "
                '@sky.integrations.keras(distribution="data_parallel") to train on all of them',
                stacklevel=2,
            )
        return fit(self, *args, **kwargs)

    with _replaced(keras.Model, "fit", fit_with_warning):
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
                checked = _with_equal_samples(getattr(keras.Model, name), keras, exchange)
                stack.enter_context(_replaced(keras.Model, name, checked))
        stack.enter_context(_replaced(keras.Model, "fit", _watched_fit(keras.Model.fit, callback, exchange)))
        yield


@contextmanager
def _replaced(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class for the length of the block, and restore what it had or inherited."""
    inherits = name not in vars(kind)
    before = getattr(kind, name)
    setattr(kind, name, method)
    try:
        yield
    finally:
        delattr(kind, name) if inherits else setattr(kind, name, before)


# Exchange between ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Exchange of whole numbers between ranks. Every rank has to take part in each call."""

    of_all: Callable[[int], list[int]]
    """Return the number of each rank, by rank; numbers lie in [0, 2**32)."""
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
    """Keras's own context for data parallelism, if the backend has one."""

    def of_first(self, value: int) -> int:
        """Return the number of rank 0."""
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

    # Ranks pass their own parts. Keras would divide tf.data datasets once more, and only those.
    return Exchange(gather, lambda: keras.distribution.DataParallel(auto_shard_dataset=False).scope())


# Around model.fit -------------------------------------------------------------------------------------------------


def _watched_fit(fit: Callable[..., Any], kind: type, exchange: Exchange) -> Callable[..., Any]:
    """Wrap `fit` so that it adds a callback ahead of the user's."""
    signature = inspect.signature(fit)

    class Watch(kind):  # type: ignore[misc]  # a class of Keras
        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            # Ranks with fewer batches would leave the others waiting forever.
            _check_equal(exchange, self.params.get("steps") or 0, "batches in an epoch")
            super().on_train_begin(logs)

    @wraps(fit)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        callbacks: Any = bound.arguments.get("callbacks")
        if hasattr(callbacks, "callbacks"):  # a CallbackList, which is complete and knows its model
            watch = Watch()
            watch.set_model(self)
            watch.set_params(callbacks.params)
            callbacks.callbacks.insert(0, watch)
        else:
            own = [callbacks] if callbacks is not None and not isinstance(callbacks, list | tuple) else callbacks or []
            bound.arguments["callbacks"] = [Watch(), *own]
        return fit(*bound.args, **bound.kwargs)

    return watched


def _with_equal_samples(method: Callable[..., Any], keras: Any, exchange: Exchange) -> Callable[..., Any]:
    """Wrap `fit` or `evaluate` for jax so that it refuses parts of unequal size.

    JAX assumes equal parts without checking. With others it computes wrong values, or never ends.
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
            f"x=...: the ranks have unequal numbers of {what}: {numbers}; give each rank equally many samples, "
            "as sky.shard(..., drop_last=True) does",
            field="x",
            value=numbers,
        )


def _averaging_callback(keras: Any) -> type:
    """Make torch's callback: it equalises weights at the start, and averages ungraded values after each epoch."""
    torch = import_module("torch")
    dist = torch.distributed

    class GradientAverage(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            for variable in [*self.model.weights, *self.model.optimizer.variables]:
                dist.broadcast(variable.value.data, src=0)

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            # These are the statistics of batch normalisation, which no gradient updates.
            moved = [v.value.data for v in self.model.non_trainable_weights if v.value.is_floating_point()]
            for value, mean in zip(moved, _means(torch, moved), strict=True):
                value.copy_(mean)
            if not logs:
                return
            # In place, because the callbacks behind this one get the same dict. They may stop the training, and all
            # ranks have to decide alike.
            names = sorted(name for name, value in logs.items() if isinstance(value, int | float))
            # On the device of the weights, because nccl exchanges GPU tensors only.
            device = self.model.weights[0].value.device
            values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device=device)
            (means,) = _means(torch, [values])
            logs.update(zip(names, means.tolist(), strict=True))

    return GradientAverage


# Gradients on torch -----------------------------------------------------------------------------------------------


def _kinds_of_optimizers(keras: Any) -> list[Any]:
    """Return the classes with an `apply` of their own, such as LossScaleOptimizer, which wraps another optimizer."""
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
    """Mark of a running `apply`: an optimizer inside another gets gradients that are averaged already."""

    is_inner = False


def _mean_gradients(torch: Any, grads: list[Any], variables: Sequence[Any] | None) -> list[Any]:
    """Average gradients over the ranks. A variable has no gradient only if no rank has one for it."""
    if variables is None:
        return _means(torch, grads)
    filled = [torch.zeros_like(v.value) if g is None else g for g, v in zip(grads, variables, strict=True)]
    flags = torch.tensor([float(g is not None) for g in grads])
    *means, share = _means(torch, [*filled, flags.to(filled[0].device)])
    return [mean if has_any else None for mean, has_any in zip(means, (share > 0).tolist(), strict=True)]


def _means(torch: Any, tensors: list[Any]) -> list[Any]:
    """Average each tensor over the ranks. All ranks pass the same shapes and types in the same order."""
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
    """Group tensor indexes by type and device into parts of `_BUCKET_BYTES`, or of one larger tensor."""
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
