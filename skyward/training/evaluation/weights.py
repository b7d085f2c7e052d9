"""Conversion of a model's weights to the state of an evaluation, and back into a worker's model.

States use the model's names without wrappers. Loaders are module functions, so they travel to workers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ...errors import UsageError
from ..parts import is_dtensor, unwrapped

FROZEN_SAMPLE = "skyward.frozen_sample"
"""Key in a state of trainable parts with a sample of the frozen values.

A worker compares it with its own model, to see whether the rest is the same.
"""
SAMPLES = 8
"""Number of sampled values of each frozen parameter."""


def model_state(model: Any, *, trainable_only: bool | Literal["auto"] = "auto") -> dict[str, Any]:
    """Return a torch model's state dict, with names free of DistributedDataParallel's and torch.compile's prefixes.

    The tensors are the live ones, so take a snapshot of them. A sharded model (FSDP1, FSDP2, tensor parallel) is
    gathered in host memory: all ranks call this, and rank 0 alone gets the state; the others get an empty one.

    Args:
        model: the torch module, possibly wrapped.
        trainable_only: return only trained parameters and buffers, for `load_trainable` into a model whose factory
            provides the rest. "auto" does so for PEFT adapters.

    Returns:
        The state dict, with a sample of the frozen values if only trainable parts are in it.

    Example:
        >>> import torch
        >>> list(model_state(torch.nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    parts = sends_parts(model) if trainable_only == "auto" else trainable_only
    if is_sharded(model):
        return _gathered(model, parts)
    inner = unwrapped(model)
    state = {_plain_name(name): value for name, value in inner.state_dict(keep_vars=True).items()}
    if parts:
        state = {name: value for name, value in state.items() if not _is_frozen(value)}
        state[FROZEN_SAMPLE] = frozen_sample(inner)
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in state.items()}


def sends_parts(model: Any) -> bool:
    """Return whether "auto" sends only trainable parts: for PEFT models, whose factory loads the base anyway.

    Args:
        model: the torch module, possibly wrapped.

    Example:
        >>> import torch
        >>> sends_parts(torch.nn.Linear(2, 1))
        False
    """
    return hasattr(unwrapped(model), "peft_config")


def is_sharded(model: Any) -> bool:
    """Return whether ranks hold parts of the model, so that all of them gather its state.

    Args:
        model: the torch module.

    Example:
        >>> import torch
        >>> is_sharded(torch.nn.Linear(2, 1))
        False
    """
    if any(map(is_dtensor, model.parameters())):
        return True
    return _is_fsdp1(model)


def frozen_sample(model: Any) -> Any:
    """Return values at even distances, 8 per frozen parameter (or all of a small one), as (n,) float32."""
    import torch

    samples = []
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            if _is_frozen(value) and value.numel():
                flat = value.detach().reshape(-1)
                samples.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())
        return torch.cat(samples) if samples else torch.zeros(0)


def halved(state: Any) -> Any:
    """Return the state with float32 tensors and arrays as float16; everything else is the same object."""
    if isinstance(state, dict):
        return {key: value if key == FROZEN_SAMPLE else halved(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(halved(value) for value in state)
    dtype = str(getattr(state, "dtype", ""))
    if dtype == "torch.float32":
        return state.half()
    return state.astype("float16") if dtype == "float32" and hasattr(state, "astype") else state


def load_torch(model: Any, state: Mapping[str, Any]) -> None:
    """Load a state dict into a torch module and switch the module to eval mode.

    Floating-point values get the dtype of the module's own tensor; integers and bools stay as they are.

    Args:
        model: the torch module.
        state: its complete state dict.

    Raises:
        UsageError: names are missing or unexpected.
        RuntimeError: a shape differs (torch's own error).

    Example:
        >>> import torch
        >>> source, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> load_torch(target, source.state_dict())
        >>> target.training, bool(target.weight.equal(source.weight))
        (False, True)
    """
    _load(model, state, is_partial=False)


def load_trainable(model: Any, state: Mapping[str, Any]) -> None:
    """Load a state of trainable parts; parameters that it does not name keep their values.

    Args:
        model: the torch module; its frozen parameters must equal those of the trained model.
        state: the result of `model_state(..., trainable_only=True)`.

    Raises:
        UsageError: names are unexpected, or the frozen values differ.
        RuntimeError: a shape differs (torch's own error).

    Example:
        >>> import torch
        >>> source, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> load_trainable(target, model_state(source, trainable_only=True))
        >>> bool(target.weight.equal(source.weight))
        True
    """
    _load(model, state, is_partial=True)


def load_weights(model: Any, weights: Sequence[Any]) -> None:
    """Load a list of arrays into a Keras model, in the order of its `get_weights`.

    Args:
        model: the Keras model.
        weights: one array per weight.

    Example:
        With two models of the same architecture:

            load_weights(target, source.get_weights())
    """
    model.set_weights(list(weights))


def loader_for(state: Any) -> Callable[[Any, Any], object]:
    """Return the loader for a state: torch for a mapping, whole or trainable parts; Keras for a list."""
    if isinstance(state, Mapping):
        return load_trainable if FROZEN_SAMPLE in state else load_torch
    return load_weights


def _gathered(model: Any, parts: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # With both options, rank 0 takes each gathered tensor to the host and frees it, so no rank holds the whole model on
    # its device. FSDP1 in host memory crashes with cpu_offload (torch 2.13). There all ranks get the whole model, and
    # the others drop it.
    is_here = _is_fsdp1(model) and all(parameter.device.type == "cpu" for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=not is_here, ignore_frozen_params=parts)
    state = get_model_state_dict(model, options=options)
    if is_here and torch.distributed.get_rank() != 0:
        return {}
    return {_plain_name(name): value for name, value in state.items()}


def _is_fsdp1(model: Any) -> bool:
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _is_frozen(value: Any) -> bool:
    """Return whether `value` is an untrained parameter; buffers are not, because training changes them."""
    import torch

    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def _load(model: Any, state: Mapping[str, Any], *, is_partial: bool) -> None:
    own = model.state_dict(keep_vars=True)
    unexpected = [name for name in state if name not in own and name != FROZEN_SAMPLE]
    missing = [] if is_partial else [name for name in own if name not in state]
    if unexpected or missing:
        parts = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("unexpected", unexpected), ("missing", missing))
            if names
        ]
        raise UsageError(
            f"model_factory: makes another model than the one in training ({'; '.join(parts)}); make the same "
            "architecture"
        )
    if FROZEN_SAMPLE in state:
        _check_frozen(model, state[FROZEN_SAMPLE])
    weights = {name: _as(own[name], value) for name, value in state.items() if name != FROZEN_SAMPLE}
    model.load_state_dict(weights, strict=False)
    model.eval()


def _check_frozen(model: Any, theirs: Any) -> None:
    """Compare frozen values loosely, because the worker's model may have another dtype."""
    ours = frozen_sample(model).cpu()
    if ours.shape == theirs.shape and bool(((ours - theirs.cpu()).abs() <= 0.02 * ours.abs() + 1e-3).all()):
        return
    raise UsageError(
        "model_factory: the frozen parameters differ from those in training, and only trained ones are sent; load the "
        "base's weights in model_factory, or send everything (trainable_only=False)"
    )


def _as(own: Any, value: Any) -> Any:
    is_cast = getattr(value, "is_floating_point", None) and value.is_floating_point() and own.is_floating_point()
    return value.to(own.dtype) if is_cast and value.dtype is not own.dtype else value
