"""One rank's stage of a pipeline: batches go through it in micro-batches, by a schedule of torch's.

Every rank has the whole batch, so all of them know its shape, how many rows of each micro-batch count, and when the
schedule must be made anew. Micro-batches have one shape in a schedule: what is short is filled up with the batch's
first row, which the loss does not see.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..nested import map_leaves
from .batches import size_of
from .collate import columns_of
from .loss import apart

__all__ = ["SCHEDULES", "Pieces", "PipelineStage", "columns_of_later", "pieces_of", "tensors_in"]

SCHEDULES = ("gpipe", "1f1b")

Loss = Callable[[Any, Any], torch.Tensor]
"""From the outputs of a micro-batch and its labels to the mean loss."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A batch as a pipeline takes it. width: rows of a micro-batch; rows: that each one really has.

    names: of `tensors`, which have width * len(rows) rows, None where they go by position. labels: by micro-batch.
    """

    names: tuple[str, ...] | None
    tensors: tuple[torch.Tensor, ...]
    width: int
    rows: tuple[int, ...]
    labels: tuple[Any, ...]

    @property
    def total(self) -> int:
        return sum(self.rows)

    def column(self, name: str) -> torch.Tensor | None:
        return self.tensors[self.names.index(name)] if self.names is not None and name in self.names else None


def pieces_of(inputs: Any, *, count: int, batch_size: int, label_names: Sequence[str] | None) -> Pieces:
    """A batch in `count` micro-batches. batch_size: rows that a full one has; more are taken as they come.

    Raises: UsageError where an input is no tensor with a row for each sample.
    """
    labels, rest = apart(inputs, label_names)
    rows = size_of(inputs)
    width = -(-max(rows, batch_size) // count)
    each = tuple(min(max(rows - at * width, 0), width) for at in range(count))
    names = tuple(str(name) for name in rest) if isinstance(rest, Mapping) else None
    given = (
        list(rest.values()) if isinstance(rest, Mapping) else list(rest) if isinstance(rest, list | tuple) else [rest]
    )
    for at, value in enumerate(given):
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != rows:
            raise UsageError(
                f"PipelineTrainer: the batch's {names[at] if names else f'part {at}'!r} is no tensor with a row for "
                f"each of {rows} samples, so it cannot be split into micro-batches; leave it out in the data_collator"
            )
    tensors = tuple(_filled(value, width * count) for value in given)
    begins = [at * width for at in range(count)]
    parts = tuple(_rows(labels, begin, begin + own) for begin, own in zip(begins, each, strict=True))
    return Pieces(names=names, tensors=tensors, width=width, rows=each, labels=parts)


def columns_of_later(stage: nn.Module) -> frozenset[str]:
    """What a stage behind the first takes of the batch itself: the keyword-only parameters of its forward."""
    parameters = inspect.signature(stage.forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


class PipelineStage:
    """This rank's stage among those of one copy of the model.

    index, count: which stage of how many. group: torch's process group of the copy's ranks; None with one stage.
    microbatches: of a batch. All ranks of the copy call its methods with the same batches.
    """

    def __init__(
        self,
        stage: nn.Module,
        *,
        index: int,
        count: int,
        group: Any,
        device: torch.device,
        schedule: str,
        microbatches: int,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._stage, self._index, self._count, self._group, self._device = stage, index, count, group, device
        self._kind, self._microbatches, self._autocast = schedule, microbatches, autocast
        self._made: dict[bool, tuple[Any, Any]] = {}
        self._columns = columns_of_later(stage) if index else frozenset()
        self._takes = columns_of(stage, None)
        self._compute: Callable[[int, Any], torch.Tensor] | None = None

    @property
    def is_last(self) -> bool:
        return self._index == self._count - 1

    def train(self, pieces: Pieces, factors: torch.Tensor, compute: Loss) -> torch.Tensor:
        """Forward and backward of a batch. factors: how much each micro-batch's loss counts: (microbatches,)

        Gives the sum of the losses, each times its factor, on the last stage; 0 on others. ()
        """

        def loss_of(at: int, outputs: Any) -> torch.Tensor:
            own = pieces.rows[at]
            if own == 0:
                return sum((tensor * 0.0).sum() for tensor in tensors_in(outputs)) + torch.zeros(
                    (), device=self._device
                )
            with self._autocast():
                return compute(_rows(outputs, 0, own), pieces.labels[at]) * factors[at]

        losses: list[torch.Tensor] = []
        if self._count == 1:
            self._train_alone(pieces, loss_of, losses)
        else:
            self._compute = loss_of
            schedule = self._schedule(pieces, is_training=True)
            options: dict[str, Any] = {"return_outputs": False}
            if self.is_last:
                options |= {"target": torch.arange(self._microbatches, device=self._device), "losses": losses}
            schedule.step(*self._positional(pieces), **self._keywords(pieces), **options)
        total = torch.zeros((), device=self._device)
        return total + sum(loss.detach().float() for loss in losses)

    def predict(self, pieces: Pieces) -> Any:
        """What the last stage gives, for all real rows; None on others. Without gradients."""
        if self._count == 1:
            with self._autocast():
                return self._called(pieces, 0, pieces.total)
        schedule = self._schedule(pieces, is_training=False)
        outputs = schedule.step(*self._positional(pieces), **self._keywords(pieces))
        return _rows(outputs, 0, pieces.total) if self.is_last else None

    # -----------------------------------------------------------------------------------------------------------------

    def _positional(self, pieces: Pieces) -> tuple[torch.Tensor, ...]:
        return tuple(pieces.tensors[at] for at in self._entering(pieces)) if self._index == 0 else ()

    def _entering(self, pieces: Pieces) -> list[int]:
        """Which tensors the first stage is called with: not the columns that only a later one takes."""
        names = pieces.names
        if names is None or self._takes is None:
            return list(range(len(pieces.tensors)))
        return [at for at, name in enumerate(names) if name in self._takes]

    def _keywords(self, pieces: Pieces) -> dict[str, torch.Tensor]:
        found = {name: pieces.column(name) for name in sorted(self._columns)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _called(self, pieces: Pieces, begin: int, end: int) -> Any:
        """The only stage, with some rows of a batch."""
        at = self._entering(pieces)
        tensors = [pieces.tensors[index][begin:end] for index in at]
        if pieces.names is None:
            return self._stage(*tensors)
        return self._stage(**{pieces.names[index]: tensor for index, tensor in zip(at, tensors, strict=True)})

    def _train_alone(
        self, pieces: Pieces, loss_of: Callable[[int, Any], torch.Tensor], losses: list[torch.Tensor]
    ) -> None:
        for at in range(self._microbatches):
            begin = at * pieces.width
            with self._autocast():
                outputs = self._called(pieces, begin, begin + pieces.width)
            losses.append(loss_of(at, outputs))
            losses[-1].backward()

    def _schedule(self, pieces: Pieces, *, is_training: bool) -> Any:
        """That of the last batch, if this one has its shape."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        key = (pieces.names, tuple((tensor.shape[1:], tensor.dtype) for tensor in pieces.tensors), pieces.width)
        known, schedule = self._made.get(is_training, (None, None))
        if known == key:
            return schedule
        names = None
        if self._index == 0 and pieces.names is not None:
            names = tuple(pieces.names[at] for at in self._entering(pieces))
        stage = PipelineStage(
            _Entered(self._stage, names, self._autocast), self._index, self._count, self._device, group=self._group
        )
        kind = Schedule1F1B if is_training and self._kind == "1f1b" else ScheduleGPipe
        loss = self._loss if is_training else None
        # Losses are scaled by their factors, so gradients are not by the number of micro-batches.
        schedule = kind(stage, self._microbatches, loss_fn=loss, scale_grads=False)
        self._made[is_training] = (key, schedule)
        return schedule

    def _loss(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        """target: the number of the micro-batch, which says where its labels are, of whatever kind they are."""
        assert self._compute is not None
        return self._compute(int(target.reshape(-1)[0]), outputs)


class _Entered(nn.Module):
    """A stage as a schedule calls it: by position, in mixed precision.

    A schedule's first call only finds the shapes of what passes between stages, on memory that nobody has written:
    buffers that it changes (running means) are put back, or the run and one that resumes would differ.
    """

    def __init__(
        self,
        stage: nn.Module,
        names: tuple[str, ...] | None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.stage, self._names, self._autocast = stage, names, autocast
        self._looks_for_shapes = True

    def forward(self, *inputs: torch.Tensor, **columns: torch.Tensor) -> Any:
        named = {} if self._names is None else dict(zip(self._names, inputs, strict=True))
        with self._autocast():
            if not self._looks_for_shapes:
                return self.stage(**named, **columns) if named else self.stage(*inputs, **columns)
            self._looks_for_shapes = False
            before = [buffer.detach().clone() for buffer in self.stage.buffers()]
            outputs = self.stage(**named, **columns) if named else self.stage(*inputs, **columns)
            for buffer, value in zip(self.stage.buffers(), before, strict=True):
                buffer.data.copy_(value)  # not seen by autograd, which may have kept it
            return outputs


def _filled(value: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - value.shape[0]
    return value if missing == 0 else torch.cat([value, value[:1].expand(missing, *value.shape[1:])])


def _rows(value: Any, begin: int, end: int) -> Any:
    return map_leaves(value, lambda leaf: leaf[begin:end] if torch.is_tensor(leaf) else leaf)


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """What a stage passes on: it gives a tensor, or several."""
    several = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [output for output in several if torch.is_tensor(output)]
