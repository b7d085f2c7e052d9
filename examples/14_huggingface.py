"""Train a tiny Llama, made from a config, with Hugging Face's Trainer on two nodes.

python examples/14_huggingface.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import skyward as sky

WINDOW = 64  # characters


def rows_of(text: str) -> list[dict[str, Any]]:
    """Windows of characters, one token each: a tokenizer would have to be downloaded."""
    import torch

    tokens = torch.tensor([min(ord(letter), 127) for letter in text])
    windows = tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW)
    return [{"input_ids": window, "labels": window} for window in windows]


@sky.compute
@sky.integrations.transformers(backend="gloo", seed=0)  # the same first weights in every rank
@sky.stdout(only="head")
def fine_tune(folder: Path, steps: int) -> dict[str, Any]:
    from pydoc_data.topics import topics  # the language reference, as `help("with")` shows it

    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    text = "\n".join(topics[name] for name in sorted(topics))
    train, test = rows_of(text[6_000:]), rows_of(text[:6_000])
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
    )
    # To go on from what others have trained: AutoModelForCausalLM.from_pretrained("...").
    model = LlamaForCausalLM(config)

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,  # of each rank: 32 in all
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=steps // 4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,  # there is no GPU here
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=test)
    trainer.remove_callback(PrinterCallback)
    losses = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    trainer.save_model(str(folder))  # rank 0 writes, the others do not
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"losses": losses, "ranks": arguments.world_size, "windows": len(test)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # `@` is every node: one world of two ranks, and each has the loss of the whole evaluation set.
        first, second = fine_tune(Path(folder), steps=120) @ pool
        assert first == second
        print(f"{first['ranks']} ranks, evaluated on {first['windows']} windows of {WINDOW} characters")
        print("loss per character:", *(f"{loss:.2f}" for loss in first["losses"]))
        print("saved:", *sorted(path.name for path in Path(folder).iterdir()))


if __name__ == "__main__":
    main()
