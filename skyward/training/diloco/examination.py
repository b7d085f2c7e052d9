"""Examination of a delta that has arrived: whether it fits the model, is finite, and has a weight."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch

from ...errors import UsageError
from .compression import Compressed
from .facts import figures_in
from .frames import BUFFER_PREFIX, ArrayFrame, decode
from .guard import check_shapes
from .refusal import RefusalKind, WorkerRefused
from .tensors import FlatTensors, squares_of


class Shaped(NamedTuple):
    """Shape of a tensor that stays where it is."""

    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Findings about a delta."""

    refusal: WorkerRefused | None
    """Reason why it must not count."""
    norm: float
    """Norm of its parameters; NaN if a buffer is not finite, or nobody looked."""
    rows: int
    """Rows that its worker reads in the round."""
    weight: int
    """Its weight in the mean."""
    figures: Mapping[str, Any]
    """Figures that its worker has sent with it."""
    fragment_round: int | None
    """Round in which its worker received the fragment, if it says so."""
    staleness: int = 0
    """Rounds that were closed while it was computed."""


def examine(
    worker: str,
    frame: ArrayFrame,
    *,
    expected: Mapping[str, Shaped | torch.Tensor],
    weighting: str,
    check_norm: Callable[[float], None],
) -> Findings:
    """Return the findings about a delta. It reads it all, chunk by chunk.

    Args:
        worker: Id of its worker.
        frame: The delta.
        expected: Tensors that it has to have.
        weighting: Number that is its weight: `equal`, `samples` or `tokens`.
        check_norm: Called with its norm; raises WorkerRefused if that is not legal.

    Raises:
        UsageError: The frame is broken, so the worker sends it again.
    """
    delta, norm, refusal = FlatTensors(frame), math.nan, None
    rows = _count_in(frame, "rows") or 0
    weight = {"samples": rows, "tokens": _count_in(frame, "tokens") or 0}.get(weighting, 1)
    try:
        check_shapes(worker, {name: Shaped(shape) for name, shape in delta.shapes.items()}, expected)
        _check_weight(worker, weighting, weight)
        norm = _norm(delta, are_buffers=False)
        # Buffers are checked for finite values only: running variances grow with the data.
        check_norm(norm if math.isfinite(_norm(delta, are_buffers=True)) else math.nan)
    except WorkerRefused as error:
        refusal = error
    return Findings(
        refusal=refusal,
        norm=norm,
        rows=rows,
        weight=weight,
        figures=figures_in(frame.metadata),
        fragment_round=_count_in(frame, "fragment_round"),
    )


def mapped(file: IO[bytes]) -> ArrayFrame:
    """Return the frame in a file. Its pages are read as they are needed, and live as long as an array.

    Raises:
        UsageError: There is no whole frame in it.
    """
    file.flush()
    try:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise UsageError("frame: is empty; send it again, whole") from None
    return decode(memoryview(memory))


def _norm(delta: FlatTensors, *, are_buffers: bool) -> float:
    """Return the norm of all values. It is not finite if any value is not."""
    squares = 0.0
    for name in delta.shapes:
        if name.startswith(BUFFER_PREFIX) == are_buffers:
            for chunk in delta.chunks(name):
                squares += squares_of(chunk.decoded() if isinstance(chunk, Compressed) else chunk)
    return math.sqrt(squares)


def _check_weight(worker: str, weighting: str, weight: int) -> None:
    """Raise WorkerRefused if a delta has no weight."""
    if weight == 0:
        how = "use a DiLoCoSampler" if weighting == "samples" else "call count_tokens() in each step"
        raise WorkerRefused(
            RefusalKind.BAD_DELTA,
            f"weighting={weighting!r}: worker {worker!r} has counted no {weighting} since its base round; {how}, or "
            "set weighting='equal' on the server",
        )


def _count_in(frame: ArrayFrame, name: str) -> int | None:
    """Return a number that a worker sends with its delta; None without one."""
    text = frame.metadata.get(name, "")
    return int(text) if text.isdecimal() else None
