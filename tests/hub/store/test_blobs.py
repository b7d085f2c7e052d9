"""Blobs in a folder and in a bucket, by the suite that both pass; and the faults of each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from skyward.errors import UsageError
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.services.hub import open_blobs
from skyward.hub.store.blobs import UNFINISHED_S, Blobs, Bucket, put_blob
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.s3_blobs import PART_BYTES, S3Blobs
from skyward.testing.blob_suite import BlobSuite
from tests.hub.s3 import S3Server


@pytest.fixture
def s3_blobs(s3: S3Server) -> S3Blobs:
    return S3Blobs(s3.new_bucket())


class TestFolderBlobs(BlobSuite):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> FolderBlobs:
        self._folder = tmp_path
        return FolderBlobs(tmp_path)

    def kept(self, blobs: Blobs) -> list[str]:
        return [path.name for path in self._folder.rglob("*") if path.is_file()]


class TestS3Blobs(BlobSuite):
    @pytest.fixture
    def blobs(self, s3: S3Server) -> Iterator[Blobs]:
        self._s3, self._bucket = s3, s3.new_bucket("runs/")
        yield open_blobs(self._bucket)
        assert all(key.startswith("runs/") for key in s3.kept(self._bucket))

    def kept(self, blobs: Blobs) -> list[str]:
        return self._s3.kept(self._bucket)


def test_a_presigned_url_is_of_one_key_and_one_method_for_15_minutes(s3_blobs: S3Blobs) -> None:
    url = urlsplit(s3_blobs.presigned("a" * 64) or "")
    query = parse_qs(url.query)
    assert url.path == f"/{s3_blobs.bucket}/{'a' * 64}"
    assert query["X-Amz-Expires"] == ["900"]
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]  # this signature covers the method, the path and the query


def test_s3_that_goes_away_refuses_in_words_and_is_used_again_later(s3: S3Server, s3_blobs: S3Blobs) -> None:
    sha256, _ = put_blob(s3_blobs, [b"before"])
    writer = s3_blobs.writer()
    writer.write(bytes(PART_BYTES))
    s3.stop()
    try:
        for call in (
            writer.finish,
            lambda: put_blob(s3_blobs, [b"after"]),
            lambda: s3_blobs.open(sha256),
            lambda: s3_blobs.exists(sha256),
            lambda: s3_blobs.delete(sha256),
        ):
            with pytest.raises(Refusal, match="S3 cannot be used now, it does not answer; try again later") as refused:
                call()
            assert refused.value.reason is Reason.UNAVAILABLE
        open_blobs(s3.bucket_named(s3_blobs.bucket))  # a hub starts all the same
    finally:
        s3.start()
    assert b"".join(s3_blobs.open(sha256)) == b"before"
    put_blob(s3_blobs, [b"after"])


def test_an_object_of_the_wrong_size_is_written_again(s3: S3Server, s3_blobs: S3Blobs) -> None:
    sha256, _ = put_blob(s3_blobs, [b"whole"])
    s3.client().put_object(Bucket=s3_blobs.bucket, Key=s3_blobs.key(sha256), Body=b"who")
    put_blob(s3_blobs, [b"whole"])
    assert b"".join(s3_blobs.open(sha256)) == b"whole"


def test_a_bucket_that_is_not_there_is_refused_when_the_hub_starts(s3: S3Server) -> None:
    with pytest.raises(UsageError, match=r"storage\.bucket='nowhere'"):
        open_blobs(s3.bucket_named("nowhere"))
    with pytest.raises(UsageError, match=r"storage\.endpoint='nonsense'"):
        open_blobs(Bucket(name="x", endpoint="nonsense"))


def test_an_upload_of_a_dead_process_is_removed_from_a_folder_after_a_day(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    old, young = tmp_path / "unfinished" / "old", tmp_path / "unfinished" / "young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, times=(0, time.time() - UNFINISHED_S - 60))
    blobs.clean_up()
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["young"]


def test_an_upload_of_a_dead_process_is_removed_from_a_bucket(s3: S3Server) -> None:
    bucket = s3.new_bucket("runs")
    blobs = S3Blobs(bucket)
    blobs.writer().write(bytes(PART_BYTES))  # the server dates every upload to 2010
    s3.client().create_multipart_upload(Bucket=bucket.name, Key="of-another-program")
    blobs.clean_up()
    assert s3.kept(bucket) == ["of-another-program"]
