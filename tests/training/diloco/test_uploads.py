"""Uploads that go on: only from exactly the bytes that are here, and by one request at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.training.diloco.frames import pieces_from
from skyward.training.diloco.rounds import UpdateKey
from skyward.training.diloco.uploads import Upload, Uploads

KEY = UpdateKey(worker="a", base_round=3, number=5)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(str(tmp_path))


def begun(uploads: Uploads, content: bytes, key: UpdateKey = KEY, name: str = "x") -> Upload:
    upload = uploads.begin(key, name, offset=0)
    assert upload is not None
    upload.file.write(content)
    upload.size = len(content)
    return upload


def test_a_later_request_goes_on_and_the_earlier_one_stops(uploads: Uploads) -> None:
    upload = begun(uploads, b"half")
    assert uploads.received(KEY, "x") == 4
    assert uploads.begin(KEY, "x", offset=4) is upload
    assert upload.requests == 2
    assert uploads.take(upload) is upload.file
    assert uploads.received(KEY, "x") == 0
    upload.file.close()


@pytest.mark.parametrize(
    ("key", "name", "offset"),
    [
        (KEY, "x", 3),
        (KEY, "other bytes", 4),
        (UpdateKey(worker="a", base_round=4, number=6), "x", 4),
        (UpdateKey(worker="b", base_round=3, number=5), "x", 4),
    ],
)
def test_other_bytes_are_not_gone_on_with(uploads: Uploads, key: UpdateKey, name: str, offset: int) -> None:
    upload = begun(uploads, b"half")
    assert uploads.begin(key, name, offset=offset) is None
    uploads.drop(upload)


def test_an_upload_without_a_name_is_not_gone_on_with(uploads: Uploads) -> None:
    upload = begun(uploads, b"half", name="")
    assert uploads.received(KEY, "") == 0
    uploads.drop(upload)


def test_a_new_upload_of_a_worker_ends_its_last_one(uploads: Uploads) -> None:
    former = begun(uploads, b"half")
    upload = begun(uploads, b"other", name="y")
    assert former.file.closed
    assert former.requests == 2  # its request stops
    uploads.drop(former)  # as that request does then
    assert uploads.received(KEY, "y") == 5
    uploads.keep_only({"b"})
    assert upload.file.closed
    assert uploads.received(KEY, "y") == 0


def test_the_rest_of_a_frame_begins_at_any_byte() -> None:
    pieces = [memoryview(b"head"), memoryview(b""), memoryview(b"data"), memoryview(b"end")]
    whole = b"".join(pieces)
    for offset in range(len(whole) + 1):
        assert b"".join(pieces_from(pieces, offset)) == whole[offset:]
