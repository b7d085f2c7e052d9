"""Blobs: their names are digests of their contents."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skyward.wire.blobs import Blob, BlobStore, blob_digest, spill
from tests.waiting import until

MIB = 1 << 20


def content(blob: Blob) -> bytes:
    return bytes(blob.map())


@pytest.mark.parametrize("size", [1, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_a_snapshot_holds_the_bytes_and_is_named_after_them(size: int) -> None:
    data = os.urandom(size)
    blob = Blob.snapshot(memoryview(data))
    assert content(blob) == data
    assert blob.size == size
    assert blob.digest == blob_digest(memoryview(data))
    assert blob.digest != blob_digest(memoryview(data + b"\0"))


def test_a_snapshot_of_changing_memory_is_named_after_the_bytes_it_holds() -> None:
    data = np.zeros(8 * MIB, dtype=np.uint8)
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 251
            data[:: 4096 + value] = value

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            blob = Blob.snapshot(data.data)
            assert blob_digest(memoryview(content(blob))) == blob.digest
    finally:
        stop.set()
        writer.join()


def test_writes_to_a_mapping_are_private() -> None:
    blob = Blob.snapshot(memoryview(b"abc"))
    first, second = blob.map(), blob.map()
    first[0:1] = b"X"
    assert bytes(first) == b"Xbc"
    assert bytes(second) == b"abc"
    assert content(blob) == b"abc"


def test_nobody_can_write_to_the_blob_itself() -> None:
    blob = Blob.snapshot(memoryview(b"abc"))
    with pytest.raises(PermissionError):
        os.pwrite(blob.fd, b"X", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(blob.fd, 1)


def test_a_snapshot_in_a_spare_file_is_like_any_other() -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("rw-s" in line and "skyward-blob" in line for line in lines)

    until(lambda: mapped() == 0)  # the tests before may have left a spare file, which would be taken
    data = os.urandom(8 * MIB + 5)
    before = mapped()
    Blob.snapshot(memoryview(data))
    until(lambda: mapped() > before)  # a spare file is there
    with_spare = mapped()
    blob = Blob.snapshot(memoryview(data)[MIB:])
    assert content(blob) == data[MIB:]
    assert blob.digest == blob_digest(memoryview(data)[MIB:])
    with pytest.raises(PermissionError):
        os.pwrite(blob.fd, b"X", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(blob.fd, blob.size)  # writable, and shared
    until(lambda: mapped() <= with_spare)  # there is the next spare file, and no writable mapping of the blob
    until(lambda: mapped() == before)  # nobody used it


def test_a_mapping_outlives_its_blob() -> None:
    blob = Blob.snapshot(memoryview(b"abc"))
    mapped = blob.map()
    blob.close()
    blob.close()
    assert bytes(mapped) == b"abc"


def test_a_spilled_blob_is_the_same_blob(tmp_path: Path) -> None:
    data = os.urandom(3 * MIB + 5)
    blob = Blob.snapshot(memoryview(data))
    gc.collect()  # leftovers of other tests do not count
    before = len(os.listdir("/proc/self/fd"))
    moved = spill(blob, str(tmp_path))
    assert content(moved) == data
    assert (moved.digest, moved.size) == (blob.digest, blob.size)
    assert len(os.listdir("/proc/self/fd")) == before, "the one in memory is closed"
    mapped = moved.map()
    mapped[0:1] = b"?"
    assert content(moved) == data


@pytest.fixture
def few_files() -> Iterator[int]:
    """Set a limit of descriptors that is soon reached."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class TestStore:
    def test_the_same_content_is_the_same_blob(self) -> None:
        store = BlobStore()
        first = store.put(memoryview(b"a" * 1000))
        assert store.put(memoryview(bytearray(b"a" * 1000))) is first
        assert store.put(memoryview(b"b" * 1000)) is not first

    def test_contents_with_equal_ends_are_different_blobs(self) -> None:
        store = BlobStore(100 * MIB)
        data = bytearray(MIB)
        one = store.put(memoryview(data))
        data[100_000] = 1
        other = store.put(memoryview(data))
        assert one.digest != other.digest
        assert store.put(memoryview(data)) is other

    def test_arrays_of_any_type_are_bytes(self) -> None:
        store = BlobStore()
        array = np.arange(1000, dtype=np.float64).reshape(10, 100)
        assert content(store.put(array.data)) == array.tobytes()

    def test_blobs_that_a_call_needs_are_not_copied_again_at_any_age(self) -> None:
        store = BlobStore(limit_bytes=2500)
        blobs = [store.put(memoryview(letter * 1000)) for letter in (b"a", b"b", b"c")]
        assert content(blobs[0]) == b"a" * 1000
        assert [store.put(memoryview(letter * 1000)) for letter in (b"c", b"a", b"b")] == [blobs[2], blobs[0], blobs[1]]

    def test_beyond_the_limit_unneeded_blobs_are_closed_oldest_first(self) -> None:
        store = BlobStore(limit_bytes=2500)
        needed = store.put(memoryview(b"n" * 1000))
        gc.collect()  # leftovers of other tests do not count
        before = len(os.listdir("/proc/self/fd"))
        for letter in (b"a", b"b", b"c"):
            store.put(memoryview(letter * 1000))
        assert len(os.listdir("/proc/self/fd")) == before + 1, "of a, b and c only the last one fits beside it"
        assert store.put(memoryview(b"n" * 1000)) is needed

    def test_calls_that_exceed_the_limit_leave_no_room_for_other_blobs(self) -> None:
        store = BlobStore(limit_bytes=2500)
        store.put(memoryview(b"old" * 300))
        gc.collect()  # leftovers of other tests do not count
        before = len(os.listdir("/proc/self/fd"))
        needed = [store.put(memoryview(letter * 1000)) for letter in (b"a", b"b", b"c")]
        assert len(os.listdir("/proc/self/fd")) == before + 2, "three came, and the old one went"
        del needed
        store.clear()
        assert len(os.listdir("/proc/self/fd")) == before - 1


