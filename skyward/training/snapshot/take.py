"""One copy of a state from the device to host memory, into buffers that are used again.

A checkpoint, an asynchronous evaluation and a best model can share a snapshot: each retains it, and when the last
has released it its buffers serve the next one of the same shapes. The first copy of a size pays for fresh memory
(page faults, pinning); later ones run at the speed of memory or of the bus.
"""

from __future__ import annotations

import copy
import threading
from types import TracebackType
from typing import Any, Self

import torch

from ..checkpoint.leaves import local_of, map_leaves

__all__ = ["Snapshot", "SnapshotPool"]

_Spec = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Snapshot:
    """A state as it was when it was taken. Made by `SnapshotPool.take`, with one reference, the taker's.

    Any thread may read, retain and release it. After the last release its tensors belong to another snapshot.
    """

    def __init__(
        self, pool: SnapshotPool, state: Any, spec: _Spec, buffers: list[torch.Tensor], events: list[Any]
    ) -> None:
        self._pool, self._state, self._spec, self._buffers, self._events = pool, state, spec, buffers, events
        self._references = 1
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @property
    def state(self) -> Any:
        """Waits until the device has copied everything. Not to be changed."""
        for event in self._events:
            event.synchronize()
        return self._state

    def retain(self) -> Snapshot:
        """One more reader. Raises: RuntimeError when the last one has released it."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("the snapshot was released; retain it before its last reader lets it go")
            self._references += 1
        return self

    def release(self) -> None:
        """One reader less."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("the snapshot was released more often than retained")
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            for event in self._events:
                event.synchronize()  # or the next one's copy could meet this one's
            self._pool._give_back(self._spec, self._buffers)
            self._state, self._buffers = None, []


class SnapshotPool:
    """Takes snapshots. keep: how many sets of free buffers of the same shapes stay for the next ones, at least 1."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._free: dict[_Spec, list[list[torch.Tensor]]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def take(self, state: Any) -> Snapshot:
        """Copies every tensor of a nested state, once each where it has several names, and deep-copies the rest.

        On CUDA it returns when the copies are queued: what the current stream did before is in them, and what it does
        afterwards waits for them. On the CPU they are done.
        """
        sources: list[torch.Tensor] = []
        places: dict[Any, int] = {}

        def found(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf if isinstance(leaf, _PLAIN) else copy.deepcopy(leaf)
            local = local_of(leaf.detach())
            if local.layout is not torch.strided or local.is_quantized:
                return leaf.detach().clone().cpu()
            local = local.resolve_conj().resolve_neg()
            identity = (local.data_ptr() if local.numel() else id(leaf), local.dtype, local.shape, local.stride())
            if identity not in places:
                places[identity] = len(sources)
                sources.append(local)
            return _Place(places[identity], leaf)

        with torch.no_grad():
            shape = map_leaves(state, found)
            spec = tuple((tuple(each.shape), each.dtype, each.device.type) for each in sources)
            buffers = self._buffers(spec)
            events = self._copy(buffers, sources)
            taken = map_leaves(shape, lambda leaf: leaf.filled(buffers) if isinstance(leaf, _Place) else leaf)
        return Snapshot(self, taken, spec, buffers, events)

    def clear(self) -> None:
        """Frees the buffers that no snapshot uses."""
        with self._lock:
            self._free.clear()

    # -----------------------------------------------------------------------------------------------------------------

    def _buffers(self, spec: _Spec) -> list[torch.Tensor]:
        with self._lock:
            free = self._free.get(spec)
            if free:
                return free.pop()
        return [torch.empty(shape, dtype=dtype, device="cpu", pin_memory=kind == "cuda") for shape, dtype, kind in spec]

    def _give_back(self, spec: _Spec, buffers: list[torch.Tensor]) -> None:
        with self._lock:
            if spec not in self._free:
                self._free = {spec: []}  # the run's shapes have changed: the others will not come back
            if len(self._free[spec]) < self._keep:
                self._free[spec].append(buffers)

    def _copy(self, buffers: list[torch.Tensor], sources: list[torch.Tensor]) -> list[Any]:
        on_host = [(to, source) for to, source in zip(buffers, sources, strict=True) if source.device.type == "cpu"]
        if on_host:
            torch._foreach_copy_([to for to, _ in on_host], [source for _, source in on_host])
        events = []
        for device in {source.device for source in sources if source.device.type == "cuda"}:
            events.append(self._copy_from(device, buffers, sources))
        for to, source in zip(buffers, sources, strict=True):
            if source.device.type not in ("cpu", "cuda"):
                to.copy_(source)
        return events

    def _copy_from(self, device: torch.device, buffers: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for to, source in zip(buffers, sources, strict=True):
                if source.device == device:
                    to.copy_(source, non_blocking=True)
                    source.record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        # The next step must not change what is still being copied. The host does not wait, the device does.
        current.wait_event(done)
        return done


class _Place:
    """Where a tensor was: which buffer holds its copy."""

    def __init__(self, at: int, tensor: torch.Tensor) -> None:
        self._at = at
        # Of a DTensor its placements, without its data.
        self._spec = getattr(tensor, "_spec", None) if callable(getattr(tensor, "to_local", None)) else None

    def filled(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        if self._spec is None:
            return buffers[self._at]
        from torch.distributed.tensor import DTensor

        return DTensor(buffers[self._at], self._spec, requires_grad=False)
