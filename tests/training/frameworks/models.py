"""Tiny models and their data, for tests of evaluation beside training."""

from __future__ import annotations

import threading
from typing import Any

import torch

ROWS = 12
DATA = [{"x": torch.tensor([i / 10]), "labels": torch.tensor([i / 5])} for i in range(ROWS)]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.a * x - labels) ** 2).mean(), "logits": self.a * x}


def slope(model: Any, payload: Any) -> dict[str, float]:
    """Return the weight itself, which shows which weights were scored."""
    return {"a": model.a.item()}


def error_of(model: Any, rows: Any) -> dict[str, float]:
    return {"loss": sum(model(**row)["loss"].item() for row in rows) / len(rows)}


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.1)
    return GPT2LMHeadModel(config)


def tiny_lora() -> Any:
    """Make a GPT2 of fixed weights with adapters. Seeding the process does not matter for a thread of it."""
    import peft

    base = tiny_gpt2()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for each in base.parameters():
            each.normal_(std=0.2, generator=generator)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def token_rows(count: int = 8) -> list[dict[str, Any]]:
    tokens = torch.arange(count * 8).reshape(count, 8) * 5 % 32
    return [{"input_ids": row, "labels": row} for row in tokens]


def perplexity(model: Any, rows: Any) -> dict[str, float]:
    with torch.no_grad():
        losses = [model(**{name: value[None] for name, value in row.items()}).loss.item() for row in rows]
    return {"loss": sum(losses) / len(losses)}


class Gate:
    """An evaluation that waits until it is let through, or a test is over."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, model: Any, payload: Any) -> dict[str, float]:
        self.reached.set()
        if not self.opened.wait(60):
            raise TimeoutError("the test let nothing through")
        return slope(model, payload)
