"""Train a small GPT, written in plain torch, on two ranks and with every callback; then go on from its middle.

python examples/21_gpt_from_scratch.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import skyward as sky
from skyward import training

TEXT = Path(__file__).parent / "data" / "prose.txt"
CONTEXT = 64  # characters


class GPT(nn.Module):
    """Characters in, the logits of each next one out. input_ids, labels: (B, T) int64 -> () and (B, T, 128) float32"""

    max_position_embeddings = CONTEXT

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        layer = {"dim_feedforward": 4 * width, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Characters:
    """A tokenizer of one token for each character, which is ASCII."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode("ascii")


def windows(text: str) -> list[dict[str, torch.Tensor]]:
    tokens = torch.tensor(Characters().encode(text))
    rows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def callbacks(folder: Path) -> list[object]:
    """All there are; the trainer adds DefaultMetrics, InfoCallback and ProgressCallback by itself."""
    board = training.ResumableSummaryWriter(folder / "tensorboard")
    return [
        board, training.TBLogger(board), training.JsonLogger(), training.PeakMemory(board),
        training.GradNormLogger(), training.ParameterNormLogger(), training.WeightNormLogger(),
        training.TextgenCallback(board, prompts=["A node is "], max_new_tokens=40),
        training.ProfilerCallback(output_dir=folder / "profile", num_steps=2, with_stack=False),
        training.DivergenceDetector(), training.TrainerControlCallback(),
    ]  # fmt: skip


@sky.compute
@sky.integrations.torch(backend="gloo", seed=0, processes_per_node=2)  # the same first weights in both ranks
@sky.stdout(only="head")
def pretrain(text: str, folder: Path, resume: Path | None = None) -> tuple[float, list[float]]:
    rows = windows(text)
    arguments = training.TrainingArguments(
        output_dir=folder, resume_from_checkpoint=resume,  # "auto" is the newest in output_dir, if there is one
        max_steps=60, learning_rate=3e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=10,
        per_device_train_batch_size=16,  # of each rank: 32 in all
        logging_steps=10, eval_strategy="steps", eval_steps=30, save_steps=30, disable_tqdm=True,
    )  # fmt: skip
    data = {"train_dataset": rows[128:], "eval_dataset": rows[:128], "processing_class": Characters()}
    trainer = training.Trainer(GPT(), arguments, callbacks=callbacks(folder), **data)
    trainer.train()
    logged = trainer.state.log_history
    return logged[-2]["eval_loss"], [entry["loss"] for entry in logged if "loss" in entry]


def main() -> None:
    text = TEXT.read_text()
    with tempfile.TemporaryDirectory() as name, sky.ComputePool(provider=sky.Local()) as pool:
        folder = Path(name) / "run"
        whole = pretrain(text, folder) >> pool
        print("written:", *sorted(path.name for path in folder.iterdir()))
        print(f"loss on text that it has not seen: {whole[0]:.2f}")
        half = pretrain(text, folder, resume=folder / "checkpoint-30") >> pool
        print("from the middle on, the same losses:", half == whole)
        records = json.loads((folder / "logs" / "trainer_logs.json").read_text())
        print("logged at steps:", *(each["global_step"] for each in records if "loss" in each))


if __name__ == "__main__":
    main()
