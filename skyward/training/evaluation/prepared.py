"""A model factory that has made its first model already, on the training thread.

Making a model draws random numbers. In a thread beside training that would take numbers from training's generators at
an unknown moment, and the run would no longer be the one that it is without evaluations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Prepared", "prepare_for", "same_random_numbers"]


class Prepared:
    """Calls `factory`, but for a first model that `prepare` has made. Travels without that one."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self._made: list[Any] = []

    def __call__(self) -> Any:
        try:
            return self._made.pop()
        except IndexError:  # none is made, or it was taken
            return self.factory()

    def __getstate__(self) -> dict[str, Any]:
        return {"factory": self.factory, "_made": []}

    def prepare(self) -> None:
        """Makes a model now; random numbers go on as if it had not been made."""
        with same_random_numbers():
            self._made = [self.factory()]


def prepare_for(compute: Any, factory: Callable[[], Any]) -> Prepared:
    """Wrap a factory, and make its first model now if evaluations run in this process. compute: where they run."""
    prepared = Prepared(factory)
    if compute is None or getattr(compute, "shares_memory", False) is True:
        prepared.prepare()
    return prepared


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """What is drawn in the block is drawn again after it: from Python's generator, numpy's and torch's on the CPU."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
