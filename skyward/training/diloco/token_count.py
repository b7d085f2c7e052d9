"""Count of the tokens that a model trains on, whichever trainer calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class TokenCount:
    """Hooks of a model that count the tokens of each training batch, padding included.

    Tokens are the elements of the model's main input, `input_ids` unless it says otherwise, if that is a batch of
    texts: whole numbers in two dimensions. Evaluation is not counted. Lightning calls the model's `training_step`, so
    there the calls of its parts count.

    Args:
        model: Model that is trained.
        tell: Function that is called with each number of tokens, before the step of the optimizer.
    """

    _tell: Callable[[int], None] | None = None
    _last: weakref.ref[torch.Tensor] | None = None

    def __init__(self, model: nn.Module, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._main = str(getattr(model, "main_input_name", "input_ids"))
        modules = [model, *(model.children() if hasattr(model, "training_step") else ())]
        self._hooks = [module.register_forward_pre_hook(self._count, with_kwargs=True) for module in modules]

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy of the model, such as for an average of its weights, count nothing."""
        return {"_main": self._main}

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A hook that is compiled into the model would change its code with each batch.
        if torch.compiler.is_compiling() or self._tell is None or not (module.training and torch.is_grad_enabled()):
            return
        given = kwargs.get(self._main, args[0] if args else None)
        tokens = given.get(self._main) if isinstance(given, Mapping) else given
        if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
            return
        if self._last is None or self._last() is not tokens:  # one batch may pass a model and its part
            self._last = weakref.ref(tokens)
            self._tell(tokens.numel())
