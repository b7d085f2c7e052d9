"""A plain training loop that evaluations never hold up: another process scores copies of its weights.

python examples/25_evaluation_beside_training.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from skyward.training.evaluation import AsyncEvaluator, BestModel, Timeline

EPOCHS = 30


def make_model() -> nn.Module:
    """The architecture; the weights come with each evaluation."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def score(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Runs on the worker. The model is in evaluation mode."""
    images, digits = data
    with torch.inference_mode():
        outputs = model(images)
    return {"accuracy": (outputs.argmax(1) == digits).double().mean()}


def main() -> None:
    torch.manual_seed(0)
    images, digits = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images = (images / 16).float()
    train_images, train_digits, held_out = images[:1400], digits[:1400], (images[1400:], digits[1400:])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    with tempfile.TemporaryDirectory() as folder:
        best, timeline = BestModel(Path(folder, "best.pt"), "accuracy"), Timeline()
        with AsyncEvaluator(
            make_model,
            score,
            held_out,  # sent to the worker once
            compute="subprocess",  # None: threads of this process; or a pool, or a node of it
            gate="always",
            on_backpressure="block",  # every epoch is scored; "skip" would never wait
            max_pending=8,
            timeout_s=60,
            best=best,
            timeline=timeline,
        ) as evaluator:
            step = 0
            for epoch in range(1, EPOCHS + 1):
                for at in torch.randperm(len(train_images)).split(64):
                    loss = nn.functional.cross_entropy(model(train_images[at]), train_digits[at])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1
                evaluator.submit(model.state_dict(), step=step, epoch=epoch)
                for record in evaluator.collect(step=step):
                    if record.status != "ok":
                        print(f"step {record.step}: {record.status}: {record.error}")
            # The end of the block waits for what is open.
        print(f"{len(evaluator.history)} evaluations of {EPOCHS} epochs, by {evaluator.history[-1].worker}")

        # The file has the weights that were scored, not those that training had when the score came.
        model.load_state_dict(torch.load(best.path, weights_only=True))
        record = evaluator.best
        assert record is not None
        again = score(model.eval(), held_out)["accuracy"].item()
        print(f"the best, of step {record.step}: {record.metrics['accuracy']:.3f}; equal: {again == best.value}")

        page = timeline.html(Path(folder, "timeline.html"))
        waited = timeline.summary()
        print(f"{Path(page).name}: copies took {waited.snapshot_s:.2f} s of {waited.wall_s:.2f} s")


if __name__ == "__main__":
    main()
