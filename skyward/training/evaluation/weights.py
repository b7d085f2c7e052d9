"""A model's weights as evaluations take them, and back into the model that a worker keeps.

States have the names that the model has without its wrappers. The loaders travel to workers by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ...errors import UsageError
from ..parts import is_dtensor, unwrapped

__all__ = [
    "FROZEN_SAMPLE",
    "frozen_sample",
    "halved",
    "is_sharded",
    "load_torch",
    "load_trainable",
    "load_weights",
    "loader_for",
    "model_state",
    "sends_parts",
]

FROZEN_SAMPLE = "skyward.frozen_sample"
"""The name, in a state of trainable parts, of some values of the others: by them a worker sees whether its model has
the same."""
SAMPLES = 8
"""Of each frozen parameter."""


def model_state(model: Any, *, trainable_only: bool | Literal["auto"] = "auto") -> dict[str, Any]:
    """A torch model's state dict, without the prefixes of DistributedDataParallel and torch.compile.

    Its tensors are the live ones: take a snapshot. Of a sharded model (FSDP1, FSDP2, tensor parallel) the parts are
    gathered, in host memory: all ranks call it, and only rank 0 has the state then; on the others it is empty.

    Args:
        trainable_only: parameters that are trained, and buffers; `load_trainable` puts them into a model whose factory
            gives the others the values that they have here. "auto": for adapters of PEFT.
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
    """Whether "auto" sends trainable parts only: PEFT's models, whose factory has to load the base all the same."""
    return hasattr(unwrapped(model), "peft_config")


def is_sharded(model: Any) -> bool:
    """Whether ranks hold parts of it, so that its state is gathered by all of them."""
    if any(map(is_dtensor, model.parameters())):
        return True
    return _is_fsdp1(model)


def frozen_sample(model: Any) -> Any:
    """(frozen parameters x 8,) float32, or fewer of small ones, on the model's device: values at even distances."""
    import torch

    samples = []
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            if _is_frozen(value) and value.numel():
                flat = value.detach().reshape(-1)
                samples.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())
        return torch.cat(samples) if samples else torch.zeros(0)


def halved(state: Any) -> Any:
    """The same with float32 tensors and arrays as float16. Everything else is the same object."""
    if isinstance(state, dict):
        return {key: value if key == FROZEN_SAMPLE else halved(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(halved(value) for value in state)
    dtype = str(getattr(state, "dtype", ""))
    if dtype == "torch.float32":
        return state.half()
    return state.astype("float16") if dtype == "float32" and hasattr(state, "astype") else state


def load_torch(model: Any, state: Mapping[str, Any]) -> None:
    """A state dict into a torch module, which is in evaluation mode then.

    Floating point values get the dtype of the model's own tensor of that name; integers and bools stay what they are.
    Raises: UsageError, when names are missing or unexpected; torch's RuntimeError, when a shape differs.
    """
    _load(model, state, is_partial=False)


def load_trainable(model: Any, state: Mapping[str, Any]) -> None:
    """As `load_torch`, for a state of trainable parts: what it does not name keeps what the factory gave it."""
    _load(model, state, is_partial=True)


def load_weights(model: Any, weights: Sequence[Any]) -> None:
    """A list of arrays into a Keras model, as its `get_weights` gives it."""
    model.set_weights(list(weights))


def loader_for(state: Any) -> Callable[[Any, Any], object]:
    """The one for a state: a mapping is a torch state dict, whole or of trainable parts; a list is Keras's weights."""
    if isinstance(state, Mapping):
        return load_trainable if FROZEN_SAMPLE in state else load_torch
    return load_weights


def _gathered(model: Any, parts: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # With both, each tensor is gathered, taken to the host by rank 0, and freed: no rank holds the whole on its device.
    # FSDP1 in host memory dies of it (torch 2.13): there all ranks get the whole, and the others drop it.
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
    """A parameter that is not trained. Buffers, which training changes, are none."""
    import torch

    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def _load(model: Any, state: Mapping[str, Any], *, is_partial: bool) -> None:
    own = model.state_dict(keep_vars=True)
    unexpected = [name for name in state if name not in own and name != FROZEN_SAMPLE]
    missing = [] if is_partial else [name for name in own if name not in state]
    if unexpected or missing:
        parts = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("it does not have", unexpected), ("not in the state", missing))
            if names
        ]
        raise UsageError(
            f"model_factory: the model that it makes is not the one that trains ({'; '.join(parts)}); it must make "
            "the same architecture"
        )
    if FROZEN_SAMPLE in state:
        _check_frozen(model, state[FROZEN_SAMPLE])
    weights = {name: _as(own[name], value) for name, value in state.items() if name != FROZEN_SAMPLE}
    model.load_state_dict(weights, strict=False)
    model.eval()


def _check_frozen(model: Any, theirs: Any) -> None:
    """Loosely: the worker's may have another dtype."""
    ours = frozen_sample(model).cpu()
    if ours.shape == theirs.shape and bool(((ours - theirs.cpu()).abs() <= 0.02 * ours.abs() + 1e-3).all()):
        return
    raise UsageError(
        "model_factory: only what is trained is sent, and the rest of the model that it makes has other values than "
        "here; load the base's weights in it, or send everything (trainable_only=False)"
    )


def _as(own: Any, value: Any) -> Any:
    is_cast = getattr(value, "is_floating_point", None) and value.is_floating_point() and own.is_floating_point()
    return value.to(own.dtype) if is_cast and value.dtype is not own.dtype else value
