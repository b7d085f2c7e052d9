"""Train a tiny Llama with Hugging Face's Trainer; a pool scores its weights meanwhile. Every knob is shown.

python examples/26_huggingface_evaluation.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, as `help("with")` shows it
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import skyward as sky
from skyward.training.evaluation import BestModel, Timeline
from skyward.training.sakura import SakuraHFCallback

WINDOW = 64  # characters


def windows_of(text: str) -> torch.Tensor:
    """(n, WINDOW) int64. One token a character: a tokenizer would have to be downloaded."""
    tokens = torch.tensor([min(ord(letter), 127) for letter in text])
    return tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW)


def make_model() -> LlamaForCausalLM:
    """The architecture; the weights come with each evaluation. With PEFT: load the base model here, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=WINDOW, **sizes))


def score(model: Any, windows: torch.Tensor) -> dict[str, float]:
    """Runs on the worker. The model is in evaluation mode."""
    with torch.inference_mode():
        loss = model(input_ids=windows, labels=windows).loss
    return {"loss": loss.item(), "perplexity": loss.exp().item()}


def main() -> None:
    set_seed(0)
    text = "\n".join(topics[name] for name in sorted(topics))
    rows = [{"input_ids": window, "labels": window} for window in windows_of(text[5_000:])]
    held_out = windows_of(text[:5_000])
    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), nodes=1) as pool:
        best, timeline = BestModel(Path(folder, "best.safetensors"), "loss"), Timeline()
        beside = SakuraHFCallback(
            model_factory=make_model,
            eval_fn=score,
            eval_payload=held_out,  # sent to a worker once
            val_compute=pool,  # or pool.node(1), pool.role("evaluation"), "subprocess", None: threads of this process
            cadence="trainer",  # in place of the trainer's own; or "epoch" (the default), or a number of steps
            drain="lazy",  # "strict" would wait for the one before
            cache_key="auto",  # the worker keeps the model; None makes it anew each time
            fp16_state_dict=False,  # True: half the bytes, of rounded weights
            trainable_only="auto",  # of PEFT's models only what is trained travels
            async_copy=True,  # on CUDA the copy to the host is not waited for
            max_pending=2,
            on_backpressure="block",  # "skip" would leave one out where two are under way, and never wait
            on_error="record",  # "raise" would end training
            gate="auto",  # a long run finds out whether evaluations between steps would be faster
            timeout_s=60,
            max_age_steps=60,  # what comes later than this decides nothing
            best=best,
            timeline=timeline,
            verbose=True,
        )
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=80,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,  # the checkpoint of the step that scored best is loaded in the end
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,  # there is no GPU here
        )
        early = EarlyStoppingCallback(early_stopping_patience=3)
        trainer = Trainer(make_model(), arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[early, beside])
        trainer.remove_callback(PrinterCallback)
        trainer.train()

        state, record = trainer.state, best.record
        assert record is not None
        print(f"{len(beside.history)} evaluations, by {beside.history[-1]['worker']}")
        print(f"best: step {record.step}, loss {record.metrics['loss']:.2f}; step {state.best_global_step} is loaded")
        print(f"scored here again: loss {score(trainer.model.eval(), held_out)['loss']:.2f}")
        print(f"copies took {timeline.summary().snapshot_s:.2f} s of {timeline.summary().wall_s:.1f} s")


if __name__ == "__main__":
    main()
