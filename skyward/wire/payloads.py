"""Payloads: Python values as bytes, with large buffers beside them.

Pickle protocol 5 leaves large buffers out of the pickle. Each becomes a blob, named by its content. The receiver maps
the blobs and unpickles over the mappings, so an array arrives without a copy and can be written. A pickle that is
itself too large for a frame becomes the last blob. `tasks` describes the layout.

Values of plain built-in types, and small arrays of numpy, go through the C pickler. Everything else goes through
cloudpickle: functions and classes of `__main__` travel by value, those of importable modules by name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MappingProxyType, MemberDescriptorType
from typing import Any, NamedTuple, Protocol

import cloudpickle

from ..core.by_value import loads
from ..errors import UsageError
from ..values.pinned import Pinned
from ..values.ref import Elsewhere, Pickled, Ref, Spliced, carried, held_by, load
from .blobs import Blob, NamedBlob
from .frames import INLINE_LIMIT, MAX_BODY
from .pull import place_of, pull
from .tasks import HEAD, IN_MEMORY, PICKLE_IS_BLOB, REFERENCE, Parsed

PutBlob = Callable[[memoryview], Blob]
"""Function that stores a large buffer and returns the blob with a snapshot of it."""

_ATOMS = frozenset({int, float, bool, str, type(None), complex})
_NUMBERS = _ATOMS - {str}
_PLAIN_DEPTH = 3
_PLAIN_LENGTH = 1000
_MOST_BUFFERS = 1500
"""Most large buffers of a value that are blobs of their own. Each takes a file, and room in the frame."""
_MOST_BYTES = MAX_BODY - 16 * 1024
"""Most bytes of a payload. The rest of a frame says what to do with it."""
_MOST_BLOBS = _MOST_BYTES // REFERENCE.size
_STAY_LIMIT = 32 * 1024
"""Most bytes of the pickle itself if its buffers stay in the sender's memory."""


class Encoded(NamedTuple):
    """Value ready to travel: the `body` of a frame, and the `blobs` that must arrive before it."""

    body: bytes
    blobs: tuple[Blob, ...] = ()
    stays: tuple[memoryview, ...] = ()
    """Buffers outside both, which the receiver reads in this process's memory while the sender waits."""
    pinned: tuple[Pinned, ...] = ()
    """Objects that must live as long as somebody may use the value."""

    @property
    def has_references(self) -> bool:
        """Return whether the receiver needs blobs, even if they need not travel with it."""
        return self.body[1:3] != b"\0\0"

    def with_elapsed(self, elapsed_ns: int) -> bytes:
        return self.body[:3] + elapsed_ns.to_bytes(8, "little") + self.body[11:]


_NOTHING = HEAD.pack(0, 0, 0)
NO_ARGUMENTS = Encoded(_NOTHING + pickle.dumps(((), {}), protocol=5))
"""Arguments of all calls without any. It is shared, because each of thousands of open calls holds its payload."""


def encode(
    value: Any,
    put: PutBlob,
    *,
    may_stay: Callable[[int], bool] | None = None,
    reduce: Callable[[Any], Any] | None = None,
) -> Encoded:
    """Pickle `value`. Raises what its pickling raises (TypeError, PicklingError, AttributeError, ...).

    Args:
        value: Any picklable object.
        put: Function that stores a large buffer.
        may_stay: Called only if there are large buffers, with their bytes: may they stay in this process's memory for
            the receiver?
        reduce: Called first for each object. Returns how to pickle it, or None for the usual way.
    """
    if _are_plain_arguments(value) or _is_plain(value, _PLAIN_DEPTH, with_arrays=reduce is None):
        data = pickle.dumps(value, protocol=5)
        if len(data) <= INLINE_LIMIT:
            return Encoded(_NOTHING + data)
        return _with_blobs(data, [], put)
    sink = io.BytesIO()
    large: list[memoryview | Blob] = []
    pinned: list[Pinned] = []
    _Pickler(sink, large, reduce, pinned).dump(value)
    data = sink.getvalue()
    if not large and len(data) <= INLINE_LIMIT:
        return Encoded(_NOTHING + data, pinned=tuple(pinned))
    if large and len(data) <= _STAY_LIMIT and may_stay is not None:
        views = tuple(view for view in large if isinstance(view, memoryview))
        if len(views) == len(large) and may_stay(sum(view.nbytes for view in views)):
            names = b"".join(REFERENCE.pack(place_of(view), view.nbytes) for view in views)
            return Encoded(HEAD.pack(IN_MEMORY, len(views), 0) + names + data, stays=views, pinned=tuple(pinned))
    return _with_blobs(data, large, put, tuple(pinned))


