"""Frames: arrays survive to the bit, torn frames are refused, and safetensors reads and writes the same format."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch

from skyward.errors import UsageError
from skyward.training.diloco import frames
from skyward.training.diloco.frames import decode, encode, largest_frame, size_of
from skyward.training.diloco.tensors import to_tensors, to_wire
from tests.doctests import run_examples

MODEL = {
    "weight": torch.tensor([[1.5, -0.0], [float("inf"), 3e-45]]),
    "scale": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
    "last": torch.arange(5.0),
}


def whole(tensors: dict[str, torch.Tensor] = MODEL, *, is_bf16: bool = False) -> bytes:
    return b"".join(encode(to_wire(tensors, is_bf16=is_bf16), {"round": "3"}))


def test_float32_survives_to_the_bit() -> None:
    frame = decode(bytearray(whole()))
    assert frame.metadata == {"round": "3"}
    received = to_tensors(frame)
    assert list(received) == list(MODEL)
    for name, tensor in MODEL.items():
        assert received[name].shape == tensor.shape
        assert received[name].reshape(-1).view(torch.int32).tolist() == tensor.reshape(-1).view(torch.int32).tolist()


def test_bfloat16_takes_half_of_the_bytes_and_rounds_to_nearest() -> None:
    values = {"weight": torch.randn(4096, generator=torch.Generator().manual_seed(1))}
    received = to_tensors(decode(bytearray(whole(values, is_bf16=True))))["weight"]
    assert received.dtype == torch.float32
    assert torch.equal(received, values["weight"].bfloat16().float())
    assert len(whole(values, is_bf16=True)) < 0.52 * len(whole(values))


def test_safetensors_reads_our_frames_and_we_read_its_own() -> None:
    theirs = safetensors.torch.load(whole())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in MODEL.items())
    ours = to_tensors(decode(bytearray(safetensors.torch.save(MODEL, {"round": "3"}))))
    assert all(torch.equal(ours[name], tensor) for name, tensor in MODEL.items())


def test_a_frame_torn_at_any_byte_is_refused() -> None:
    """In its first field, in the header, between header and data, and in each array."""
    frame = whole()
    for length in range(len(frame)):
        with pytest.raises(UsageError, match=r"frame: .*send it again"):
            decode(frame[:length])
    with pytest.raises(UsageError, match="1 bytes follow its last array"):
        decode(frame + b"\0")


def with_header(entries: Any) -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **changes}}


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([], "no JSON object"),
        ({"__metadata__": {"round": 3}}, "not a table of texts"),
        ({"w": 1}, "entry of 'w' is no JSON object"),
        (entry(dtype="I64"), "dtype of 'w' is 'I64', and must be one of F32, BF16"),
        (entry(dtype=[]), r"dtype of 'w' is \[\]"),
        (entry(shape=[-1]), r"shape of 'w' is \[-1\]"),
        (entry(shape=[True]), r"shape of 'w' is \[True\]"),
        (entry(shape=[2]), r"offsets of 'w' are \[0, 0\], and its dtype and shape give \[0, 8\]"),
        (entry(data_offsets=[4, 4]), r"offsets of 'w' are \[4, 4\]"),
    ],
)
def test_a_header_that_lies_is_refused(entries: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        decode(with_header(entries))


def test_a_header_over_the_limit_is_refused_before_it_arrives() -> None:
    with pytest.raises(UsageError, match=r"header has 9223372036854775808 bytes, more than 16777216"):
        decode((2**63).to_bytes(8, "little"))


def test_the_limit_holds_a_frame_of_the_model() -> None:
    assert size_of(encode(to_wire(MODEL), {})) < largest_frame(tuple(tensor.shape) for tensor in MODEL.values())


def test_examples_run() -> None:
    assert run_examples(frames) == 3
