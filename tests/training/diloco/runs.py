"""Small trainings for the tests of server and worker: each worker of a run is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skyward.training.diloco import DiLoCoServer, DiLoCoWorker
from skyward.training.diloco.compression import Compressed, compress_with_feedback
from tests.ssh.server import free_port

TOKEN = "a token for tests"


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, data_seed: int = 0) -> float:
    """Train on the batch of a number, always the same one."""
    generator = torch.Generator().manual_seed(1000 * data_seed + number)
    x = torch.randn(8, 4, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def worker_of(
    server: DiLoCoServer | str, model: torch.nn.Module, optimizer: Any, name: str, **options: Any
) -> DiLoCoWorker:
    defaults: dict[str, Any] = {
        "sync_every": 3,
        "bf16_comm": False,
        "heartbeat_interval": 0,
        "timeout": 60,
        "token": TOKEN,
    }
    address = server if isinstance(server, str) else server.address
    return DiLoCoWorker(model, optimizer, address, worker_id=name, **defaults | options)


@contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[DiLoCoServer]:
    # Not the kernel's choice: a server that is started again at its port might find it taken by another connection.
    with DiLoCoServer(*arguments, **{"port": free_port(), "token": TOKEN, "heartbeat_timeout": 0, **options}) as server:
        yield server


def together(*functions: Callable[[], object]) -> None:
    """Run functions at the same time. Raise the first error of any of them once all have ended."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(220)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def train(
    server: DiLoCoServer | str, model: torch.nn.Module, name: str, steps: int, *, data_seed: int = 0, **options: Any
) -> None:
    """Train for a number of steps as a worker. No step is left over when the steps are whole rounds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with worker_of(server, model, optimizer, name, **options):
        for number in range(steps):
            step(model, optimizer, number, data_seed)


def compress(tensor: torch.Tensor, bits: int) -> Compressed:
    """Compress one tensor as the first update of a worker does."""
    compressed = compress_with_feedback({"weight": tensor}, {}, bits)[0]["weight"]
    assert isinstance(compressed, Compressed)
    return compressed