def check_picklable(value: Any) -> None:
    """Pickle a value and drop the result; its large buffers are neither copied nor stored. Raises as `encode` does."""
    _Pickler(io.BytesIO(), [], None, []).dump(value)


def copy_stays(encoded: Encoded) -> Encoded:
    """Return the same value with copies of the buffers that stay in this process's memory, which nobody changes.

    Raises:
        PullRefused: This process may not read its own memory in this way.
        OSError: There is no memory for the copies.
    """
    copies = tuple(pull(place_of(view), view.nbytes) for view in encoded.stays)
    names = b"".join(REFERENCE.pack(place_of(copy), copy.nbytes) for copy in copies)
    start = HEAD.size + len(copies) * REFERENCE.size
    return Encoded(encoded.body[: HEAD.size] + names + encoded.body[start:], stays=copies)


def send_stays(encoded: Encoded, put: PutBlob) -> Encoded:
    """Return the same value with blobs instead of buffers that stay in this process's memory."""
    start = HEAD.size + len(encoded.stays) * REFERENCE.size
    return _with_blobs(encoded.body[start:], encoded.stays, put)


def pickle_whole(value: Any) -> bytes:
    """Pickle a value with all its buffers into one piece of bytes. Raises what its pickling raises."""
    if _is_plain(value, _PLAIN_DEPTH):
        return pickle.dumps(value, protocol=5)
    sink = io.BytesIO()
    ByValuePickler(sink, protocol=5).dump(value)
    return sink.getvalue()


def unpickle_whole(data: bytes) -> Any:
    """Unpickle what `pickle_whole` made. Raises anything that the unpickling raises."""
    return loads(data)


def _with_blobs(
    data: bytes, large: Iterable[memoryview | Blob], put: PutBlob, pinned: tuple[Pinned, ...] = ()
) -> Encoded:
    blobs = [view if isinstance(view, Blob) else put(view) for view in large]
    flags = 0
    if len(data) > INLINE_LIMIT or len(data) + len(blobs) * REFERENCE.size > _MOST_BYTES:
        blobs.append(put(memoryview(data)))
        data, flags = b"", PICKLE_IS_BLOB
    if len(blobs) > _MOST_BLOBS:
        raise UsageError(
            f"call: {len(blobs)} kept values in its arguments or its value; pass at most {_MOST_BLOBS - 1}, and "
            "combine them in several calls"
        )
    names = b"".join(REFERENCE.pack(blob.digest, blob.size) for blob in blobs)
    return Encoded(HEAD.pack(flags, len(blobs), 0) + names + data, tuple(blobs), pinned=pinned)


def _are_plain_arguments(value: Any) -> bool:
    """Recognize the most common payload quickly: (args, kwargs) with numbers only and no kwargs."""
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is tuple
        and type(value[1]) is dict
        and not value[1]
        and _NUMBERS.issuperset(map(type, value[0]))
    )


def _is_plain(value: Any, depth: int, *, with_arrays: bool = True) -> bool:
    """Return whether the C pickler alone produces the right bytes: built-in values, and few enough to check.

    Args:
        value: Any object.
        depth: Number of containers within each other that are checked.
        with_arrays: Whether small arrays of numpy count too.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind is not str or len(value) <= INLINE_LIMIT
    if kind is bytes or kind is range:
        return kind is range or len(value) <= INLINE_LIMIT
    if depth == 0:
        return False
    if kind is tuple or kind is list:
        if _ATOMS.issuperset(set(map(type, value))):  # building the set first is the fastest check of a long list
            return True
        if depth == 1 or len(value) > _PLAIN_LENGTH:
            return False
        return all(_is_plain(v, depth - 1, with_arrays=with_arrays) for v in value)
    if kind is dict:
        return (
            len(value) <= _PLAIN_LENGTH
            and _is_plain(list(value), 1)
            and _is_plain(list(value.values()), depth - 1, with_arrays=with_arrays)
        )
    return with_arrays and kind.__module__ == "numpy" and _is_small_array(value)


def _is_small_array(value: Any) -> bool:
    """Return whether a value is an array of numbers, or a number of numpy, that is no blob."""
    import numpy as np  # loaded already, because a value is of it

    if type(value) is np.ndarray:
        return not value.dtype.hasobject and value.nbytes < INLINE_LIMIT
    return isinstance(value, np.number | np.bool_)


class _LargeBytes:
    """Placeholder for a large bytes object, because the built-in type always pickles in band."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.data), (pickle.PickleBuffer(self.data),)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Pickler of cloudpickle for what it does not pickle itself: wrappers, classes with slots, objects of a Manager."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = reduce_wrapper(obj) or _reduce_managed(obj)
        return _with_slots(obj, super().reducer_override(obj)) if reduced is None else reduced


