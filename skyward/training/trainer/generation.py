"""Text generation by a language model whose stages are on several ranks; each token passes through all of them.

Torch's pipeline schedules fix the shapes of tensors between stages when they are built, but a text grows with each
token. Stages therefore send their tensors directly, and announce shapes and types before. A stage that fails announces
its failure instead, so no rank waits for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import RankFailed, RankFailure, Ranks
from ..callbacks.sampling import Sampling, logits_of
from .copies import Copies
from .stages import tensors_in

T = TypeVar("T")

WHERE = "pipeline_generate"


class Relay:
    """Generator of text with this rank's stage. The first copy of the model computes; other copies receive the tokens.

    All ranks construct it and call `generate` together.

    Args:
        stage: this rank's stage, in eval mode.
        ranks: ranks of the run.
        copies: layout of the stages.
        device: this rank's device.
        autocast: makes the context of mixed precision.
        context_length: tokens that the model takes at most; None: any number.
    """

    def __init__(
        self,
        stage: nn.Module,
        *,
        ranks: Ranks,
        copies: Copies,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        context_length: int | None,
    ) -> None:
        self._stage, self._ranks, self._copies = stage, ranks, copies
        self._device, self._autocast, self._context_length = device, autocast, context_length
        self._takes = frozenset(inspect.signature(stage.forward).parameters)

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, end: int | None, sampling: Sampling, seed: int
    ) -> list[int]:
        """Return the prompt and the tokens that follow it, up to and without `end`, on every rank.

        Raises:
            RankFailed: a stage raised. On the rank of that stage, its exception is the cause.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            token = self._next(tokens, lambda logits: sampling.choose(logits, tokens, generator))
            if token == end:
                break
            tokens.append(token)
        return tokens

    def _next(self, tokens: list[int], choose: Callable[[torch.Tensor], int]) -> int:
        window = tokens if self._context_length is None else tokens[-self._context_length :]
        received: list[torch.Tensor] = []
        for at in range(self._copies.num_stages - 1):
            received = self._hand_on(at, window, received)
        last = self._copies.num_stages - 1
        return self._together(last, lambda: choose(logits_of(self._call(window, received))[0, -1].float().cpu()))

    def _hand_on(self, at: int, window: list[int], received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run stage `at` and send its outputs to the next stage, which returns them; other ranks return nothing."""
        outputs: list[torch.Tensor] = []

        def work() -> list[tuple[torch.Size, torch.dtype]]:
            outputs.extend(tensor.contiguous() for tensor in tensors_in(self._call(window, received)))
            return [(output.shape, output.dtype) for output in outputs]

        kinds = self._together(at, work)
        copies = self._copies
        if copies.rank == 0 and copies.stage == at:
            for output in outputs:
                torch.distributed.send(output, dst=at + 1, group=copies.pipeline)
        elif copies.rank == 0 and copies.stage == at + 1:
            received = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
            for tensor in received:
                torch.distributed.recv(tensor, src=at, group=copies.pipeline)
            return received
        return []

    def _together(self, at: int, act: Callable[[], T]) -> T:
        """Run `act` on stage `at` of the first copy, and return its answer on every rank."""
        ranks, copies = self._ranks, self._copies
        answer: T | None = None
        if copies.rank == 0 and copies.stage == at:
            try:
                answer = act()
            except Exception as error:
                failure = RankFailure.of(ranks.rank, error, WHERE)
                ranks.fail(failure)
                raise RankFailed(rank=failure.rank, error=failure.error, where=failure.where) from error
        return ranks.share(answer, source=at)  # type: ignore[return-value]  # stage `at` of the first copy is rank `at`

    def _call(self, window: list[int], received: list[torch.Tensor]) -> Any:
        """Call the stage as the schedules of training do."""
        ids = torch.tensor([window], device=self._device)
        columns = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in self._takes else {}
        with self._autocast():
            if self._copies.stage > 0:
                return self._stage(*received, **columns)
            return self._stage(input_ids=ids, **columns) if "input_ids" in self._takes else self._stage(ids, **columns)
