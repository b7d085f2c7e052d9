"""Compression of updates to 8 or 4 bits a value, with error feedback.

Each block of values has one scale, and a value is a whole number of scales. The rounding error of an update is kept and
added to the next one. So errors do not add up, and every value is sent in the end, only later.

Parameters are compressed. Buffers are not: a rounded variance could fall below 0.

Source: "1-Bit SGD" (Seide et al. 2014) for error feedback; arXiv 2501.18512 for outer gradients of 4 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError
from .frames import BUFFER_PREFIX, ArrayFrame, WireArray

BLOCK = 128
"""Number of values with one scale, which costs a quarter of a bit for each of them."""
CHUNK = 255 * BLOCK
"""Values of a chunk: 128 KiB of float32, so that a few chunks fit into the cache of one processor, also in float64.

Each call of torch costs as much as thousands of values: half as many values in a chunk take up to half as long again.
Whole blocks, so that compressed arrays can be cut there. Fewer than the 2**15 values from which torch shares arrays
between threads, which wait for each other with busy processors.
"""
BITS = (8, 4)
"""Legal numbers of bits for a value."""
METADATA_KEY = "quantized"
"""Text of a frame that describes its compressed arrays: `{"bits": 4, "block": 128, "shapes": {"weight": [3, 4]}}`."""
SCALE_PREFIX = "scale:"
"""Begins the name of the scales on the wire. The codes have the name of the array."""

_PAIRS = (
    torch.tensor([((byte & 15) - 8.0, (byte >> 4) - 8.0) for byte in range(256)], dtype=torch.float32, device="cpu")
    .view(torch.int64)
    .reshape(-1)
)
"""The two values of each byte of 4-bit codes, as one number: a look-up is twice as fast as shifting both."""

_ROUNDING = 1.5 * 2**23
"""Adding and subtracting it rounds float32 to the nearest even number, as `torch.round` does.