class _Pickler(ByValuePickler):
    """Pickler that collects large buffers instead of writing them."""

    def __init__(
        self,
        sink: io.BytesIO,
        large: list[memoryview | Blob],
        reduce: Callable[[Any], Any] | None,
        pinned: list[Pinned],
    ) -> None:
        self._reduce = reduce
        self._pinned = pinned
        # A local name, because a callback that refers to this pickler would make a cycle, and keep its arguments alive.
        self._aside = aside = dict[int, tuple[bytearray, Blob]]()
        """Blobs that a value brings along, by the id of the empty buffer that stands for each in the pickle."""

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if aside and (known := aside.get(id(view.obj))) is not None:
                large.append(known[1])
                return False
            if view.nbytes < INLINE_LIMIT or len(large) >= _MOST_BUFFERS:
                return True
            large.append(view)
            return False

        super().__init__(sink, protocol=5, buffer_callback=keep_in_band)

    def dump(self, value: Any) -> None:
        super().dump(_with_large_bytes(value))

    def reducer_override(self, obj: Any) -> Any:
        reduced = None if self._reduce is None else self._reduce(obj)
        if type(obj) is Spliced:
            return load, self._parts(obj.pickled)
        if type(obj) is Ref:
            data, *buffers = self._parts(pickled := held_by(obj).pickled)
            return carried, (pickled.names or _names_of(pickled.buffers), data, *buffers)
        if issubclass(type(obj), Pinned):
            self._pinned.append(obj)
        reduced = reduced or _reduce_memmap(obj) or _reduce_torch_storage(obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _parts(self, pickled: Pickled) -> tuple[Any, ...]:
        """Return the arguments from which a value that is pickled already is loaded. Its buffers stay blobs."""
        if not pickled.names:
            return pickled.data, *map(self._buffer, pickled.buffers)
        return pickled.data, *map(self._named_buffer, pickled.buffers, pickled.names)

    def _named_buffer(self, part: Any, name: bytes) -> pickle.PickleBuffer:
        return self._buffer(part if isinstance(part, Blob) else NamedBlob(name, memoryview(part).cast("B")))

    def _buffer(self, part: Any) -> pickle.PickleBuffer:
        if not isinstance(part, Blob):
            return pickle.PickleBuffer(part)
        empty = bytearray()
        self._aside[id(empty)] = empty, part
        return pickle.PickleBuffer(empty)


def _names_of(buffers: tuple[Any, ...]) -> tuple[bytes, ...]:
    """Return the names of buffers that are all blobs; otherwise none."""
    return tuple(part.digest for part in buffers) if all(isinstance(part, Blob) for part in buffers) else ()


def _with_large_bytes(value: Any, depth: int = 3) -> Any:
    """Replace large bytes objects by placeholders, within the containers that usually hold a call's arguments.

    Returns a container without any as itself, so that shared containers stay shared.
    """
    kind = type(value)
    if kind in (bytes, bytearray):
        return _LargeBytes(value) if len(value) >= INLINE_LIMIT else value
    if depth and kind in (tuple, list) and not _BYTES_HOLDERS.isdisjoint(set(map(type, value))):
        items = [_with_large_bytes(v, depth - 1) for v in value]
        return kind(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if depth and kind is dict and not _BYTES_HOLDERS.isdisjoint(set(map(type, value.values()))):
        marked = {k: _with_large_bytes(v, depth - 1) for k, v in value.items()}
        return marked if any(marked[k] is not v for k, v in value.items()) else value
    return value


_BYTES_HOLDERS = frozenset({bytes, bytearray, tuple, list, dict})


def _reduce_memmap(obj: Any) -> Any:
    """Pickle a numpy.memmap as a plain array. numpy copies arrays of a subclass into the pickle, however large."""
    if type(obj).__name__ != "memmap" or "numpy" not in sys.modules:
        return None
    import numpy as np

    return (np.asarray, (obj.view(np.ndarray),)) if type(obj) is np.memmap else None


def _reduce_torch_storage(obj: Any) -> Any:
    """Pickle a torch storage as a buffer, because torch's own pickling copies the bytes twice.

    Storages are pickled instead of tensors so that views of one tensor still share memory at the receiver.
    """
    if type(obj).__name__ not in ("TypedStorage", "UntypedStorage") or "torch" not in sys.modules:
        return None
    import torch

    if isinstance(obj, torch.storage.TypedStorage):
        return _typed_storage, (obj._untyped_storage, obj.dtype)
    if not isinstance(obj, torch.UntypedStorage):
        return None
    on_cpu = obj if obj.device.type == "cpu" else obj.cpu()
    view: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(on_cpu).numpy()  # whatever the default is
    return _untyped_storage, (pickle.PickleBuffer(view) if view.nbytes else b"",)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped_storage(buffer: Any) -> Any:
    import torch

    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)
    if memoryview(buffer).readonly:  # in-band buffers arrive as bytes, but a tensor must be writable
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


class Mappable(Protocol):
    """Blob as `decode` uses it."""

    def map(self) -> Any:
        """Return its bytes, writable. Nobody else sees what is written. `Elsewhere` returns itself."""
        ...


def decode(parsed: Parsed, blobs: Iterable[Mappable]) -> Any:
    """Unpickle over fresh private mappings of `blobs`, which are in the order of `parsed.references`.

    Raises:
        PullRefused: The sender's memory cannot be read.
        BaseException: Anything that the unpickling raises.
    """
    if not parsed.references:
        return loads(parsed.pickle)
    if parsed.is_in_memory:
        return loads(parsed.pickle, [pull(place, size) for place, size in parsed.references])
    buffers: list[Any] = [blob.map() for blob in blobs]
    data: Any = buffers.pop() if parsed.pickle_is_blob else parsed.pickle
    # A reference takes a buffer that lies elsewhere as it is.
    return loads(data, [b if isinstance(b, Elsewhere) else pickle.PickleBuffer(b) for b in buffers])


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector around unpickling that imports modules.

    Imports create objects that stay. Scanning them again and again takes a fifth of the import time of torch and
    transformers. If threads overlap, the thread that found the collector enabled enables it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_CACHED = type(functools.lru_cache(abs))


def reduce_wrapper(obj: Any) -> Any:
    """Return how to pickle a `cached_property`, or nameless `lru_cache` or `singledispatch` wrappers; else None."""
    if type(obj) is functools.cached_property:  # until Python 3.12 it holds a lock
        return _cached_property, (obj.func, obj.attrname)
    if type(obj) is _CACHED:
        return None if _is_named(obj) else (_cached, (obj.__wrapped__, obj.cache_parameters()))
    if type(obj) is FunctionType and type(obj.__dict__.get("registry")) is MappingProxyType and not _is_named(obj):
        default = getattr(obj, "__wrapped__", None)
        return None if default is None else (_dispatched, (default, dict(obj.__dict__["registry"])))
    return None


def _reduce_managed(obj: Any) -> Any:
    """Pickle a proxy of a `multiprocessing.Manager` with the key of its server: no task is a child of its program."""
    managers = sys.modules.get("multiprocessing.managers")
    if managers is None or not isinstance(obj, managers.BaseProxy):
        return None
    rebuild, (kind, token, serializer, options) = obj.__reduce__()
    return rebuild, (kind, token, serializer, {**options, "authkey": bytes(obj._authkey)})


def _with_slots(obj: Any, reduced: Any) -> Any:
    """Return how to pickle a class by value with its slots, without which its instances would be others."""
    if not isinstance(obj, type) or not vars(obj).get("__slots__") or not isinstance(reduced, tuple):
        return reduced  # named tuples set theirs, which are empty, themselves
    if reduced[0].__name__ != "_make_skeleton_class":  # of an enumeration
        return reduced
    make, (constructor, name, bases, options, *more), (state, slot_state), *rest = reduced
    options = {**options, "__slots__": vars(obj)["__slots__"]}
    own = {name: value for name, value in state.items() if type(value) is not MemberDescriptorType}
    return make, (constructor, name, bases, options, *more), (own, slot_state), *rest


def _is_named(obj: Any) -> bool:
    if obj.__module__ == "__main__":
        return False
    named: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        named = getattr(named, part, None)
    return named is obj


def _cached_property(function: Callable[..., Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatched(default: Callable[..., Any], registry: dict[type, Callable[..., Any]]) -> Any:
    dispatcher = functools.singledispatch(default)
    for kind, function in registry.items():
        dispatcher.register(kind, function)
    return dispatcher
