"""Compressed updates: what is lost, what error feedback gives back, and frames that are broken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.training.diloco import compression
from skyward.training.diloco.compression import (
    BLOCK,
    CHUNK,
    METADATA_KEY,
    SCALE_PREFIX,
    Compressed,
    compress_with_feedback,
    decoded,
)
from skyward.training.diloco.frames import ArrayFrame, decode, size_of
from skyward.training.diloco.tensors import frame_of, to_tensors
from tests.doctests import run_examples
from tests.training.diloco.runs import compress

BITS = [8, 4]
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (1,), (2, 3), (BLOCK,), (BLOCK + 1,), (3, 2 * BLOCK - 1), (2 * CHUNK + 5,)]


def sent(tensors: dict[str, Any], **options: Any) -> ArrayFrame:
    return decode(bytearray(b"".join(frame_of(tensors, {"round": "3"}, **options))))


@pytest.mark.parametrize("bits", BITS)
def test_tensors_in_another_order_of_memory_are_compressed_as_they_read(bits: int) -> None:
    tensor = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0)).permute(2, 0, 1)
    updates, errors = compress_with_feedback({"weight": tensor}, {"weight": tensor}, bits)
    assert torch.equal(decoded(updates["weight"]), compress((2 * tensor).contiguous(), bits).decoded())
    assert torch.allclose(decoded(updates["weight"]) + errors["weight"], 2 * tensor, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_value_is_wrong_by_at_most_half_a_scale(bits: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = compress(tensor, bits).decoded()
    assert result.shape == tensor.shape
    largest = 2 ** (bits - 1) - 1
    values, results = tensor.reshape(-1), result.reshape(-1)
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        scale = block.abs().max() / largest
        assert (results[begin : begin + BLOCK] - block).abs().max() <= 0.5001 * scale


@pytest.mark.parametrize("bits", BITS)
def test_a_frame_carries_compressed_arrays_to_the_bit(bits: int) -> None:
    tensors: dict[str, Any] = {str(shape): torch.randn(shape) for shape in SHAPES}
    wire, _ = compress_with_feedback({**tensors, "buffer:mean": torch.randn(5)}, {}, bits)
    received = to_tensors(sent(wire))
    assert received.keys() == wire.keys()
    for name, value in wire.items():
        assert torch.equal(received[name], decoded(value)), name


def test_four_bits_take_an_eighth_of_float32() -> None:
    wire, _ = compress_with_feedback({"weight": torch.randn(1024, 1024)}, {}, 4)
    assert size_of(frame_of(wire, {})) < 2**20 * 4.3 / 8


@settings(max_examples=30)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=9), st.sampled_from(BITS), st.integers(1, 12))
def test_error_feedback_loses_nothing(values: list[float], bits: int, rounds: int) -> None:
    """The sum of all received values differs from the sum of the sent ones by the last rounding error only."""
    update = {"p": torch.tensor(values)}
    residuals: dict[str, torch.Tensor] = {}
    total = torch.zeros(len(values), dtype=torch.float64)
    for _ in range(rounds):
        wire, residuals = compress_with_feedback(update, residuals, bits)
        total += decoded(wire["p"]).double()
    missing = rounds * update["p"].double() - total
    torch.testing.assert_close(missing, residuals["p"].double(), atol=1e-4, rtol=1e-4)
    assert residuals["p"].abs().max() <= 16 / (2**bits - 2) + 1e-4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_not_hidden(bits: int, value: float) -> None:
    result = compress(torch.tensor([1.0, value, 2.0]), bits).decoded()
    assert not result.isfinite().any()


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_the_smallest_numbers_stay_finite(bits: int) -> None:
    tensor = torch.tensor([0.0, 1e-45, -1e-45, 1e-38])
    assert (compress(tensor, bits).decoded() - tensor).abs().max() < 1e-38
    assert compress(torch.zeros(5), bits).decoded().tolist() == [0.0] * 5


def described(frame: ArrayFrame, **changes: Any) -> ArrayFrame:
    entry = json.loads(frame.metadata[METADATA_KEY]) | changes
    return replace(frame, metadata={METADATA_KEY: json.dumps(entry)})


def test_broken_descriptions_are_refused() -> None:
    frame = sent({"weight": compress(torch.randn(6, 3), 4)})
    scales = frame.arrays[SCALE_PREFIX + "weight"]
    for broken, message in [
        (replace(frame, metadata={METADATA_KEY: "{"}), "cannot be read"),
        (replace(frame, metadata={METADATA_KEY: "[]"}), "cannot be read"),
        (described(frame, bits=3), "bits=3"),
        (described(frame, block=64), "block=64"),
        (described(frame, shapes={"weight": [-6, 3]}), r"the shape \[-6, 3\] of 'weight'"),
        (described(frame, shapes={"weight": [60, 3]}), "needs 90 bytes of U8 in 'weight'"),
        (described(frame, shapes={"other": [6, 3]}), "needs 9 bytes of U8 in 'other'"),
        (replace(frame, arrays={"weight": frame.arrays["weight"]}), "needs 4 bytes of F32 in 'scale:weight'"),
        (replace(frame, arrays={"weight": scales}), "needs 9 bytes of U8"),
        (replace(frame, metadata={}), "'weight' has the dtype U8, and nothing says what it means"),
    ]:
        with pytest.raises(UsageError, match=message):
            to_tensors(broken)


def test_examples_run() -> None:
    assert isinstance(compress(torch.ones(3), 8), Compressed)
    assert run_examples(compression) == 4