That shares even short tensors between threads, which wait for each other with busy processors.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """A compressed tensor. All machines decode it to the same bits."""

    bits: int
    shape: tuple[int, ...]
    codes: torch.Tensor
    """Whole numbers of scales: a signed byte for each value, or two values in a byte. Flat, uint8."""
    scales: torch.Tensor
    """Scale of each block, float32."""

    def decoded(self) -> torch.Tensor:
        """Return the values, float32. Those of a block that was not finite are NaN."""
        count = math.prod(self.shape)
        blocks = torch.empty(len(self.scales), BLOCK)
        flat = blocks.view(-1)
        if self.bits == 4:
            torch.index_select(_PAIRS, 0, self.codes.int(), out=flat.view(torch.int64)[: len(self.codes)])
        else:
            flat[:count].copy_(self.codes.view(torch.int8))
        blocks.mul_(self.scales[:, None])
        return flat[:count].reshape(self.shape)

    def part(self, chunk: slice) -> Compressed:
        """Return some of the values, flat. They begin at a whole block, and share memory."""
        begin, end, _ = chunk.indices(math.prod(self.shape))
        return Compressed(
            bits=self.bits,
            shape=(end - begin,),
            codes=self.codes[begin * self.bits // 8 : -(-end * self.bits // 8)],
            scales=self.scales[begin // BLOCK : -(-end // BLOCK)],
        )


def compress_into(part: Compressed, flat: torch.Tensor) -> torch.Tensor:
    """Compress flat values into a part of a compressed tensor, and return them as the receiver has them.

    They become whole numbers of scales, rounded to the nearest. The largest magnitude of each block is exact up to
    rounding, and zeros are exact.

    Args:
        part: The part, which begins at a whole block.
        flat: As many values, float32 on the CPU.
    """
    largest = 2 ** (part.bits - 1) - 1
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
    scales = torch.div(blocks.abs().amax(1), largest, out=part.scales)
    whole = (blocks / scales[:, None]).nan_to_num_(0.0, 0.0, 0.0)
    whole.add_(_ROUNDING).sub_(_ROUNDING).clamp_(-largest, largest)
    codes = whole.view(-1).to(torch.int8)
    if part.bits == 4:
        pairs = codes.add_(8).view(torch.int16)  # the first of two in the lower byte
        part.codes.copy_(pairs.bitwise_or_(pairs >> 4)[: len(part.codes)])
    else:
        part.codes.copy_(codes[: len(flat)].view(torch.uint8))
    return whole.mul_(scales[:, None]).view(-1)[: len(flat)]


def _empty(shape: torch.Size, bits: int) -> Compressed:
    count = shape.numel()
    codes = torch.empty(-(-count * bits // 8), dtype=torch.uint8)
    return Compressed(bits=bits, shape=tuple(shape), codes=codes, scales=torch.empty(-(-count // BLOCK)))


def compress_with_feedback(
    tensors: Mapping[str, torch.Tensor], residuals: Mapping[str, torch.Tensor], bits: int
) -> tuple[dict[str, Compressed | torch.Tensor], dict[str, torch.Tensor]]:
    """Return an update for the wire, and the rounding errors to add to the next one.

    Args:
        tensors: The update, float32 on the CPU. Buffers stay as they are.
        residuals: Rounding errors of the last update of each name; missing ones count as 0.
        bits: 8 or 4.

    Example:
        >>> wire, residuals = compress_with_feedback({"bias": torch.tensor([7.0, 0.4])}, {}, bits=4)
        >>> wire["bias"].decoded().tolist(), residuals["bias"].tolist()
        ([7.0, 0.0], [0.0, 0.4000000059604645])
        >>> wire, residuals = compress_with_feedback({"bias": torch.tensor([7.0, 0.4])}, residuals, bits=4)
        >>> wire["bias"].decoded().tolist()
        [7.0, 1.0]
    """
    wire: dict[str, Compressed | torch.Tensor] = {}
    errors = {}
    for name, tensor in tensors.items():
        if name.startswith(BUFFER_PREFIX):
            wire[name] = tensor
            continue
        total = tensor + residuals[name] if name in residuals else tensor.clone()
        errors[name] = total = total.contiguous()
        wire[name] = compressed = _empty(tensor.shape, bits)
        flat = total.view(-1)
        for begin in range(0, len(flat), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            flat[chunk] -= compress_into(compressed.part(chunk), flat[chunk])
    return wire, errors


def decoded(value: Compressed | torch.Tensor) -> torch.Tensor:
    """Return a tensor of the wire as the receiver has it, in float32."""
    return value.decoded() if isinstance(value, Compressed) else value.float()


# On the wire ----------------------------------------------------------------------------------------------------------


def description(tensors: Mapping[str, Compressed | torch.Tensor]) -> dict[str, str]:
    """Return the texts of a frame that say how to decode its compressed arrays."""
    compressed = {name: value for name, value in tensors.items() if isinstance(value, Compressed)}
    if not compressed:
        return {}
    bits = next(iter(compressed.values())).bits
    shapes = {name: value.shape for name, value in compressed.items()}
    return {METADATA_KEY: json.dumps({"bits": bits, "block": BLOCK, "shapes": shapes})}


def compressed_in(frame: ArrayFrame) -> dict[str, Compressed]:
    """Return the compressed arrays of a frame. They share its memory, which must be writable.

    Raises:
        UsageError: Codes or scales are missing, or do not fit their shapes.
    """
    text = frame.metadata.get(METADATA_KEY)
    if text is None:
        return {}
    try:
        entry = json.loads(text)
        bits, block, shapes = entry["bits"], entry["block"], entry["shapes"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _broken("cannot be read") from None
    if bits not in BITS or block != BLOCK:
        raise _broken(f"has bits={bits!r} and block={block!r}, which this version does not know")
    return {name: _compressed(frame, name, shape, bits) for name, shape in shapes}


def _compressed(frame: ArrayFrame, name: str, shape: Any, bits: int) -> Compressed:
    if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
        raise _broken(f"has the shape {shape!r} of {name!r}")
    count = math.prod(shape)
    codes = _bytes_of(frame, name, "U8", -(-count * bits // 8))
    scales = _bytes_of(frame, SCALE_PREFIX + name, "F32", 4 * -(-count // BLOCK))
    return Compressed(
        bits=bits,
        shape=tuple(shape),
        codes=torch.frombuffer(codes.data, dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8),
        scales=torch.frombuffer(scales.data, dtype=torch.float32) if count else torch.empty(0),
    )


def _bytes_of(frame: ArrayFrame, name: str, dtype: str, nbytes: int) -> WireArray:
    array = frame.arrays.get(name)
    if array is None or array.dtype != dtype or array.data.nbytes != nbytes:
        raise _broken(f"needs {nbytes} bytes of {dtype} in {name!r}")
    return array


def _broken(problem: str) -> UsageError:
    return UsageError(f"frame: its text {METADATA_KEY!r} {problem}; send it with versions of skyward that fit")
