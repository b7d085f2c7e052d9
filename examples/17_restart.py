"""A training that loses a rank and goes on from its checkpoint; and one that hangs, and says where.

python examples/17_restart.py
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import skyward as sky
from skyward.errors import GangHung


@sky.compute(max_restarts=2)  # any failure of a rank starts the gang again, at most twice
@sky.integrations.torch(backend="gloo", seed=0)
def train(epochs: int, checkpoint: Path, dies_in: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.nn.parallel import DistributedDataParallel

    x, y = load_digits(return_X_y=True)
    inputs, labels = sky.shard(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    info = sky.instance_info()
    assert info is not None

    first = 0
    if checkpoint.exists():  # an earlier start came so far
        state = torch.load(checkpoint)
        first = state["epoch"] + 1
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    loss = torch.zeros(1)
    for epoch in range(first, epochs):
        if epoch == dies_in and info.rank == 1 and info.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.3f}", flush=True)
        if sky.is_head:
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)  # whole, or not at all
        dist.barrier()  # no rank begins an epoch that a restart would not know of
    return first, loss.item()


@sky.compute(hang_timeout_s=1)  # far too short for a real training: here it is to be over soon
@sky.integrations.torch(backend="gloo")
def evaluate() -> float:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)  # a file server that does not answer
    score = torch.ones(1)
    dist.all_reduce(score)
    return score.item()


def show(folder: Path) -> None:
    logs = sky.LogFiles(folder / "logs", echo=False)  # a file for each rank and each start
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=logs) as pool:
        (first, loss), _ = train(epochs=8, checkpoint=folder / "digits.pt", dies_in=5) @ pool
        print(f"the last start began with epoch {first} and ended with a loss of {loss:.3f}")
        for path in sorted(folder.glob("logs/*/rank-1*")):
            print(f"{path.name}:\n{path.read_text()}", end="")
        try:
            evaluate() @ pool
        except GangHung as error:
            print(f"{type(error).__name__}: {error}")
            print(error.stacks[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        show(Path(folder))


if __name__ == "__main__":
    main()
