"""`AgreedFragments`: the parts of the model that all workers send in turn, with a guard for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .examination import Shaped
from .guard import NormGuard
from .refusal import RefusalKind, WorkerRefused
from .rounds import UpdateKey
from .schedule import split_parameters
from .tensors import in_rounds


class AgreedFragments:
    """Fragments that the first worker has brought. They may change while no worker is present.

    Args:
        is_async: Whether workers take turns for themselves, by the numbers of their updates. In synchronous round r it
            is the turn of fragment r % N.
    """

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self._names: tuple[tuple[str, ...], ...] = ()
        """Names in each fragment; empty before the first worker."""
        self.guards = [NormGuard()]
        """One for each fragment, because their norms differ."""

    def __len__(self) -> int:
        return len(self.guards)

    def agree(self, worker: str, layout: Mapping[str, Shaped], number: int, *, is_alone: bool) -> None:
        """Take over the fragments of a worker that is alone, and compare those of later ones.

        Raises:
            WorkerRefused: The workers that are present have other fragments.
        """
        fragments = split_parameters({name: math.prod(layout[name].shape) for name in in_rounds(layout)}, number)
        if list(map(set, fragments)) == list(map(set, self._names)):
            return
        if self._names and not is_alone:
            raise WorkerRefused(
                RefusalKind.BAD_DELTA,
                f"num_fragments={number} of worker {worker!r}: the workers that are present have "
                f"{len(self._names)} fragments; set num_fragments={len(self._names)}",
            )
        if len(fragments) != len(self.guards):
            self.guards = [NormGuard() for _ in fragments]
        self._names = fragments

    def of(self, key: UpdateKey) -> int:
        """Return the number of the fragment that an update changes."""
        return (key.number if self._is_async else key.base_round) % len(self)

    def part_of(self, tensors: Mapping[str, torch.Tensor], key: UpdateKey) -> dict[str, torch.Tensor]:
        """Return the tensors that an update changes."""
        names = in_rounds(tensors) if len(self._names) <= 1 else self._names[self.of(key)]
        return {name: tensors[name] for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the names, and the norms of the guards, as values for JSON."""
        return {
            "fragments": [list(names) for names in self._names],
            "guards": [guard.state_dict() for guard in self.guards],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state that `state_dict` returned. Other entries are left alone."""
        self._names = tuple(map(tuple, state["fragments"]))
        self.guards = [NormGuard() for _ in state["guards"]]
        for guard, norms in zip(self.guards, state["guards"], strict=True):
            guard.load_state_dict(norms)
