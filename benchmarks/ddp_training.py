"""Training that `ddp.py` times: one function under DistributedDataParallel, started by skyward and by torchrun.

Rank 0 talks to the benchmark over a socket, in lines. It reports its first step. Then it reads a number of steps, runs
them with all ranks, reports how long they took, and repeats until the number is 0. All ranks wait for the next number
without using a processor.

    python -m torch.distributed.run --nproc-per-node 2 ddp_training.py PORT
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable

BATCH = 64
"""Samples of each rank in a step."""
_FEATURES, _HIDDEN, _CLASSES = 784, 256, 10


def train(port: int) -> None:
    """Train in every rank, with the process group open."""
    import torch
    import torch.distributed as dist

    is_first = dist.get_rank() == 0
    step = _make_step()
    step()
    done_at = time.monotonic()  # the machine's clock, which the benchmark reads too
    steps = torch.zeros(1, dtype=torch.int64)
    sock = socket.create_connection(("127.0.0.1", port)) if is_first else socket.socket()
    with sock, sock.makefile("rw") as told:
        if is_first:
            print(json.dumps({"first_step": done_at, "threads": torch.get_num_threads()}), file=told, flush=True)
        while True:
            if is_first:
                steps[0] = int(told.readline() or 0)
            dist.broadcast(steps, src=0)
            if not steps[0]:
                return
            begin = time.perf_counter()
            for _ in range(int(steps[0])):
                step()
            if is_first:
                print(json.dumps({"elapsed": time.perf_counter() - begin}), file=told, flush=True)


def _make_step() -> Callable[[], None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(_FEATURES, _HIDDEN), torch.nn.ReLU(), torch.nn.Linear(_HIDDEN, _CLASSES)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = torch.nn.CrossEntropyLoss()
    inputs, labels = torch.randn(BATCH, _FEATURES), torch.randint(_CLASSES, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Train under torchrun."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(int(sys.argv[1]))
    dist.destroy_process_group()
    os._exit(0)  # torch's threads can abort the interpreter at its end, and torchrun then reports a failure


if __name__ == "__main__":
    main()
