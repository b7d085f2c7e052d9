"""Files in memory with huge pages hold the same bytes as those with small ones, whatever is short."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.wire import huge
from skyward.wire.blobs import Blob, blob_digest

pytestmark = pytest.mark.skipif(not huge.is_possible(), reason="this kernel makes no huge pages for files in memory")

MIB = 1 << 20
SIZES = [4 * MIB, 4 * MIB + 1, 6 * MIB - 1, 16 * MIB - 1, 16 * MIB, 41 * MIB + 4097]
"""Sizes below and above those from which two threads work, and that are no multiples of pages or huge pages."""


def maps_of(blob: Blob) -> int:
    """Count the mappings of this file alone. Other tests of this process have left some, which end at any time."""
    inode = str(os.fstat(blob.fd).st_ino)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == inode and "memfd:" in line for line in lines)


def check(blob: Blob, data: bytes) -> None:
    mapped = blob.map()
    assert bytes(mapped) == data
    mapped[0:1] = mapped[-1:] = b"?"
    assert bytes(blob.map()) == data  # what is written to a mapping is private
    with pytest.raises(PermissionError):
        os.pwrite(blob.fd, b"X", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(blob.fd, blob.size)  # writable, and shared
    assert os.fstat(blob.fd).st_size == len(data)


@pytest.mark.parametrize("size", SIZES)
def test_the_file_holds_the_bytes_under_the_same_name(size: int) -> None:
    data = os.urandom(size)
    named = blob_digest(memoryview(data))
    for blob in (Blob.snapshot(memoryview(data)), Blob.kept(memoryview(data)), Blob.unnamed(memoryview(data), named)):
        check(blob, data)
        assert blob.digest == named


def test_most_of_a_file_is_mapped_by_few_page_faults() -> None:
    data = memoryview(bytes(64 * MIB))

    def faults() -> int:
        mapped = memoryview(Blob.kept(data).map())
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert not any(mapped[:: mmap.PAGESIZE])
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    # With small pages, the kernel maps 16 at a time: 1,024 faults. It may have no free huge pages for a while.
    assert min(faults() for _ in range(5)) < 300


def test_the_last_view_unmaps_all_of_it() -> None:
    blob = Blob.kept(memoryview(os.urandom(5 * MIB)))
    assert maps_of(blob) == 0
    mapped = memoryview(blob.map())
    part = mapped[MIB : MIB + 3]
    content = bytes(part)
    del mapped
    assert bytes(part) == content
    assert maps_of(blob) > 0
    del part
    assert maps_of(blob) == 0


def test_without_another_thread_one_fills_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = os.urandom(20 * MIB)
    check(Blob.snapshot(memoryview(data)), data)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file of this process be larger than 8 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_bytes_without_room_for_a_file_stay_in_memory(small_files: None) -> None:
    data = os.urandom(9 * MIB)
    gc.collect()  # leftovers of other tests do not count
    before = len(os.listdir("/proc/self/fd"))
    blob = Blob.snapshot(memoryview(data))
    assert blob.is_loaded
    assert bytes(blob.in_memory() or b"") == data
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="File too large"):
        Blob.kept(memoryview(data))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_without_huge_pages_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "is_possible", lambda: False)
    for size in (4 * MIB, 20 * MIB + 5):
        data = os.urandom(size)
        check(Blob.kept(memoryview(data)), data)
        assert Blob.snapshot(memoryview(data)).digest == blob_digest(memoryview(data))


def test_threads_fill_files_at_once() -> None:
    data = [os.urandom(18 * MIB) for _ in range(3)]
    wrong: list[int] = []

    def fill(number: int) -> None:
        for _ in range(5):
            if bytes(Blob.kept(memoryview(data[number])).map()) != data[number]:
                wrong.append(number)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
