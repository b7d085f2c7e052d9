"""Functions on a slot: loaded once for each process, by name where the name leads to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...calls.compute import ComputeFunction
from ...errors import PayloadNotLoadable
from ...wire.blobs import Blob
from ...wire.payloads import decode, parse, paused_collector

__all__ = ["Functions", "explain_load_error"]


class Functions:
    """By digest: the payload as it came, and the function once it was needed. Not thread-safe to fill, safe to ask."""

    def __init__(self) -> None:
        self._payloads: dict[bytes, tuple[bytes, tuple[Blob, ...]]] = {}
        self._loaded: dict[bytes, Callable[..., Any]] = {}
        self._holders: dict[bytes, set[str]] = {}

    def add(self, digest: bytes, payload: bytes, blobs: tuple[Blob, ...], holder: str = "agent") -> None:
        """`holder` is who sent it: it stays until each of them has dropped it."""
        self._holders.setdefault(digest, set()).add(holder)
        if digest not in self._loaded:
            self._payloads[digest] = payload, blobs

    def get(self, digest: bytes) -> Callable[..., Any]:
        """Raises PayloadNotLoadable."""
        function = self._loaded.get(digest)
        if function is None:
            try:
                payload, blobs = self._payloads[digest]
                with paused_collector():
                    loaded = decode(parse(payload), blobs)
            except Exception as error:
                raise explain_load_error(error, "the function") from error
            function = self._loaded[digest] = _unwrapped(loaded)
            self._payloads.pop(digest, None)
        return function

    def drop(self, digest: bytes, holder: str = "agent") -> None:
        holders = self._holders.get(digest, set())
        holders.discard(holder)
        if holders:
            return
        self._holders.pop(digest, None)
        self._payloads.pop(digest, None)
        self._loaded.pop(digest, None)


def _unwrapped(function: Any) -> Callable[..., Any]:
    unwrapped: Callable[..., Any] = function.fn if isinstance(function, ComputeFunction) else function
    return unwrapped


def explain_load_error(error: Exception, what: str) -> PayloadNotLoadable:
    """An unpickling error as a sentence that says what is missing on the node and what to do."""
    if isinstance(error, ModuleNotFoundError):
        hint = (
            f"the module {error.name!r} is not installed on the node; add it to Image(pip=[...]), "
            "or to Image(includes=[...]) if it is your own"
        )
    elif isinstance(error, AttributeError):
        hint = "the node has another version of that module than this machine"
    else:
        hint = "its unpickling raised on the node"
    return PayloadNotLoadable(f"{what} cannot be loaded on the node: {type(error).__name__}: {error}; {hint}")
