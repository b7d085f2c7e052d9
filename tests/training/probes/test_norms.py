"""Norms of many tensors and of matrices, against torch's own, with one wait for the device each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from skyward.training.callbacks.norms import measure, named_parameters, unmeasurable
from skyward.training.callbacks.parameter_norm import PowerIteration, as_matrix
from tests.training.probes.waits import Waits


def test_norms_are_those_of_torch_for_every_dtype_and_shape() -> None:
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {
        "matrix": torch.randn(30, 20),
        "double": torch.randn(7, dtype=torch.float64),
        "bfloat16": torch.randn(500).bfloat16(),
        "half, its squares beyond its range": torch.full((100,), 300.0, dtype=torch.float16),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(-2.0),
        "complex": torch.randn(5, dtype=torch.complex64),
        "transposed": torch.randn(4, 5).T,
    }
    expected = {
        name: float(torch.linalg.vector_norm(each.to(torch.complex128 if each.is_complex() else torch.float64)))
        for name, each in tensors.items()
    }
    assert measure(tensors).values() == pytest.approx(expected, rel=1e-6)
    total = sum(each**2 for each in expected.values()) ** 0.5
    assert measure(tensors).total() == pytest.approx(total, rel=1e-6)
    assert measure({}).values() == {}
    assert measure({}).total() == 0.0


def test_a_sparse_gradient_has_the_norm_of_the_dense_one() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    assert table.weight.grad is not None
    assert measure({"table": table.weight.grad}).values()["table"] == pytest.approx(15**0.5)


def test_a_hundred_norms_take_one_wait() -> None:
    tensors = {str(at): torch.randn(at + 1, dtype=torch.float64 if at % 2 else torch.float32) for at in range(100)}
    with Waits() as each_by_itself:
        [each.norm().item() for each in tensors.values()]
    assert each_by_itself.count == 100  # the counter counts
    with Waits() as starting:
        pending = measure(tensors)
    assert starting.count == 0
    with Waits() as reading:
        pending.values()
    assert reading.count == 1
    with Waits() as total:
        measure(tensors).total()
    assert total.count == 1


def test_a_norm_is_of_the_moment_when_it_was_started() -> None:
    gradient = torch.ones(4)
    pending = measure({"a": gradient})
    gradient.zero_()
    assert pending.values() == {"a": 2.0}


def test_names_have_no_wrappers_and_tied_parameters_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.module = nn.Linear(4, 4)

    compiled = nn.Module()
    compiled._orig_mod = Tied()
    assert [name for name, _ in named_parameters(compiled)] == ["embed.weight", "module.weight", "module.bias"]


def test_parameters_without_values_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    reason = unmeasurable(model)
    assert reason is not None
    assert "'weight' is on the meta device" in reason
    assert unmeasurable(nn.Linear(2, 2)) is None
    assert unmeasurable(object()) == "the run's model is of type object, not a torch module"


@pytest.mark.parametrize("shape", [(64, 64), (256, 48), (48, 256), (16, 3, 5, 5), (1, 7), (9, 1)])
def test_power_iteration_finds_the_largest_singular_value(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    iteration, weight = PowerIteration(steps=10), torch.randn(shape)
    matrix = as_matrix(weight)
    true = float(torch.linalg.svdvals(matrix)[0])
    assert float(torch.linalg.matrix_norm(matrix, 2)) == pytest.approx(true, rel=1e-5)
    first = float(iteration.estimate("w", matrix))
    assert first <= true * (1 + 1e-5)
    assert first == pytest.approx(true, rel=0.03)
    later = [float(iteration.estimate("w", matrix)) for _ in range(9)]
    assert later[-1] == pytest.approx(true, rel=1e-3)


def test_a_warm_start_follows_a_matrix_that_changes() -> None:
    torch.manual_seed(2)
    iteration, matrix = PowerIteration(steps=2), torch.randn(96, 96)
    for _ in range(20):
        iteration.estimate("w", matrix)
    for _ in range(5):
        matrix = matrix + 0.001 * torch.randn(96, 96)
        true = float(torch.linalg.svdvals(matrix)[0])
        cold = float(PowerIteration(steps=1).estimate("w", matrix))
        assert float(iteration.estimate("w", matrix)) == pytest.approx(true, rel=2e-3)
        assert cold < true * 0.99


def test_a_matrix_of_zeros_or_nan_loses_no_direction() -> None:
    """A LoRA adapter begins as zeros. An update that blew up may be undone."""
    torch.manual_seed(3)
    iteration, matrix = PowerIteration(steps=10), torch.randn(8, 8)
    true = float(torch.linalg.svdvals(matrix)[0])
    assert float(iteration.estimate("w", torch.zeros(8, 8))) == 0.0
    assert float(iteration.estimate("w", matrix)) == pytest.approx(true, rel=0.02)
    assert torch.isnan(iteration.estimate("w", torch.full((8, 8), float("nan"))))
    assert float(iteration.estimate("w", matrix)) == pytest.approx(true, rel=1e-3)


def test_directions_are_kept_as_plain_text_and_resume_to_the_bit(tmp_path: Path) -> None:
    import json

    torch.manual_seed(4)
    matrices = {
        "a": torch.randn(40, 30),
        "b": torch.randn(5, 50, dtype=torch.float64),
        "c": torch.randn(9, 9).bfloat16(),
    }
    one = PowerIteration(steps=2)
    for name, each in matrices.items():
        one.estimate(name, each)
    other = PowerIteration(steps=2)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for name, each in matrices.items():
        assert one.estimate(name, each) == other.estimate(name, each)


def test_estimates_need_no_wait_and_draw_no_random_number() -> None:
    state = torch.get_rng_state()
    iteration = PowerIteration(steps=10)
    with Waits() as waits:
        iteration.estimate("w", torch.zeros(20, 10))
    assert waits.count == 0
    assert torch.equal(torch.get_rng_state(), state)
