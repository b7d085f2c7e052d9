"""Files in memory with huge pages (Linux 6.1).

With pages of 4 KiB, their allocation and mapping take several times as long as the copy of the bytes. The kernel makes
huge pages for files in memory only where an administrator allows it, or on request (MADV_COLLAPSE). Where it has none
left, small pages take their place.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .pull import address_of

_HUGE = 2 << 20
_HUGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_POPULATE_WRITE, _COLLAPSE = 23, 25
"""MADV_POPULATE_WRITE (Linux 5.14) and MADV_COLLAPSE of linux/mman.h."""
_MAP_FIXED = 0x10
"""MAP_FIXED of linux/mman.h."""
_STEP = 8 << 20
"""Bytes whose pages are made before they are filled, so that the new pages are still in the processor's cache."""
_SPLIT = 16 << 20
"""Bytes from which two threads fill a file."""
_PASSING = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EBUSY})
"""Errors of a kernel that makes huge pages, but not now."""
_broken: list[mmap.mmap] = []
"""Reserved addresses where mapping a file failed. They are never given back, because others may be mapped there."""


@functools.cache
def is_possible() -> bool:
    """Return whether this kernel makes huge pages for files in memory."""
    if sys.platform != "linux":
        return False
    try:
        if int(_HUGE_SIZE.read_text()) != _HUGE:
            return False
        with open(os.memfd_create("skyward-huge", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
            error = _advise(address_of(allocate(file.fileno(), _HUGE)), _HUGE, _COLLAPSE)
    except (OSError, ValueError):
        return False
    return not error or error in _PASSING


def map_file(fd: int, size: int, *, is_shared: bool = False) -> memoryview:
    """Map a file at an address that suits huge pages. Writes are private unless `is_shared`.

    Raises:
        OSError: The file cannot be mapped.
    """
    # Python's mmap takes no address. So one of memory reserves a range, and unmaps what is there with its last view.
    whole = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(memoryview(whole))
    skip = -start % _HUGE
    flags = _MAP_FIXED | (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE)
    if _library().mmap(start + skip, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != start + skip:
        _broken.append(whole)
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    return memoryview(whole)[skip : skip + size]


def allocate(fd: int, size: int) -> memoryview:
    """Give an empty file its size, and map it shared. Its pages are still to be made.

    Raises:
        OSError: There is no room.
    """
    os.ftruncate(fd, size)
    for at in range(0, size, _HUGE):
        os.pwrite(fd, b"\0", at)  # a huge page replaces small ones, but no hole
    return map_file(fd, size, is_shared=True)


def make_pages(pages: memoryview) -> None:
    """Make the pages of a file that is mapped, without holding the GIL.

    Raises:
        OSError: There is no room.
    """
    _make_pages(address_of(pages), pages.nbytes, are_huge=True)


def fill(
    pages: memoryview,
    data: memoryview,
    piece_size: int,
    digest: Callable[[memoryview], bytes] | None = None,
    *,
    are_made: bool = False,
) -> list[bytes]:
    """Copy `data` to the pages of a file.

    Args:
        pages: Mapping of the file.
        data: As many contiguous bytes. Another thread may write to them meanwhile.
        piece_size: Bytes to copy at a time, a divisor of 8 MiB.
        digest: Function to call with each piece of the copy while it is in the processor's cache.
        are_made: Whether the pages were made before.

    Returns:
        The digests, in order.

    Raises:
        OSError: There is no room.
    """
    size = data.nbytes
    fill_range = functools.partial(_fill, pages, data, digest=digest, are_made=are_made)
    half = size // 2 // _STEP * _STEP if size >= _SPLIT else 0
    if not half:
        return fill_range(range(0, size, piece_size))
    rest: list[list[bytes] | BaseException] = []

    def fill_rest() -> None:  # refers to both memories, because a cancel may raise in the other thread meanwhile
        try:
            rest.append(fill_range(range(half, size, piece_size)))
        except BaseException as error:
            rest.append(error)

    other = threading.Thread(target=fill_rest, name="skyward-fill", daemon=True)
    try:
        other.start()
    except RuntimeError:  # this process cannot start another thread
        return fill_range(range(0, size, piece_size))
    digests = fill_range(range(0, half, piece_size))
    other.join()
    (last,) = rest
    if isinstance(last, BaseException):
        raise last
    return digests + last


def _fill(
    pages: memoryview,
    data: memoryview,
    pieces: range,
    *,
    digest: Callable[[memoryview], bytes] | None,
    are_made: bool,
) -> list[bytes]:
    """Copy the pieces of `data` that begin at `pieces`, and return the digests of their copies."""
    source, target = address_of(data), address_of(pages)
    digests: list[bytes] = []
    are_huge = True
    for at in pieces:
        if at % _STEP == 0 and not are_made:
            are_huge = _make_pages(target + at, min(_STEP, pieces.stop - at), are_huge=are_huge)
        end = min(at + pieces.step, pieces.stop)
        ctypes.memmove(target + at, source + at, end - at)  # other threads run meanwhile
        if digest is not None:
            digests.append(digest(pages[at:end]))
    return digests


def _make_pages(address: int, size: int, *, are_huge: bool) -> bool:
    """Make pages, and return whether they are huge. If not, the next ones need not be tried: a search takes time."""
    if are_huge:
        are_huge = not _advise(address, size // _HUGE * _HUGE, _COLLAPSE)
    if error := _advise(address, size, _POPULATE_WRITE):  # a write that finds no room would kill the process
        raise OSError(error, f"file of {size} bytes: {os.strerror(error)}")
    return are_huge


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise without holding the GIL, and return the number of its error; 0: none."""
    if size and _library().madvise(address, size, advice):
        return ctypes.get_errno()
    return 0


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    library.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, number
    return library
