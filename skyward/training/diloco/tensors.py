"""Tensors from and to frames, and the arrays of a model that workers exchange."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping

import numpy  # noqa: F401  # torch installs without it, and fails at the first frame: fail at the import instead
import torch

from ...errors import UsageError
from ..parts import is_dtensor
from .compression import CHUNK, SCALE_PREFIX, Compressed, compressed_in, description
from .frames import BUFFER_PREFIX, FROZEN_PREFIX, ArrayFrame, WireArray, encode

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def frame_of(
    tensors: Mapping[str, torch.Tensor | Compressed], metadata: Mapping[str, str], *, is_bf16: bool = False
) -> list[memoryview]:
    """Return the pieces of a frame with these tensors, and with what is needed to decode the compressed ones."""
    return encode(to_wire(tensors, is_bf16=is_bf16), {**metadata, **description(tensors)})


def to_wire(tensors: Mapping[str, torch.Tensor | Compressed], *, is_bf16: bool = False) -> dict[str, WireArray]:
    """Return tensors as arrays of a frame, in float32 or rounded to bfloat16. They share memory where they can.

    The widest come first, so that each is aligned.
    """
    dtype = "BF16" if is_bf16 else "F32"
    scales, plain, codes = {}, {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Compressed):
            scales[SCALE_PREFIX + name] = _array(tensor.scales, "F32")
            codes[name] = _array(tensor.codes, "U8")
        else:
            plain[name] = _array(tensor.detach().to("cpu", _DTYPES[dtype]).contiguous(), dtype)
    return scales | plain | codes


def _array(tensor: torch.Tensor, dtype: str) -> WireArray:
    data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return WireArray(dtype=dtype, shape=tuple(tensor.shape), data=data)


def to_tensors(frame: ArrayFrame) -> dict[str, torch.Tensor]:
    """Return the arrays of a frame as float32 tensors. They share the frame's memory, which must be writable.

    Raises:
        UsageError: An array is bytes that nothing describes, or does not fit its description.
    """
    compressed = compressed_in(frame)
    tensors = {}
    for name, array in frame.arrays.items():
        if name in compressed:
            tensors[name] = compressed[name].decoded()
        elif name.removeprefix(SCALE_PREFIX) not in compressed:
            tensors[name] = _tensor(name, array)
    return tensors


def _tensor(name: str, array: WireArray) -> torch.Tensor:
    _check_dtype(name, array)
    if array.data.nbytes:
        tensor = torch.frombuffer(array.data, dtype=_DTYPES[array.dtype]).reshape(array.shape)
    else:
        tensor = torch.empty(array.shape)
    return tensor.float()


def _check_dtype(name: str, array: WireArray) -> None:
    if array.dtype not in _DTYPES:
        raise UsageError(f"frame: {name!r} has the dtype {array.dtype}, and nothing says what it means; send F32")


class FlatTensors:
    """Arrays of a frame, to be decoded in chunks.

    Args:
        frame: A frame that `to_tensors` can read.
    """

    def __init__(self, frame: ArrayFrame) -> None:
        self._arrays, self._compressed = frame.arrays, compressed_in(frame)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, array in frame.arrays.items():
            if name in self._compressed:
                self.shapes[name] = self._compressed[name].shape
            elif name.removeprefix(SCALE_PREFIX) not in self._compressed:
                _check_dtype(name, array)
                self.shapes[name] = array.shape

    def chunks(self, name: str) -> Iterator[torch.Tensor | Compressed]:
        """Return the values of an array as they have arrived, flat, in chunks. They share the frame's memory."""
        if name in self._compressed:
            compressed = self._compressed[name]
            size = math.prod(compressed.shape)
            return (compressed.part(slice(begin, begin + CHUNK)) for begin in range(0, size, CHUNK))
        array = self._arrays[name]
        if array.data.nbytes == 0:
            return iter(())
        return iter(torch.frombuffer(array.data, dtype=_DTYPES[array.dtype]).split(CHUNK))


def squares_of(chunk: torch.Tensor) -> float:
    """Return the sum of the squares of a flat chunk. It is not finite if any value is not.

    Values in bfloat16 are widened on the way. To widen them first, and to multiply then, takes half as long again.
    """
    return float(torch.linalg.vector_norm(chunk, dtype=torch.float32)) ** 2


def product_of(chunk: torch.Tensor, other: torch.Tensor) -> float:
    """Return the scalar product of two flat chunks.

    A product with a matrix of one row: `torch.dot`, and a matrix of more rows, are shared between threads even if they
    are short, at up to 70 times the cost.
    """
    return float(chunk.view(1, -1).mv(other))


def exchanged(model: torch.nn.Module, *, may_be_sharded: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that workers exchange, in the order of the model, by their names on the wire.

    These are its parameters, and its buffers of floating point, such as the running means of BatchNorm. Tied weights
    are one tensor, under their first name. Integers, such as counters, stay where they are.

    Parameters that need no gradient, such as the base of LoRA, only come to a worker that joins. In a model of Keras
    they count as buffers, because Keras keeps its running means so.

    Args:
        model: The model.
        may_be_sharded: Whether its parameters may be the shards of `fully_shard`.

    Raises:
        UsageError: The model has no parameters, or ones that are sharded over ranks.
    """
    if any(kind.__name__ == "FullyShardedDataParallel" for part in model.modules() for kind in type(part).__mro__):
        raise UsageError("model: FullyShardedDataParallel hides whole parameters; use fully_shard (FSDP2)")
    prefix = BUFFER_PREFIX if _is_of_keras(model) else FROZEN_PREFIX
    tensors: dict[str, torch.Tensor] = {
        name if parameter.requires_grad else prefix + name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    sharded = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    if sharded and not may_be_sharded:
        raise UsageError(
            f"model: parameter {sharded[0]!r} is sharded over ranks; pass a model that is whole here, or use "
            "DiLoCoCallback on all ranks"
        )
    if all(name.startswith(prefix) for name in tensors):
        raise UsageError("model: has no parameters that need a gradient; pass one that can be trained")
    tensors.update(
        (BUFFER_PREFIX + name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()
    )
    return tensors


def refuse_deepspeed(model: torch.nn.Module, optimizer: object) -> None:
    """Refuse a model that DeepSpeed trains, before a worker loads parameters that are overwritten or partitioned.

    DeepSpeed steps on master copies of its own, and copies them over the model's parameters. With ZeRO 3 the model has
    empty ones.

    Args:
        model: The model, or the engine around it.
        optimizer: Its optimizer, of any kind, with wrappers or without.

    Raises:
        UsageError: One of both is DeepSpeed's.
    """
    parts: list[object] = [model]
    while optimizer is not None and optimizer not in parts:
        parts.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    kinds = {kind for part in parts for kind in type(part).__mro__}
    is_partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if is_partitioned or any(kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds):
        raise UsageError(
            "model: DeepSpeed trains master copies of its own and would overwrite the parameters of DiLoCo; use DDP or "
            "fully_shard (FSDP2) inside a worker"
        )


def short_lived(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor for one round, whose values are not set. The system gets its memory back with it.

    The C library keeps freed memory for the thread that had asked for it, and rounds are closed by changing threads. So
    a server kept a second model, which nobody used.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def in_rounds(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of tensors that rounds exchange, in their order: all but frozen parameters."""
    return tuple(name for name in names if not name.startswith(FROZEN_PREFIX))


def _is_of_keras(model: torch.nn.Module) -> bool:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__module__.partition(".")[0] == "keras" for kind in kinds)
