"""Stands in for torch._dynamo in processes that compile nothing.

Optimizers, DistributedDataParallel and transformers import torch._dynamo, only to keep the compiler away from their
functions. That takes each process 1.1 s of processor time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo import config  # noqa: F401 (a small module, which imports no other)


def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True) -> Any:
    return _unchanged if function is None else function


def graph_break(msg: str = "") -> None:
    pass


def is_compiling() -> bool:
    return False


class OptimizedModule(torch.nn.Module):
    """Has no instances."""


def _unchanged(function: Any) -> Any:
    return function


allow_in_graph = assume_constant_result = _unchanged
eval_frame = SimpleNamespace(OptimizedModule=OptimizedModule)
trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"torch._dynamo.{name}: not with tests/lean, which has no compiler; take it off the path")