class TestWithoutDescriptors:
    def test_blobs_use_at_most_half_of_the_descriptors(self, few_files: int) -> None:
        blobs = [Blob.snapshot(memoryview(b"%d" % number * 1000)) for number in range(few_files)]
        with open("/dev/null") as file:
            assert file.fileno() < few_files
        assert sum(blob.is_loaded for blob in blobs) >= few_files // 2
        assert len({blob.digest for blob in blobs}) == few_files

    def test_a_blob_in_memory_has_the_same_name_and_bytes_as_one_in_a_file(self, few_files: int) -> None:
        data = os.urandom(3 * MIB + 7)
        filed = Blob.snapshot(memoryview(data))
        others = [Blob.snapshot(memoryview(bytes(10))) for _ in range(few_files)]
        in_memory = Blob.snapshot(memoryview(data))
        assert in_memory.is_loaded
        assert in_memory.digest == filed.digest
        assert bytes(in_memory.in_memory() or b"") == data
        del others
        assert in_memory.open() >= 0
        assert not in_memory.is_loaded
        assert content(in_memory) == data

    def test_a_blob_that_did_not_arrive_is_reported(self) -> None:
        with pytest.raises(OSError, match="did not arrive.*ulimit -n"):
            Blob(bytes(16), 1000, -1).map()

    def test_blobs_that_are_used_again_stay(self) -> None:
        store = BlobStore(limit_bytes=2500)
        first = store.put(memoryview(b"a" * 1000))
        store.put(memoryview(b"b" * 1000))
        store.put(memoryview(b"a" * 1000))
        store.put(memoryview(b"c" * 1000))
        assert store.put(memoryview(b"a" * 1000)) is first

    def test_forgotten_blobs_leave_no_descriptor(self) -> None:
        store = BlobStore(limit_bytes=10_000)
        gc.collect()  # leftovers of other tests do not count
        before = len(os.listdir("/proc/self/fd"))
        for number in range(100):
            store.put(memoryview(b"%d" % number * 1000))
        assert len(os.listdir("/proc/self/fd")) < before + 15
        store.clear()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_threads_that_put_the_same_bytes_get_the_same_name(self) -> None:
        store = BlobStore()
        data = os.urandom(MIB)
        found: list[Blob] = []
        threads = [threading.Thread(target=lambda: found.append(store.put(memoryview(data)))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({blob.digest for blob in found}) == 1
        assert all(content(blob) == data for blob in found)
