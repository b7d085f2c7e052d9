"""Snapshots of a state: one copy from the device to host memory, into buffers that are reused.

A checkpoint, an asynchronous evaluation and a best model can share a snapshot. Each of them retains it. After the last
release, its buffers serve the next snapshot of the same shapes. The first copy of a size pays for fresh memory (page
faults, pinning); later ones run at the speed of memory or of the bus.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..nested import map_leaves
from ..parts import local_of
from .shared import Shared

_Kind = tuple[tuple[int, ...], torch.dtype, str]
"""Shape, dtype and device type that a buffer is for."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FORGOTTEN_AFTER = 16
"""Takes without a tensor of a kind after which its free buffers are dropped."""


class Snapshot(Shared):
    """Copy of a state of tensors, taken by `SnapshotPool.take`.

    It begins with one reference, the taker's. Any thread may read, retain and release it. After the last release its
    tensors belong to another snapshot.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2)
        >>> with SnapshotPool().take({"weight": weight}) as snapshot:
        ...     _ = weight.add_(1.0)
        ...     snapshot.state["weight"].tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        pool: SnapshotPool,
        state: Any,
        own: list[tuple[_Kind, torch.Tensor]],
        events: list[Any],
        lent: list[Snapshot],
    ) -> None:
        super().__init__()
        self._pool, self._state, self._own, self._events, self._lent = pool, state, own, events, lent

    @property
    def state(self) -> Any:
        """State as it was when taken; waits until the device has copied it. Do not change it."""
        for event in self._events:
            event.synchronize()
        return self._state

    def _let_go(self) -> None:
        for event in self._events:
            event.synchronize()  # the next snapshot's copy into these buffers must not overtake this one's
        self._pool._give_back(self, self._own)
        lent, self._lent = self._lent, []
        self._state, self._own = None, []
        for lender in lent:
            lender.release()


class SnapshotPool:
    """Take snapshots of tensors into host buffers that are reused.

    `take` is for one thread at a time. Snapshots may be read and released in any thread.

    Args:
        keep: free buffers to keep for each tensor of a state, at least 1.

    Example:
        >>> import torch
        >>> pool = SnapshotPool(keep=2)
        >>> snapshot = pool.take({"weight": torch.ones(3)}, moment=1)
        >>> snapshot.state["weight"].sum().item()
        3.0
        >>> snapshot.release()
    """

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        self._most: dict[_Kind, int] = {}
        """Largest number of tensors of a kind in one state."""
        self._used: dict[_Kind, int] = {}
        """Number of the latest take with the kind."""
        self._takes = 0
        self._streams: dict[torch.device, Any] = {}
        self._moment: Hashable = None
        self._copies: dict[Any, _Copy] = {}
        """Copies made at the current moment."""
        self._lock = threading.Lock()

    def take(self, state: Any, *, moment: Hashable = None) -> Snapshot:
        """Copy every tensor of a nested state once, even if it has several names, and deep-copy the rest.

        On CUDA this returns when the copies are queued. They include everything that the current stream did before, and
        its later work waits for them. On the CPU the copies are done.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values.
            moment: a key such as the step of a run; None copies everything. Tensors that a live snapshot of the same
                moment has, and that were not written since, are not copied again, so a checkpoint and an evaluation of
                one step share one copy. Writes through `.data`, and those of fused optimizers, are invisible to this
                check, so no training step may lie within a moment.

        Returns:
            A snapshot with one reference, the caller's.
        """
        sources: list[torch.Tensor] = []
        places: dict[Any, int] = {}

        def placed(leaf: Any) -> Any:
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
            shape = map_leaves(state, placed)
            lent, buffers = self._lent(moment, list(places), sources)
            kinds = [(tuple(source.shape), source.dtype, source.device.type) for source in sources]
            new = [at for at, buffer in enumerate(buffers) if buffer is None]
            own = self._buffers([kinds[at] for at in new])
            for at, buffer in zip(new, own, strict=True):
                buffers[at] = buffer
            events = self._copy(own, [sources[at] for at in new])
            events += [event for lender in lent for event in lender._events]
            whole = cast("list[torch.Tensor]", buffers)
            taken = map_leaves(shape, lambda leaf: leaf.filled(whole) if isinstance(leaf, _Place) else leaf)
        snapshot = Snapshot(self, taken, [(kinds[at], whole[at]) for at in new], events, lent)
        if moment is not None:
            identities = list(places)
            self._remember(snapshot, {identities[at]: (sources[at], whole[at]) for at in new})
        return snapshot

    def clear(self) -> None:
        """Free the buffers that no snapshot uses."""
        with self._lock:
            self._free.clear()

    # Internals -------------------------------------------------------------------------------------------------------

    def _lent(
        self, moment: Hashable, identities: list[Any], sources: list[torch.Tensor]
    ) -> tuple[list[Snapshot], list[torch.Tensor | None]]:
        """Return the copies that live snapshots of this moment have, and these snapshots, retained."""
        with self._lock:
            if moment is None or moment != self._moment:
                self._moment, self._copies = moment, {}
            copies = dict(self._copies)
        lenders: dict[int, Snapshot] = {}
        buffers: list[torch.Tensor | None] = []
        for identity, source in zip(identities, sources, strict=True):
            known = copies.get(identity)
            if known is None or known.version != _version(source) or not _is_held(known.snapshot, lenders):
                buffers.append(None)
            else:
                buffers.append(known.buffer)
        return list(lenders.values()), buffers

    def _remember(self, snapshot: Snapshot, copied: dict[Any, tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._lock:
            for identity, (source, buffer) in copied.items():
                version = _version(source)
                if version is not None:
                    self._copies[identity] = _Copy(source, version, buffer, snapshot)

    def _buffers(self, kinds: list[_Kind]) -> list[torch.Tensor]:
        reused: list[torch.Tensor | None] = []
        with self._lock:
            self._takes += 1
            for kind, count in Counter(kinds).items():
                self._most[kind] = max(count, self._most.get(kind, 0))
                self._used[kind] = self._takes
            for kind in kinds:
                free = self._free.get(kind)
                reused.append(free.pop() if free else None)
        return [
            torch.empty(kind[0], dtype=kind[1], device="cpu", pin_memory=kind[2] == "cuda")
            if buffer is None
            else buffer
            for kind, buffer in zip(kinds, reused, strict=True)
        ]

    def _give_back(self, snapshot: Snapshot, own: list[tuple[_Kind, torch.Tensor]]) -> None:
        with self._lock:
            self._copies = {name: known for name, known in self._copies.items() if known.snapshot is not snapshot}
            for kind, buffer in own:
                free = self._free.setdefault(kind, [])
                if len(free) < self._keep * self._most.get(kind, 1):
                    free.append(buffer)
            # The shapes of a run may change. Kinds that were not copied for a while are unlikely to come back.
            gone = [kind for kind in self._free if self._takes - self._used.get(kind, 0) > _FORGOTTEN_AFTER]
            for kind in gone:
                del self._free[kind], self._most[kind], self._used[kind]

    def _copy(self, buffers: list[torch.Tensor], sources: list[torch.Tensor]) -> list[Any]:
        if {source.device.type for source in sources} == {"cpu"}:
            torch._foreach_copy_(buffers, sources)
            return []
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
        there = [(to, source) for to, source in zip(buffers, sources, strict=True) if source.device == device]
        with torch.cuda.stream(stream):
            torch._foreach_copy_([to for to, _ in there], [source for _, source in there], non_blocking=True)
            for _, source in there:
                source.record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        # The next step must not overwrite a tensor during its copy. The device waits for the copy, the host does not.
        current.wait_event(done)
        return done


_common: weakref.ref[SnapshotPool] | None = None
_common_lock = threading.Lock()


def common_pool(*, keep: int = 2) -> SnapshotPool:
    """Return this process's common pool, in which checkpoints and evaluations of one step find each other's copies.

    The pool lives as long as something holds it.

    Args:
        keep: as in `SnapshotPool`; the largest value of all callers counts.

    Example:
        >>> pool = common_pool()
        >>> pool is common_pool()
        True
    """
    global _common
    with _common_lock:
        pool = None if _common is None else _common()
        if pool is None:
            pool = SnapshotPool(keep=keep)
            _common = weakref.ref(pool)
        pool._keep = max(pool._keep, keep)
        return pool


@dataclass(frozen=True)
class _Copy:
    source: torch.Tensor
    """Held so that no other tensor gets its address, by which copies are found."""
    version: int
    buffer: torch.Tensor
    snapshot: Snapshot


def _version(tensor: torch.Tensor) -> int | None:
    """Return a number that grows with every write that torch knows of; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def _is_held(snapshot: Snapshot, lenders: dict[int, Snapshot]) -> bool:
    """Retain a snapshot once for all of its tensors; return False if its last reader has released it."""
    if id(snapshot) not in lenders:
        try:
            lenders[id(snapshot)] = snapshot.retain()
        except RuntimeError:  # released since the copies were looked up
            return False
    return True


class _Place:
    """Position of a tensor in a state, with the index of the buffer for its copy."""

    def __init__(self, at: int, tensor: torch.Tensor) -> None:
        self._at = at
        # The placements of a DTensor, without its data.
        self._spec = getattr(tensor, "_spec", None) if callable(getattr(tensor, "to_local", None)) else None

    def filled(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        if self._spec is None:
            return buffers[self._at]
        from torch.distributed.tensor import DTensor

        return DTensor(buffers[self._at], self._spec, requires_grad=False)
