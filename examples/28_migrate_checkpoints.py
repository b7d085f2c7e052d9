"""Checkpoints that other programs have left: taken over, checked, compared, gone on from, and given back to others.

python examples/28_migrate_checkpoints.py
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import skyward as sky
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    SharingPattern,
    StateComponent,
    checkpoints_in,
    differences,
    export_checkpoint,
    migrate_checkpoint,
    problems,
)


def model_and_optimizer() -> tuple[Any, Any]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any) -> float:
    import torch

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def what_others_left(place: Path) -> float:
    """One run's states as three kinds of checkpoints. Gives the loss of its next step."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    for _ in range(100):
        step(model, optimizer)
    files, hugging_face = place / "by_hand", place / "hugging_face"
    for folder in (files, hugging_face):
        folder.mkdir()
    torch.save(model.state_dict(), files / "model_state.pt")
    torch.save(optimizer.state_dict(), files / "optimizer_state.pt")
    save_file(model.state_dict(), hugging_face / "model.safetensors")
    torch.save(optimizer.state_dict(), hugging_face / "optimizer.pt")
    (hugging_face / "trainer_state.json").write_text(json.dumps({"global_step": 100}))
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=place / "dcp", no_dist=True)
    return step(model, optimizer)


@sky.compute
@sky.integrations.torch(backend="gloo")
def go_on(run: Path) -> float:
    model, optimizer = model_and_optimizer()
    CheckpointCoordinator(
        [
            StateComponent("model", model, SharingPattern.REPLICATED),
            StateComponent("optimizer", optimizer, SharingPattern.REPLICATED),
        ],
        output_dir=run,
    ).load_checkpoint()
    return step(model, optimizer)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place, run = Path(scratch), Path(scratch, "run")
        expected = what_others_left(place)
        for at, kind in enumerate(("by_hand", "hugging_face", "dcp"), start=1):
            path = migrate_checkpoint(place / kind, run / f"checkpoint-{at}00")
            print(f"{kind}: {Path(path).name}, whole: {problems(path) == []}")
        first, *others = (found.path for found in checkpoints_in(run))
        print(f"they differ in: {[list(differences(first, other)) for other in others]}")
        with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
            losses = go_on(run) @ pool
        print(
            f"two ranks go on with the same loss: {all(math.isclose(each, expected, rel_tol=1e-4) for each in losses)}"
        )
        export_checkpoint(first, place / "weights")
        print(f"for others: {[each.name for each in (place / 'weights').iterdir()]}")


if __name__ == "__main__":
    main()
