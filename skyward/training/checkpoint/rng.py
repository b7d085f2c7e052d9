"""State of every random number generator of this process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RNGState:
    """State of the generators of Python, NumPy (the global one), torch and CUDA, as plain values and tensors.

    Example:
        StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False)
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator that is in use in this process."""
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, list(internal), gauss],
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the generators, except those that the state lacks."""
        version, internal, gauss = state_dict["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state_dict["torch"].cpu())
        if "numpy" in state_dict:
            import numpy as np

            name, keys, position, has_gauss, cached = state_dict["numpy"]
            np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        if "cuda" in state_dict and torch.cuda.device_count() == len(state_dict["cuda"]):
            torch.cuda.set_rng_state_all([state.cpu() for state in state_dict["cuda"]])


def seed_everything(seed: int) -> None:
    """Seed all of these generators.

    Args:
        seed: in [0, 2**32).

    Example:
        seed_everything(42)
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's too
