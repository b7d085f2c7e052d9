"""The weights of a model as an evaluation gets them."""

from __future__ import annotations

from typing import Any

__all__ = ["halved"]


def halved(state: Any) -> Any:
    """The same with float32 tensors and arrays as float16. Everything else is the same object."""
    if isinstance(state, dict):
        return {key: halved(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(halved(value) for value in state)
    dtype = str(getattr(state, "dtype", ""))
    if dtype == "torch.float32":
        return state.half()
    return state.astype("float16") if dtype == "float32" and hasattr(state, "astype") else state
