"""Pipeline stage of one rank: torch's schedules pass the micro-batches of each batch through it.

Every rank has the whole batch. All ranks therefore know its shape, the rows of each micro-batch that count, and when a
new schedule is needed. All micro-batches of a schedule must have the same shape. A short one is padded with the batch's
first row, which the loss ignores.
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

SCHEDULES = ("gpipe", "1f1b")

Loss = Callable[[Any, Any], torch.Tensor]
"""`(outputs, labels) -> loss`: the mean loss of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Batch in the form that a pipeline takes."""

    names: tuple[str, ...] | None
    """Names of `tensors`. None: they are passed by position."""
    tensors: tuple[torch.Tensor, ...]
    """Inputs, padded to width * len(rows) rows."""
    width: int
    """Rows of each micro-batch, with padding."""
    rows: tuple[int, ...]
    """Rows of each micro-batch, without padding."""
    labels: tuple[Any, ...]
    """Labels of each micro-batch, without padding."""

    @property
    def total(self) -> int:
        """Rows of the batch, without padding."""
        return sum(self.rows)

    def column(self, name: str) -> torch.Tensor | None:
        return self.tensors[self.names.index(name)] if self.names is not None and name in self.names else None


def pieces_of(inputs: Any, *, count: int, batch_size: int, label_names: Sequence[str] | None) -> Pieces:
    """Split a batch into `count` micro-batches.

    Args:
        inputs: the batch.
        count: number of micro-batches.
        batch_size: rows of a full batch. A smaller one is padded to it, so that the schedule can be reused.
        label_names: keys of the labels; None: "labels".

    Raises:
        UsageError: an input is not a tensor with one row per sample.
    """
    labels, rest = apart(inputs, label_names)
    rows = size_of(inputs)
    width = -(-max(rows, batch_size) // count)
    own_rows = tuple(min(max(rows - at * width, 0), width) for at in range(count))
    names = tuple(str(name) for name in rest) if isinstance(rest, Mapping) else None
    values = (
        list(rest.values()) if isinstance(rest, Mapping) else list(rest) if isinstance(rest, list | tuple) else [rest]
    )
    for at, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != rows:
            raise UsageError(
                f"PipelineTrainer: {names[at] if names else f'part {at}'!r} of the batch is not a tensor with one row "
                f"for each of its {rows} samples, so it cannot be split into micro-batches; drop it in the "
                "data_collator"
            )
    tensors = tuple(_filled(value, width * count) for value in values)
    begins = [at * width for at in range(count)]
    parts = tuple(_rows(labels, begin, begin + own) for begin, own in zip(begins, own_rows, strict=True))
    return Pieces(names=names, tensors=tensors, width=width, rows=own_rows, labels=parts)


def columns_of_later(stage: nn.Module) -> frozenset[str]:
    """Return the columns of the batch that a later stage takes: the keyword-only parameters of its forward."""
    parameters = inspect.signature(stage.forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


class PipelineStage:
    """Stage of this rank, in one copy of the model. All ranks of the copy call its methods with the same batches.

    Args:
        stage: the module.
        index: number of the stage, from 0.
        count: number of stages.
        group: process group of the copy's ranks; None: there is one stage.
        device: this rank's device.
        schedule: "1f1b" or "gpipe".
        microbatches: micro-batches of a batch.
        autocast: makes the context of mixed precision.
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
        """Run forward and backward of a batch.

        Args:
            pieces: the batch.
            factors: weights of the micro-batches' losses: (microbatches,).
            compute: returns the mean loss of outputs and labels.

        Returns:
            The weighted sum of the losses on the last stage, 0 on others: ().
        """

        def loss_of(at: int, outputs: Any) -> torch.Tensor:
            own = pieces.rows[at]
            if own == 0:  # padding only: a loss of 0 that depends on the outputs, or backward would fail
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
        """Return the last stage's outputs for all rows without padding; None on other stages. Without gradients."""
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
        """Return the indices of the tensors that the first stage takes, without columns of later stages."""
        names = pieces.names
        if names is None or self._takes is None:
            return list(range(len(pieces.tensors)))
        return [at for at, name in enumerate(names) if name in self._takes]

    def _keywords(self, pieces: Pieces) -> dict[str, torch.Tensor]:
        columns = {name: pieces.column(name) for name in sorted(self._columns)}
        return {name: tensor for name, tensor in columns.items() if tensor is not None}

    def _called(self, pieces: Pieces, begin: int, end: int) -> Any:
        """Call the only stage with some rows of a batch."""
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
        """Return the schedule of the last batch if this batch has its shape, else make a new one."""
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
        # scale_grads would divide by the number of micro-batches; the factors of the losses do that already.
        schedule = kind(stage, self._microbatches, loss_fn=loss, scale_grads=False)
        self._made[is_training] = (key, schedule)
        return schedule

    def _loss(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a micro-batch, whose number is `target`."""
        # A schedule splits its target like a tensor. Labels may be of any kind, so their number is passed instead.
        assert self._compute is not None
        return self._compute(int(target.reshape(-1)[0]), outputs)


class _Entered(nn.Module):
    """Adapter of a stage for schedules, which call it by position; it adds names and mixed precision.

    A schedule's first call only finds the shapes of the outputs, with uninitialized memory as input. Buffers that it
    changes (running means) are restored, or a run and its resumption would differ.
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
                buffer.data.copy_(value)  # by .data, because autograd may have kept the buffer and checks its version
            return outputs


def _filled(value: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - value.shape[0]
    return value if missing == 0 else torch.cat([value, value[:1].expand(missing, *value.shape[1:])])


def _rows(value: Any, begin: int, end: int) -> Any:
    return map_leaves(value, lambda leaf: leaf[begin:end] if torch.is_tensor(leaf) else leaf)


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that a stage passes on."""
    several = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [output for output in several if torch.is_tensor(output)]
