"""A training whose checkpoints lie in a bucket: begun on two nodes, it goes on in another pool, on one.

python examples/27_object_storage.py                   # an S3 on this machine, of moto
python examples/27_object_storage.py s3://bucket/run   # yours, with your own credentials
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import skyward as sky
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    checkpoints_in,
    problems,
)


@sky.compute
@sky.integrations.torch(backend="gloo", seed=0)
def train(url: str, steps: int) -> tuple[int, float]:
    """Gives the step that this run began after, and its last loss."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Linear(64, 64)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = sky.shard(torch.randn(64, 64, generator=torch.Generator().manual_seed(7)))
    coordinator = CheckpointCoordinator(
        [
            StateComponent("model", model, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("optimizer", optimizer, SharingPattern.REPLICATED, validate_replication=True),
        ],
        output_dir=url,
    )
    with CheckpointManager(coordinator, save_steps=10, save_total_limit=2) as manager:
        resumed = manager.resume()
        first = resumed.step if resumed is not None and resumed.step is not None else 0
        loss = torch.zeros(1)
        for step in range(first + 1, steps + 1):
            loss = (ddp(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.step(step)  # copied here, sent to the bucket while the next steps run
    return first, loss.item()


@contextlib.contextmanager
def a_store() -> Iterator[str]:
    """The URL of a bucket in an S3 on this machine. Its address and keys are in the environment, as they would be."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line for each request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    boto3.client("s3").create_bucket(Bucket="team")
    try:
        yield "s3://team/run"
    finally:
        server.stop()


def main() -> None:
    with contextlib.ExitStack() as stack:
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(a_store())
        for nodes, steps in ((2, 30), (1, 60)):
            with sky.ComputePool(provider=sky.Local(), nodes=nodes) as pool:
                first, loss = (train(url, steps) @ pool)[0]
            print(f"on {nodes} node{'s' * (nodes > 1)}: after step {first} to step {steps}, loss {loss:.3f}")
        for found in checkpoints_in(url):
            print(f"{found.path}: {found.manifest.world_size} ranks, whole: {problems(found.path) == []}")


if __name__ == "__main__":
    main()
