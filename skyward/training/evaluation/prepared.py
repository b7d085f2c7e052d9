"""Model factory whose first model is made in advance, on the training thread.

Making a model draws random numbers. A thread beside training would take them from training's generators at an unknown
moment, so a run with evaluations would differ from the same run without them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Prepared:
    """Call `factory`, except for a first model that `prepare` has made. A pickle leaves that model out."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self._made: list[Any] = []

    def __call__(self) -> Any:
        try:
            return self._made.pop()
        except IndexError:  # not prepared, or already taken
            return self.factory()

    def __getstate__(self) -> dict[str, Any]:
        return {"factory": self.factory, "_made": []}

    def prepare(self) -> None:
        """Make a model now, and restore the random generators."""
        with same_random_numbers():
            self._made = [self.factory()]


def prepare_for(compute: Any, factory: Callable[[], Any]) -> Prepared:
    """Wrap a factory, and make its first model now if `compute` runs evaluations in this process."""
    prepared = Prepared(factory)
    if compute is None or getattr(compute, "shares_memory", False) is True:
        prepared.prepare()
    return prepared


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random generators of Python, numpy and torch's CPU after a block."""
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
