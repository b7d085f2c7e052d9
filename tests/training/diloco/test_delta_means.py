"""The pass over the deltas of a round: the mean to the bit, and angles that agree with plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.training.diloco.compression import CHUNK
from skyward.training.diloco.delta_means import MEASURED, DeltaMeans, DeltaSummary
from skyward.training.diloco.frames import BUFFER_PREFIX, ArrayFrame, decode
from skyward.training.diloco.tensors import frame_of, to_tensors
from tests.training.diloco.runs import compress

SHAPES = {"large": (2, CHUNK // 2 + 77), "odd": (3, 5), "scalar": (), "empty": (0, 4), f"{BUFFER_PREFIX}mean": (9,)}
WEIGHTS = {"a": 1, "b": 3, "c": 2}


def summarize(
    deltas: Mapping[str, ArrayFrame],
    weights: Mapping[str, float],
    direction: Mapping[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], DeltaSummary]:
    """Return the whole mean, and the figures."""
    means = DeltaMeans(deltas, weights, direction=direction)
    whole = {name: torch.full(shape, math.nan) for name, shape in means.shapes.items()}
    for name, tensor in whole.items():
        for chunk, mean in means.chunks(name):
            tensor.view(-1)[chunk] = mean
    return whole, means.summary()


def frames(wire: str, workers: Iterable[str] = WEIGHTS) -> dict[str, ArrayFrame]:
    generator = torch.Generator().manual_seed(5)
    common = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made = {}
    for worker in workers:
        delta = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in common.items()}
        packed = {
            name: tensor if name.startswith(BUFFER_PREFIX) or not wire.isdecimal() else compress(tensor, int(wire))
            for name, tensor in delta.items()
        }
        made[worker] = decode(bytearray(b"".join(frame_of(packed, {}, is_bf16=wire != "float32"))))
    return made


def frame_with(values: torch.Tensor) -> ArrayFrame:
    return decode(bytearray(b"".join(frame_of({"x": values}, {}))))


def plain_mean(deltas: Mapping[str, ArrayFrame], weights: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the mean of whole deltas, summed in float64 in the order of the workers' ids."""
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for worker, frame in sorted(deltas.items()):
        for name, tensor in to_tensors(frame).items():
            sums[name] += weights[worker] * tensor.double()
    return {name: (total / sum(weights.values())).float() for name, total in sums.items()}


def parameters_of(frame: ArrayFrame) -> torch.Tensor:
    tensors = to_tensors(frame)
    return torch.cat([tensor.double().reshape(-1) for name, tensor in tensors.items() if BUFFER_PREFIX not in name])


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "8", "4"])
def test_mean_and_angles_are_those_of_whole_deltas(wire: str) -> None:
    deltas = frames(wire)
    vectors = {worker: parameters_of(frame) for worker, frame in deltas.items()}
    expected = plain_mean(deltas, WEIGHTS)

    found_mean, found = summarize(deltas, WEIGHTS)

    assert found_mean.keys() == SHAPES.keys()
    assert all(torch.equal(found_mean[name], tensor) for name, tensor in expected.items())
    mean = sum(vectors[worker] * weight for worker, weight in WEIGHTS.items()) / sum(WEIGHTS.values())
    assert isinstance(mean, torch.Tensor)
    assert found.norm == pytest.approx(float(mean.norm()), rel=1e-4)
    for worker, vector in vectors.items():
        # "large" comes first. Its second chunk is not measured.
        seen = torch.cat([vector[:CHUNK], vector[math.prod(SHAPES["large"]) :]])
        mean_seen = torch.cat([mean[:CHUNK], mean[math.prod(SHAPES["large"]) :]])
        cosine = float(seen @ mean_seen / seen.norm() / mean_seen.norm())
        assert found.cosines[worker] == pytest.approx(cosine, abs=1e-4)


def test_angles_of_large_tensors_are_those_of_some_chunks() -> None:
    generator = torch.Generator().manual_seed(1)
    common = torch.randn((MEASURED + 1) * CHUNK, generator=generator)
    vectors = {name: common + torch.randn(common.shape, generator=generator) for name in "ab"}
    _, found = summarize({name: frame_with(vector) for name, vector in vectors.items()}, dict.fromkeys(vectors, 1))
    mean = (vectors["a"] + vectors["b"]) / 2
    for name, vector in vectors.items():
        of_all = float(torch.nn.functional.cosine_similarity(vector, mean, dim=0))
        assert found.cosines[name] == pytest.approx(of_all, abs=0.01)
    opposite = {"a": vectors["a"].clone(), "b": vectors["a"].clone()}
    for chunk in (0, MEASURED):  # those that are measured
        opposite["b"][chunk * CHUNK : (chunk + 1) * CHUNK] *= -0.5
    _, found = summarize({name: frame_with(vector) for name, vector in opposite.items()}, dict.fromkeys(vectors, 1))
    assert found.cosines == {"a": pytest.approx(1.0), "b": pytest.approx(-1.0)}


def test_the_deltas_of_many_workers_are_added_in_the_order_of_their_ids() -> None:
    names = [f"w{number:02}" for number in range(19)]
    deltas, weights = frames("float32", names), dict.fromkeys(names, 1)
    found, _ = summarize(dict(reversed(deltas.items())), weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in plain_mean(deltas, weights).items())


@settings(max_examples=50)
@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 2**40)
)
def test_mean_of_equal_deltas_is_that_delta_to_the_bit(delta: list[float], workers: int, tokens: int) -> None:
    frame, names = frame_with(torch.tensor(delta)), [f"w{worker}" for worker in range(workers)]
    weights = {name: tokens + worker for worker, name in enumerate(names)}
    found, _ = summarize(dict.fromkeys(names, frame), weights)
    assert found["x"].tolist() == delta


def test_mean_is_summed_in_float64() -> None:
    deltas = {
        name: frame_with(torch.tensor([value])) for name, value in zip("abc", (2.0**30, 1, -(2.0**30)), strict=True)
    }
    found, _ = summarize(deltas, dict.fromkeys(deltas, 1))
    assert found["x"].tolist() == [pytest.approx(1 / 3)]  # float32 would have lost the 1


def test_a_direction_replaces_the_mean_and_missing_names_count_as_nothing() -> None:
    delta = decode(bytearray(b"".join(frame_of({"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([12.0])}, {}))))
    _, found = summarize({"a": delta}, {"a": 1}, direction={"x": torch.tensor([1.0, 0.0])})
    assert found.norm == pytest.approx(13.0)
    assert found.cosines["a"] == pytest.approx(3 / 13)
    assert summarize({"a": delta}, {"a": 1}, direction={})[1].cosines == {"a": None}


def test_no_angle_is_claimed_where_there_is_none() -> None:
    nothing = decode(bytearray(b"".join(frame_of({"x": torch.zeros(3)}, {}))))
    _, found = summarize({"a": nothing, "b": nothing}, {"a": 1, "b": 1})
    assert found.cosines == {"a": None, "b": None}
    assert math.isclose(found.norm, 0.0)
