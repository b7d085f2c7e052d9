"""Blobs: what they are called is what they hold."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from skyward.wire.blobs import Blob, BlobStore, blob_digest, spill

MIB = 1 << 20


def content(blob: Blob) -> bytes:
    return bytes(blob.map())


@pytest.mark.parametrize("size", [1, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_a_snapshot_holds_the_bytes_and_is_named_by_them(size: int) -> None:
    data = os.urandom(size)
    blob = Blob.snapshot(memoryview(data))
    assert content(blob) == data
    assert blob.size == size
    assert blob.digest == blob_digest(memoryview(data))
    assert blob.digest != blob_digest(memoryview(data + b"\0"))


def test_a_snapshot_of_what_another_thread_writes_to_is_named_by_what_it_holds() -> None:
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


def test_a_mapping_may_be_written_and_nobody_else_sees_it() -> None:
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


def test_a_mapping_outlives_its_blob() -> None:
    blob = Blob.snapshot(memoryview(b"abc"))
    mapped = blob.map()
    blob.close()
    blob.close()
    assert bytes(mapped) == b"abc"


def test_a_spilled_blob_is_the_same_blob(tmp_path: Path) -> None:
    data = os.urandom(3 * MIB + 5)
    blob = Blob.snapshot(memoryview(data))
    before = len(os.listdir("/proc/self/fd"))
    moved = spill(blob, str(tmp_path))
    assert content(moved) == data
    assert (moved.digest, moved.size) == (blob.digest, blob.size)
    assert len(os.listdir("/proc/self/fd")) == before, "the one in memory is closed"
    mapped = moved.map()
    mapped[0:1] = b"?"
    assert content(moved) == data


class TestStore:
    def test_the_same_content_is_the_same_blob(self) -> None:
        store = BlobStore()
        first = store.put(memoryview(b"a" * 1000))
        assert store.put(memoryview(bytearray(b"a" * 1000))) is first
        assert store.put(memoryview(b"b" * 1000)) is not first

    def test_arrays_of_any_type_are_bytes(self) -> None:
        store = BlobStore()
        array = np.arange(1000, dtype=np.float64).reshape(10, 100)
        assert content(store.put(array.data)) == array.tobytes()

    def test_beyond_the_limit_the_oldest_is_forgotten_but_not_closed(self) -> None:
        store = BlobStore(limit_bytes=2500)
        blobs = [store.put(memoryview(letter * 1000)) for letter in (b"a", b"b", b"c")]
        assert content(blobs[0]) == b"a" * 1000, "a call may still need it"
        assert store.put(memoryview(b"c" * 1000)) is blobs[2]
        assert store.put(memoryview(b"a" * 1000)) is not blobs[0]

    def test_what_is_used_again_stays(self) -> None:
        store = BlobStore(limit_bytes=2500)
        first = store.put(memoryview(b"a" * 1000))
        store.put(memoryview(b"b" * 1000))
        store.put(memoryview(b"a" * 1000))
        store.put(memoryview(b"c" * 1000))
        assert store.put(memoryview(b"a" * 1000)) is first

    def test_forgotten_blobs_leave_no_descriptor(self) -> None:
        store = BlobStore(limit_bytes=10_000)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(100):
            store.put(memoryview(b"%d" % number * 1000))
        assert len(os.listdir("/proc/self/fd")) < before + 15
        store.clear()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_threads_that_put_the_same_get_the_same_name(self) -> None:
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
