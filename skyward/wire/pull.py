"""Buffers that stay in the client's memory and are read there by the slot: one copy, and no file between (Linux).

Only for a caller that waits for its call: the buffers then stay as they are. `process_vm_readv` needs what a debugger
needs (the same user; no Yama restriction): where it is refused the call goes the ordinary way, as blobs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import sys
import threading
from typing import Any

from ..errors import InternalError

__all__ = ["PullRefused", "is_possible", "place_of", "pull"]

_PLACE = struct.Struct("<QQ")  # process, address
_HUGE = 2 << 20
"""Bytes of a huge page. Zeroing one takes a fraction of what 512 small ones take."""
_SPLIT = 8 << 20
"""Bytes above which two threads read: getting pages from the kernel takes longer than copying."""


class PullRefused(InternalError):
    """The memory of the client cannot be read from here."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@functools.cache
def is_possible() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "process_vm_readv")


def place_of(data: memoryview) -> bytes:
    """16 bytes that say where `data` lies: this process and the address. `data` is contiguous."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return _PLACE.pack(os.getpid(), address)


def pull(place: bytes, size: int) -> memoryview:
    """A copy, writable, of the `size` bytes at `place`. Raises PullRefused."""
    process, address = _PLACE.unpack(place)
    whole = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    skip = -start % _HUGE
    half = size // 2 // _HUGE * _HUGE if size >= _SPLIT else 0
    copied: list[int] = []
    if half:

        def read_second_half(_kept: mmap.mmap = whole) -> None:  # a cancel may leave us first: it must stay mapped
            copied.append(_read(process, address + half, start + skip + half, size - half))

        other = threading.Thread(target=read_second_half, name="skyward-pull")
        other.start()
        copied.append(_read(process, address, start + skip, half))
        other.join()
    else:
        copied.append(_read(process, address, start + skip, size))
    if sum(copied) != size:
        raise PullRefused(f"process {process}: {sum(copied)} of {size} bytes could be read")
    return memoryview(whole)[skip : skip + size]


def _read(process: int, source: int, target: int, size: int) -> int:
    """Bytes that were copied."""
    read: Any = _library().process_vm_readv
    done = 0
    while done < size:
        to = _Vector(target + done, size - done)
        of = _Vector(source + done, size - done)
        count = read(process, ctypes.byref(to), 1, ctypes.byref(of), 1, 0)
        if count <= 0:
            break
        done += count
    return done


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Vector),
        ctypes.c_ulong,
        ctypes.POINTER(_Vector),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return library
