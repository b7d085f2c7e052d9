"""The norm of a delta is that of all its parameters, and a value that is not finite is found wherever it is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from skyward.training.diloco.compression import CHUNK, Compressed
from skyward.training.diloco.examination import Findings, Shaped, examine
from skyward.training.diloco.frames import decode
from skyward.training.diloco.tensors import frame_of
from tests.training.diloco.runs import compress


def findings(tensors: Mapping[str, torch.Tensor | Compressed]) -> tuple[Findings, list[float]]:
    """Return the findings, and the norms that were checked."""
    frame, norms = decode(bytearray(b"".join(frame_of(tensors, {"rows": "7"})))), list[float]()
    expected = {name: Shaped(tuple(tensor.shape)) for name, tensor in tensors.items()}
    return examine("w", frame, expected=expected, weighting="equal", check_norm=norms.append), norms


def test_norm_is_that_of_all_parameters_together() -> None:
    tensors = {"a": torch.tensor([[2.0, 0.0]]), "b": torch.tensor([1.0, 2.0]), "c": torch.tensor([])}
    found, norms = findings({**tensors, "buffer:mean": torch.tensor([100.0])})
    assert found.norm == pytest.approx(3.0)
    assert norms == [found.norm]
    assert (found.rows, found.weight, found.fragment_round, found.refusal) == (7, 1, None, None)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_norm_reaches_over_many_chunks(bits: int) -> None:
    tensor = torch.randn(2 * CHUNK + 77, generator=torch.Generator().manual_seed(0))
    packed = compress(tensor, bits) if bits else tensor
    expected = packed.decoded() if isinstance(packed, Compressed) else packed
    assert findings({"a": packed})[0].norm == pytest.approx(float(expected.double().norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["a", "buffer:mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found(name: str, value: float) -> None:
    tensors = {"a": torch.ones(CHUNK + 1), "buffer:mean": torch.ones(CHUNK + 1)}
    tensors[name][CHUNK] = value
    _, norms = findings(tensors)
    assert [math.isfinite(norm) for norm in norms] == [False]
