"""Measure what GradNormLogger costs: one wait for the device, beside one `.item()` for each parameter.

    python benchmarks/grad_norm.py                     # half a minute
    python benchmarks/grad_norm.py --device cuda --layers 24 --width 1024
    python benchmarks/grad_norm.py --json samples.json

The benchmark needs torch. The gradients are those of a transformer and are made once. Every round times each method, in
an order that changes, so other load of the machine affects all methods alike. The table shows the median over rounds
with the 10th and 90th percentile. `waits` counts the times that a method reads a value from the device. Each read waits
until the device has finished its queued work.

- foreach: GradNormLogger at an evaluation
- item: `{name: grad.norm().item()}`, as most loggers are written
- idle step: GradNormLogger in a step that no evaluation follows, as in most steps

The exit code is 1 if foreach waits more than once, takes longer than item, or an idle step takes over 20 µs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from skyward.training import Alone, GradNormLogger, TrainerControl, TrainerState
from skyward.training.callbacks.norms import measure

WAITING = {"item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"}
IDLE_LIMIT_S = 20e-6


class Waits(TorchFunctionMode):
    """Count of the values that a block reads from the device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in WAITING
        return func(*args, **(kwargs or {}))


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    model = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, batch_first=True, bias=True)
            for _ in range(options.layers)
        )
    ).to(options.device)
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    ways: dict[str, Callable[[], object]] = {
        "foreach": lambda: measure(gradients).values(),
        "item": lambda: {name: each.norm().item() for name, each in gradients.items()},
        "idle step": idle_step(model),
    }
    samples = timed(ways, options.rounds, options.device)
    waits = {name: waits_of(way) for name, way in ways.items()}
    count = sum(each.numel() for each in gradients.values())
    print(
        f"{len(gradients)} gradients of {count / 1e6:.1f} M values, {options.device}, {options.threads} thread(s), "
        f"torch {torch.__version__}, {processor(options.device)}, {date.today()}\n"
    )
    print(f"{'':12}{'median':>12}{'10 %':>12}{'90 %':>12}{'waits':>8}")
    for name, seconds in samples.items():
        low, *_, high = quantiles(seconds, n=10)
        print(f"{name:12}{in_us(median(seconds))}{in_us(low)}{in_us(high)}{waits[name]:8}")
    pairs = sorted(slow / fast for slow, fast in zip(samples["item"], samples["foreach"], strict=True))
    print(f"\nitem takes {median(pairs):.2f} times as long as foreach (median of {len(pairs)} pairs)")
    if options.json:
        Path(options.json).write_text(json.dumps({"seconds": samples, "waits": waits}))
    missed = [
        message
        for message, is_missed in {
            "foreach waits more than once": waits["foreach"] > 1,
            "foreach takes longer than item": median(pairs) < 1,
            "an idle step takes over 20 µs": median(samples["idle step"]) > IDLE_LIMIT_S,
        }.items()
        if is_missed
    ]
    for each in missed:
        print(f"MISSED: {each}")
    return 1 if missed else 0


def idle_step(model: nn.Module) -> Callable[[], object]:
    """Call the callback's handler in a step without an evaluation, without the bus."""
    callback = GradNormLogger()
    args = SimpleNamespace(logging_dir=os.devnull, eval_strategy="steps", eval_steps=100, max_steps=1000)
    state, control, ranks = TrainerState(max_steps=1000, eval_steps=100, global_step=3), TrainerControl(), Alone(rank=1)
    callback.on_train_begin(args=args, state=state, model=model, ranks=ranks)  # as rank 1, so that no file is opened
    return lambda: callback.on_pre_optimizer_step(
        args=args, state=state, control=control, model=model, train_dataloader=None, ranks=Alone()
    )


def timed(ways: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            begun = time.perf_counter()
            ways[name]()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - begun)
    return found


def waits_of(way: Callable[[], object]) -> int:
    with Waits() as waits:
        way()
    return waits.count


def in_us(seconds: float) -> str:
    return f"{seconds * 1e6:9.1f} µs"


def processor(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
