"""A training that loses a rank in the middle, goes on from its last checkpoint to the bit, and is read by one process.

python examples/24_checkpoints.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import skyward as sky
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
)


@sky.compute(max_restarts=1)
@sky.integrations.torch(backend="gloo", seed=0)
def train(folder: Path, steps: int, dies_at: int | None) -> tuple[int, float]:
    """Gives the step that the last start began after, and the last loss."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    info = sky.instance_info()
    assert info is not None
    torch.manual_seed(info.rank)  # ranks draw different data
    model = torch.nn.Linear(8, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    coordinator = CheckpointCoordinator(
        [
            StateComponent("model", model, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("optimizer", optimizer, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False),
        ],
        output_dir=folder,
    )
    with CheckpointManager(coordinator, save_steps=2, save_total_limit=2) as manager:
        resumed = manager.resume()  # the newest, if there is one
        first = resumed.step if resumed is not None and resumed.step is not None else 0
        loss = torch.zeros(1)
        for step in range(first + 1, steps + 1):
            x = torch.randn(16, 8)
            loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == dies_at and info.rank == 1 and info.restart_count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.step(step)  # every second one is copied here, and written while the next ones run
    return first, loss.item()


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        (_, expected), _ = train(whole, steps=10, dies_at=None) @ pool
        (first, loss), _ = train(killed, steps=10, dies_at=7) @ pool
        print(f"the last start went on after step {first}; its last loss is the same: {loss == expected}")

        # One process reads what two ranks wrote: the model is one state for all.
        model = torch.nn.Linear(8, 1)
        report = CheckpointCoordinator(
            [StateComponent("model", model, SharingPattern.REPLICATED)], output_dir=killed
        ).load_checkpoint()
        print(f"{Path(report.path).name}, written by {report.manifest.world_size} ranks: {report.loaded}")


if __name__ == "__main__":
    main()
