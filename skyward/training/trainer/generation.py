"""Text from a language model whose stages lie on several ranks: each token goes through all of them.

Torch's schedules know the shapes of what passes between stages when they are made, and a text grows with each token.
So stages hand tensors on by themselves here, and say first what comes. Whoever fails says that instead, so no rank
waits for it.
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

__all__ = ["Relay"]

T = TypeVar("T")

WHERE = "pipeline_generate"


class Relay:
    """This rank's stage in the making of a text. The first copy of the model makes it; other copies hear its tokens.

    All ranks make it and call `generate` together.

    Args:
        stage: this rank's, in evaluation mode.
        context_length: how many tokens the model takes at most; None: any number.
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
        """The prompt and the tokens that follow it, up to and without `end`, on every rank.

        Raises: RankFailed on all ranks, where a stage raises; there with its error as the cause.
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
        given: list[torch.Tensor] = []
        for at in range(self._copies.num_stages - 1):
            given = self._hand_on(at, window, given)
        last = self._copies.num_stages - 1
        return self._together(last, lambda: choose(logits_of(self._call(window, given))[0, -1].float().cpu()))

    def _hand_on(self, at: int, window: list[int], given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Stage `at` works, and the next one gets what it gives; other ranks get nothing."""
        outputs: list[torch.Tensor] = []

        def work() -> list[tuple[torch.Size, torch.dtype]]:
            outputs.extend(tensor.contiguous() for tensor in tensors_in(self._call(window, given)))
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
        """What stage `at` of the first copy gives, on every rank."""
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

    def _call(self, window: list[int], given: list[torch.Tensor]) -> Any:
        """This stage, as the schedules of training call it."""
        ids = torch.tensor([window], device=self._device)
        columns = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in self._takes else {}
        with self._autocast():
            if self._copies.stage > 0:
                return self._stage(*given, **columns)
            return self._stage(input_ids=ids, **columns) if "input_ids" in self._takes else self._stage(ids, **columns)
