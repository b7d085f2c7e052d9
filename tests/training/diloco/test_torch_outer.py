"""Optimizers of torch as the outer one: equal to torch alone to the bit, for each fragment, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training.diloco import TorchOuter, torch_outer
from tests.doctests import run_examples
from tests.ssh.server import free_port
from tests.training.diloco.runs import are_equal, make_model, serving, state_of, step, worker_of
from tests.training.diloco.test_algorithm import SGD, run, run_torch, tensors


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def test_torchs_sgd_is_the_one_of_the_paper() -> None:
    outer = TorchOuter(lambda parameters: torch.optim.SGD(parameters, **SGD["nesterov"]))
    assert are_equal(run(outer, 9), run_torch(SGD["nesterov"], 9))


def test_each_parameter_counts_its_own_steps() -> None:
    """Adam corrects the bias of its moments by the number of steps."""
    outer, parameters = TorchOuter(adam), tensors(0)
    expected = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(0).items()}
    optimizers = {name: adam([parameter]) for name, parameter in expected.items()}
    for number, name in enumerate(["weight", "weight", "bias", "weight", "scale", "bias"], start=1):
        outer.step(parameters, {name: tensors(number)[name]})
        expected[name].grad = tensors(number)[name]
        optimizers[name].step()
    assert are_equal(parameters, {name: parameter.detach() for name, parameter in expected.items()})


def test_a_restored_optimizer_has_its_moments_and_the_new_settings() -> None:
    first, second = TorchOuter(adam), TorchOuter(adam)
    parameters, expected = tensors(0), tensors(0)
    first.step(parameters, tensors(1))
    second.load_state_dict(first.state_dict())
    assert second.state_dict().keys() == first.state_dict().keys()
    second.step(parameters, tensors(2))
    whole = TorchOuter(adam)
    for number in (1, 2):
        whole.step(expected, tensors(number))
    assert are_equal(parameters, expected)
    still = TorchOuter(lambda parameters: torch.optim.AdamW(parameters, lr=0.0))
    still.load_state_dict(second.state_dict())
    still.step(parameters, tensors(3))
    assert are_equal(parameters, expected)


@pytest.mark.parametrize("options", [{}, {"num_fragments": 2}])
def test_a_server_goes_on_with_the_moments_of_its_save(options: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for folder, restarts in ((tmp_path / "whole", (12,)), (tmp_path / "restarted", (6, 12))):
        model, first, port = make_model(), 0, free_port()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = None
        for last in restarts:
            with serving(make_model(), outer_optimizer=TorchOuter(adam), save_dir=folder, port=port) as server:
                if worker is None:
                    worker = worker_of(server, model, optimizer, "a", sync_every=6, **options)
                    worker.start()
                for number in range(first, last):
                    step(model, optimizer, number)
                first = last
                if last == 12:
                    worker.stop()
        ends.append(state_of(model))
    assert are_equal(*ends)


def test_examples_run() -> None:
    assert run_examples(torch_outer) == 4
