"""Model and ranks: device, checks, wrappers, and the exchange of gradients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..arguments import TrainingArguments
from ..parts import is_dtensor, unwrapped


def ranks_of_environment(*, trainer: str) -> Ranks:
    """Return the ranks of torch's process group; `Alone` without one. Collective.

    Raises:
        UsageError: the environment names several processes, but there is no process group.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if "RANK" in os.environ and world not in ("", "1") and not has_group:
        # Each process would train alone, on all of the data, and write to the same folder.
        raise UsageError(
            f"{trainer}: WORLD_SIZE={world} announces several processes, but torch.distributed is not initialized; "
            "call init_process_group first, use @sky.integrations.torch, or unset WORLD_SIZE"
        )
    return ranks_of_this_process()


def device_of(args: TrainingArguments, ranks: Ranks) -> torch.device:
    """Return this rank's GPU and make it the current one; without GPUs or with `use_cpu`, return the CPU."""
    if args.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # collectives, the profiler and memory statistics use the current device
    return device


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are sharded over ranks (FSDP2, tensor parallelism)."""
    return any(map(is_dtensor, model.parameters()))


def check_data_parallel(model: nn.Module, ranks: Ranks, *, trainer: str) -> None:
    """Check that no parameter is sharded over ranks that would need the same batches.

    A Trainer gives every rank batches of its own, which suits data parallelism, but not tensor parallelism.

    Raises:
        UsageError: a parameter is; the message names it and its placement.
    """
    if not is_sharded(model):
        return
    from torch.distributed.tensor import DTensor

    data_parallel = _data_parallel_sizes(model)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        size, data = parameter.device_mesh.size(), data_parallel.get(id(parameter), 1)
        where = (
            f"{trainer}: model={type(model).__name__}: its parameter {name!r} is a DTensor with placements "
            f"{parameter.placements} on {parameter.device_mesh}"
        )
        if size != data:
            raise UsageError(
                f"{where}: {size // data} ranks hold it together, as in tensor parallelism, and need the same batches, "
                "but a Trainer gives every rank its own; train it in your own loop (guides/hybrid_parallelism.md, "
                "'Tensor parallel'), or shard it by torch's fully_shard alone"
            )
        if size != ranks.world_size:
            raise UsageError(
                f"{where}: only {size} of {ranks.world_size} ranks hold it, so the others would not get its gradients; "
                "shard it by torch's fully_shard over all ranks"
            )


def _data_parallel_sizes(model: nn.Module) -> dict[int, int]:
    """Return the number of ranks over which FSDP2 shards each parameter, by the parameter's id."""
    # Torch has no public API for it.
    sizes: dict[int, int] = {}
    for module in model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # earlier versions of torch have a single group
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            sizes |= {
                id(fsdp_param.sharded_param): fsdp_param.mesh_info.mesh.size() for fsdp_param in group.fsdp_params
            }
    return sizes


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, unless it is wrapped or sharded; then its maker has placed it."""
    is_placed = is_sharded(model) or unwrapped(model) is not model
    return model if is_placed else model.to(device)


def checkpoint_activations(model: nn.Module, args: TrainingArguments) -> None:
    """Enable the model's own activation checkpointing, if the arguments request it.

    Raises:
        UsageError: the model has none. Only the model knows its layers.
    """
    if not args.activation_checkpointing:
        return
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        enable = getattr(model, f"{name}_enable", None)
        if enable is None:
            continue
        rest = dict(args.activation_checkpointing_kwargs or {})
        options: dict[str, Any] = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
        enable(**options, **({f"{name}_kwargs": rest} if rest else {}))
        return
    raise UsageError(
        f"{type(args).__name__}.activation_checkpointing=True: {type(model).__name__} has neither "
        "activation_checkpointing_enable nor gradient_checkpointing_enable; define one of them, or call "
        "torch.utils.checkpoint.checkpoint in its forward"
    )


def wrap(model: nn.Module, args: TrainingArguments, ranks: Ranks, device: torch.device) -> nn.Module:
    """Wrap a model in DistributedDataParallel if there are several ranks, unless it is wrapped or sharded already."""
    from torch.nn.parallel import DistributedDataParallel

    if ranks.world_size == 1 or isinstance(model, DistributedDataParallel) or is_sharded(model):
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, **ddp_options(args)
    )


def ddp_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options of DistributedDataParallel that the arguments set."""
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
    options = {name: getattr(args, f"ddp_{name}") for name in names}
    return {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def accumulating(model: nn.Module, *, syncs: bool) -> Iterator[None]:
    """Run forward and backward of a micro-batch; ranks average gradients only if `syncs`, in a step's last one."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if syncs else model.no_sync():
            yield
        return
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # a method of FSDP2's modules
    if set_sync is not None:
        set_sync(syncs)
    yield


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor's whole value on every rank (collective); any other tensor unchanged."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
