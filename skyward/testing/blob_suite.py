"""Conformance suite of the hub's blob stores, as tests to inherit. Needs the extra `hub`.

from skyward.testing.blob_suite import BlobSuite

class TestMyBlobs(BlobSuite):
    @pytest.fixture
    def blobs(self): ...            # an empty store

    def kept(self, blobs): ...      # names of all that it holds, unfinished uploads too
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..hub.store.blobs import Blobs

__all__ = ["BlobSuite"]

LARGE = (20 << 20) + 1
"""Bytes of an upload that a bucket takes in several parts."""


class BlobSuite(ABC):
    """Conformance of a store of content-addressed blobs.

    A subclass gives the fixture `blobs`, an empty store, and the method `kept`.

    Example:
        class TestFolder(BlobSuite):
            @pytest.fixture
            def blobs(self, tmp_path):
                return FolderBlobs(tmp_path)

            def kept(self, blobs):
                return [path.name for path in blobs.folder.rglob("*") if path.is_file()]
    """

    @abstractmethod
    def kept(self, blobs: Blobs) -> Collection[str]:
        """Return a name for everything that the store holds, unfinished uploads included."""

    @pytest.mark.parametrize("size", [0, 1, 1 << 20, LARGE])
    def test_bytes_come_back_whole_and_in_parts(self, blobs: Blobs, size: int) -> None:
        from ..hub.store.blobs import put_blob

        content = os.urandom(size)
        sha256, length = put_blob(blobs, _cut(content), _sha256(content), size)
        assert (sha256, length) == (_sha256(content), size)
        assert blobs.exists(sha256)
        for start, end in ((0, None), (size // 3, None), (size // 3, size // 2), (0, 0), (size, None), (size, size)):
            assert b"".join(blobs.open(sha256, start, end)) == content[start:end], (start, end)

    def test_equal_bytes_are_kept_once(self, blobs: Blobs) -> None:
        from ..hub.store.blobs import put_blob

        content = os.urandom(LARGE)
        with ThreadPoolExecutor(4) as threads:
            names = set(threads.map(lambda _: put_blob(blobs, _cut(content)), range(4)))
        assert names == {(_sha256(content), LARGE)}
        assert len(self.kept(blobs)) == 1

    @pytest.mark.parametrize("size", [5, LARGE])
    def test_bytes_that_differ_from_what_was_announced_are_not_kept(self, blobs: Blobs, size: int) -> None:
        from ..hub.model.refusal import Reason, Refusal
        from ..hub.store.blobs import put_blob

        content = bytes(size)
        for sha256, length in (("0" * 64, None), (None, size + 1)):
            with pytest.raises(Refusal) as refused:
                put_blob(blobs, _cut(content), sha256, length)
            assert refused.value.reason is Reason.INVALID
        assert not blobs.exists(_sha256(content))
        assert not self.kept(blobs)

    @pytest.mark.parametrize("size", [5, LARGE])
    def test_an_upload_that_breaks_off_leaves_nothing(self, blobs: Blobs, size: int) -> None:
        writer = blobs.writer()
        for piece in _cut(bytes(size)):
            writer.write(piece)
        writer.abort()
        writer.abort()
        assert not self.kept(blobs)

    def test_a_finished_blob_survives_abort(self, blobs: Blobs) -> None:
        writer = blobs.writer()
        writer.write(b"kept")
        sha256, _ = writer.finish()
        writer.abort()
        assert b"".join(blobs.open(sha256)) == b"kept"

    def test_a_deleted_blob_is_missing_until_it_comes_again(self, blobs: Blobs) -> None:
        from ..hub.model.refusal import Reason, Refusal
        from ..hub.store.blobs import put_blob

        sha256, _ = put_blob(blobs, [b"twice"])
        blobs.delete(sha256)
        blobs.delete(sha256)
        assert not blobs.exists(sha256)
        for start, end in ((0, None), (1, 2), (1, 1)):
            with pytest.raises(Refusal) as refused:
                blobs.open(sha256, start, end)
            assert refused.value.reason is Reason.MISSING
        put_blob(blobs, [b"twice"])
        assert b"".join(blobs.open(sha256)) == b"twice"

    @pytest.mark.parametrize("name", ["", "x", "../" + "a" * 61, "A" * 64, "a" * 63 + "/", "a" * 65])
    def test_only_a_hash_is_a_name(self, blobs: Blobs, name: str) -> None:
        from ..hub.model.refusal import Reason, Refusal

        for call in (blobs.open, blobs.exists, blobs.delete):
            with pytest.raises(Refusal) as refused:
                call(name)
            assert refused.value.reason is Reason.MISSING

    def test_a_presigned_url_gives_the_bytes(self, blobs: Blobs) -> None:
        from ..hub.store.blobs import put_blob

        sha256, _ = put_blob(blobs, [b"by url"])
        url = blobs.presigned(sha256)
        if url is None:  # the store has no server of its own
            return
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.read() == b"by url"
            assert answer.headers["Content-Disposition"] == "attachment"

    def test_clean_up_leaves_blobs(self, blobs: Blobs) -> None:
        from ..hub.store.blobs import put_blob

        content = os.urandom(LARGE)
        sha256, _ = put_blob(blobs, _cut(content))
        blobs.clean_up()
        assert b"".join(blobs.open(sha256)) == content


def _cut(content: bytes) -> list[bytes]:
    return [content[start : start + 700_000] for start in range(0, len(content), 700_000)]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
