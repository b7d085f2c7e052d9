"""Buffers that are copied straight out of another process's memory, without a file in between (Linux).

A slot copies arguments from the client, and the client copies values from a slot. The buffers must not change
meanwhile: the caller waits, or the client holds a copy for this call alone. `process_vm_readv` needs the permissions of
a debugger (the same user, no Yama restriction). Where it is refused, the buffers are sent as blobs.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import threading
from typing import Any

from ..errors import InternalError

_PLACE = struct.Struct("<QQ")  # process, address
_VECTOR = struct.Struct("@PN")  # the kernel's iovec: address, size
_HUGE = 2 << 20
"""Bytes of a huge page. Zeroing one takes a fraction of the time of 512 small ones."""
LEAST_SIZE = 4 << 20
"""Bytes from which values, and arguments of futures, are copied. A copy has huge pages, so that of less would waste
memory."""
_SPLIT = 8 << 20
"""Bytes from which two threads read: allocating pages takes longer than copying, and both happen in the kernel."""


class PullRefused(InternalError):
    """Failure to read the client's memory from this process."""


def is_possible() -> bool:
    return sys.platform == "linux"


def place_of(data: memoryview) -> bytes:
    """Return 16 bytes with this process's id and the address of `data`, which must be contiguous."""
    return _PLACE.pack(os.getpid(), address_of(data))


def address_of(data: memoryview) -> int:
    """Return the address of `data`, which must be contiguous."""
    import ctypes  # inside, as in all of this module: pools with small values have no use for it

    buffer = _buffer_type()()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    address: int = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


@functools.cache
def _buffer_type() -> Any:
    import ctypes

    class Buffer(ctypes.Structure):
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

    return Buffer


def pull(place: bytes, size: int) -> memoryview:
    """Return a writable copy of the `size` bytes at `place`.

    Raises:
        PullRefused: The kernel denies access, or the process is gone.
    """
    import ctypes

    process, address = _PLACE.unpack(place)
    whole = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    skip = -start % _HUGE
    half = size // 2 // _HUGE * _HUGE if size >= _SPLIT else 0
    copied: list[int] = []
    if half:
        # A cancel may raise in this thread while the other one still writes. The default argument keeps the memory
        # mapped until that thread is done; without it, the thread would write to unmapped pages.
        def read_second_half(_kept: mmap.mmap = whole) -> None:
            copied.append(_read(process, address + half, start + skip + half, size - half))

        other = threading.Thread(target=read_second_half, name="skyward-pull")
        other.start()
        copied.append(_read(process, address, start + skip, half))
        other.join()
    else:
        copied.append(_read(process, address, start + skip, size))
    if sum(copied) != size:
        raise PullRefused(f"process {process}: only {sum(copied)} of {size} bytes are readable")
    return memoryview(whole)[skip : skip + size]


def _read(process: int, source: int, target: int, size: int) -> int:
    """Copy bytes from `process`, and return how many were copied."""
    read = _process_vm_readv()
    done = 0
    while done < size:
        to = _VECTOR.pack(target + done, size - done)
        of = _VECTOR.pack(source + done, size - done)
        count = read(process, to, 1, of, 1, 0)
        if count <= 0:
            break
        done += count
    return done


@functools.cache
def _process_vm_readv() -> Any:
    import ctypes

    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_ulong,
        ctypes.c_char_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return function
