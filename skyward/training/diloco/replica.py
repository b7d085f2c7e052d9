"""`Replica`: a worker's model in fragments, and the server's parameters that its progress is relative to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .algorithm import mix, pseudo_gradient
from .compression import Compressed, compress_with_feedback
from .frames import ArrayFrame
from .schedule import split_parameters
from .tensors import exchanged, frame_of, in_rounds, to_tensors


@dataclass(slots=True)
class SentFragment:
    """Fragment whose progress is exchanged."""

    fragment: int
    local: dict[str, torch.Tensor]
    """Its values when they were copied, on the CPU."""
    is_late: bool = False
    """Whether its answer was not there when it should have been. Then the steps since are added to the answer."""
    rows: int = 0
    """Rows of the data set that the worker reads in its round."""
    tokens: int = 0
    """Tokens that it has counted in its round."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures for people, such as the loss."""
    frame: list[memoryview] | None = None
    """Pieces of its frame, once it was needed."""
    upload: str = ""
    """Name of these bytes for the server, once they were sent."""
    uploaded: int = 0
    """Most of these bytes that the server had when it was asked."""
    residuals: dict[str, torch.Tensor] | None = None
    """Rounding errors of its compression, which go into the fragment's next frame."""


class Replica:
    """Parameters of one worker.

    `prepare` reads nothing that training changes. So it may run on another thread, while no other method is called.

    Args:
        model: The model.
        num_fragments: Number of its fragments.
        alpha: Weight of its own values when an answer is applied in time.
        is_bf16: Whether deltas are sent in bfloat16.
        bits: 8 or 4: with that many bits for a value instead, and error feedback; 0: not.

    Raises:
        UsageError: The model has no parameters, sharded ones, or fewer tensors than fragments.
    """

    def __init__(self, model: torch.nn.Module, *, num_fragments: int, alpha: float, is_bf16: bool, bits: int) -> None:
        self.tensors = exchanged(model)
        self._alpha, self._is_bf16, self._bits = alpha, is_bf16, bits
        sizes = {name: self.tensors[name].numel() for name in in_rounds(self.tensors)}
        self._fragments = split_parameters(sizes, num_fragments)
        self._received_in = [0] * num_fragments
        """Round in which each fragment was received."""
        self._base: dict[str, torch.Tensor] | None = None
        """What the server has sent, in float32; None after a resume, until it is needed."""
        self._residuals: dict[str, torch.Tensor] = {}
        """Rounding errors of the last frame of each fragment, with `bits`."""

    @property
    def num_fragments(self) -> int:
        """Number of fragments."""
        return len(self._fragments)

    @property
    def has_base(self) -> bool:
        """True if `prepare` may be called."""
        return self._base is not None

    # Away -------------------------------------------------------------------------------------------------------------

    def copy(self, fragment: int) -> SentFragment:
        """Return a fragment with its present values."""
        names = self._fragments[fragment]
        return SentFragment(fragment, {name: self.tensors[name].detach().to("cpu", copy=True) for name in names})

    def prepare(self, sent: SentFragment) -> list[memoryview]:
        """Return the frame of a fragment's progress: the same one, however often it is asked for."""
        if sent.frame is not None:
            return sent.frame
        assert self._base is not None
        delta: dict[str, torch.Tensor] = {}
        for name, tensor in sent.local.items():
            # A model in bfloat16 trains from the rounded parameters. The rounding is no progress.
            delta[name] = pseudo_gradient(self._base[name].to(tensor.dtype).float(), tensor.float())
        wire: Mapping[str, torch.Tensor | Compressed] = delta
        if self._bits:
            wire, sent.residuals = compress_with_feedback(delta, self._residuals, self._bits)
        counts = {"rows": sent.rows, "tokens": sent.tokens, "fragment_round": self._received_in[sent.fragment]}
        metadata = {name: str(count) for name, count in counts.items()} | {"figures": json.dumps(sent.figures)}
        sent.frame = frame_of(wire, metadata, is_bf16=self._is_bf16 or bool(self._bits))
        return sent.frame

    def ensure_residuals(self, sent: SentFragment) -> None:
        """Compute the rounding errors of a fragment that the server may know already."""
        if self._bits and self.has_base:
            self.prepare(sent)

    # And back ---------------------------------------------------------------------------------------------------------

    def set_base(self, frame: ArrayFrame) -> None:
        """Take all parameters of the server as the base, and leave the model as it is."""
        self._base = _moving(to_tensors(frame))

    @torch.no_grad()
    def load(self, frame: ArrayFrame) -> None:
        """Set the model to all parameters of the server."""
        values = to_tensors(frame)
        for name, value in values.items():
            self.tensors[name].copy_(value)
        self._base = _moving(values)
        self._received_in = [_round_of(frame)] * self.num_fragments

    @torch.no_grad()
    def receive(self, sent: SentFragment, frame: ArrayFrame) -> None:
        """Apply the answer to a fragment.

        Args:
            sent: The fragment.
            frame: New values of the fragment; what to add to its base; or values of all fragments, for a worker that
                comes late, or whose progress was refused.
        """
        if frame.metadata.get("is_counted") == "false":  # the model and the rounding errors may be broken
            self._residuals = {name: errors for name, errors in self._residuals.items() if name not in sent.local}
            self.load(frame)
            return
        received = to_tensors(frame)
        base = self._base or {}
        if frame.metadata["kind"] == "update":
            received = {name: base[name] + update for name, update in received.items()}
        for name, value in received.items():
            self._apply(name, value, sent)
        is_whole = received.keys() >= {name for names in self._fragments for name in names}
        self._base = {**base, **_moving(received)} if base or is_whole else None
        self._residuals.update(sent.residuals or {})
        for fragment in range(self.num_fragments) if is_whole else (sent.fragment,):
            self._received_in[fragment] = _round_of(frame)

    def receive_base(self, sent: SentFragment, frame: ArrayFrame) -> None:
        """Apply the answer to a fragment of a worker that has no base: `frame` has all parameters after it."""
        self.set_base(frame)
        with torch.no_grad():
            for name in sent.local:
                self._apply(name, (self._base or {})[name], sent)
        self._received_in = [_round_of(frame)] * self.num_fragments

    def _apply(self, name: str, value: torch.Tensor, sent: SentFragment) -> None:
        tensor = self.tensors[name]
        if name in sent.local and not sent.is_late:
            mix(tensor, value.to(tensor.device, tensor.dtype), self._alpha)
            return
        # The progress since a late fragment was sent, or of other fragments since their bases, is not lost.
        start = sent.local.get(name, (self._base or {}).get(name))
        tensor.copy_(value if start is None else value + (tensor.cpu() - start))

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds of the fragments. With `bits` there are tensors: the rounding errors, and the base.

        The rounding errors of a repeated frame depend on the base, and the server keeps no old one.
        """
        state: dict[str, Any] = {"received_in": list(self._received_in)}
        if self._bits:
            state |= {"residuals": dict(self._residuals), "base": dict(self._base or {})}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state that `state_dict` returned, with the model's parameters loaded."""
        self._received_in = list(state["received_in"])
        if self._bits:
            self._residuals = dict(state.get("residuals", {}))
            self._base = dict(state.get("base", {})) or None


def _moving(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in in_rounds(tensors)}


def _round_of(frame: ArrayFrame) -> int:
    return int(frame.metadata["round"])
