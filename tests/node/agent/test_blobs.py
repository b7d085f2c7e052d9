"""Blobs of a node: in memory up to a limit, then in its folder, with the same bytes in both."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from skyward.node.agent.blobs import NodeBlobs
from skyward.wire.blobs import Blob, pack_places, unpack_places


def blob(content: bytes) -> Blob:
    return Blob.snapshot(memoryview(content))


def open_files() -> int:
    gc.collect()  # leftovers of other tests do not count
    return len(os.listdir("/proc/self/fd"))


def test_an_added_blob_is_found_with_its_content(tmp_path: Path) -> None:
    blobs = NodeBlobs(str(tmp_path), 1 << 20)
    made = blob(b"x" * 1000)
    blobs.add(made)
    assert made.digest in blobs
    assert blobs.get(made.digest) is made
    assert blobs.get(b"?" * 16) is None
    assert b"?" * 16 not in blobs


def test_beyond_the_limit_the_least_recently_used_blob_is_spilled(tmp_path: Path) -> None:
    blobs = NodeBlobs(str(tmp_path), 2500)
    first, second, third = (blob(letter * 1000) for letter in (b"a", b"b", b"c"))
    blobs.add(first)
    blobs.add(second)
    blobs.get(first.digest)
    blobs.add(third)
    spilled = blobs.get(second.digest)
    assert spilled is not None
    assert spilled is not second
    assert bytes(spilled.map()) == b"b" * 1000
    assert blobs.get(first.digest) is first
    assert os.listdir(tmp_path / "blobs") == [], "spilled files have no name: they go with the process"


def test_the_next_client_drops_a_blob_as_often_as_it_was_told_and_counts_coming_values_itself(tmp_path: Path) -> None:
    blobs = NodeBlobs(str(tmp_path), 1 << 20)
    twice, coming = (blob(letter * 1000) for letter in (b"a", b"b"))
    for digest, fd in [(twice.digest, twice.fd)] * 2 + [(coming.digest, coming.fd)]:
        blobs.add(Blob(digest, 1000, os.dup(fd)))
    told = blobs.hand_over({coming.digest: 1})
    assert told == [(twice.digest, 1000, 2), (coming.digest, 1000, 0)]
    assert unpack_places(pack_places(told)) == told
    blobs.drop(twice.digest)
    assert twice.digest in blobs
    blobs.drop(twice.digest)
    assert twice.digest not in blobs
    blobs.drop(coming.digest)
    assert coming.digest not in blobs


def test_a_single_blob_larger_than_the_limit_stays_in_memory(tmp_path: Path) -> None:
    blobs = NodeBlobs(str(tmp_path), 10)
    made = blob(b"x" * 1000)
    blobs.add(made)
    assert blobs.get(made.digest) is made


@pytest.mark.parametrize("limit", [100_000, 2000])
def test_dropping_all_blobs_closes_all(tmp_path: Path, limit: int) -> None:
    before = open_files()
    blobs = NodeBlobs(str(tmp_path), limit)
    digests = []
    for number in range(10):
        blobs.add(blob(bytes([number]) * 1000))
        again = blob(bytes([number]) * 1000)
        digests.append(again.digest)
        blobs.add(again)  # it came twice
    assert open_files() == before + 10
    for digest in digests:
        blobs.drop(digest)
        blobs.drop(digest)
        assert digest not in blobs
    assert open_files() == before


def test_a_blob_that_cannot_be_spilled_stays_in_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blobs").touch()  # a folder cannot be made there, as on a full disk
    blobs = NodeBlobs(str(tmp_path), 1500)
    made = [blob(letter * 1000) for letter in (b"a", b"b", b"c")]
    for one in made:
        blobs.add(one)
    assert [blobs.get(one.digest) for one in made] == made
    assert capfd.readouterr().err.count("in memory beyond its limit") == 1
