"""Values that wait on a node for a link: in memory, in files, or as the error of their call."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from skyward.node.agent.spool import Spool
from skyward.node.slot.link import blob_body
from skyward.wire.blobs import Blob
from skyward.wire.failures import EncodedFailure, decode_failure
from skyward.wire.frames import HAS_FD, Frame, FrameKind

CONTENT = bytes(range(256)) * 100


def blob_frame(ident: int) -> tuple[Frame, Blob]:
    blob = Blob.unnamed(memoryview(CONTENT), bytes([ident]) * 16)
    return Frame(FrameKind.BLOB, HAS_FD, 0, ident, blob_body(blob.digest, blob.size), blob.fd), blob


def result(ident: int, kind: FrameKind = FrameKind.RESULT) -> Frame:
    return Frame(kind, 0, 0, ident, b"value")


def test_within_the_limit_frames_pass_unchanged(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), len(CONTENT))
    frame, _blob = blob_frame(1)
    assert list(spool.pass_on(frame, 0)) == [frame]
    assert list(spool.pass_on(result(1), 0)) == [result(1)]


def test_beyond_the_limit_a_blob_is_a_file_without_a_name(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), len(CONTENT))
    frame, _blob = blob_frame(1)
    for passed in spool.pass_on(frame, 1):
        assert passed.fd != frame.fd
        assert passed._replace(fd=frame.fd) == frame
        assert os.pread(passed.fd, len(CONTENT) + 1, 0) == CONTENT
    assert os.listdir(tmp_path / "spool") == []


def test_without_room_only_the_call_itself_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spool").touch()  # a folder cannot be made there, as on a full disk
    spool = Spool(str(tmp_path), 10)
    frame, _blob = blob_frame(1)
    assert list(spool.pass_on(frame, 0)) == []
    assert spool.has_failed
    assert list(spool.pass_on(result(1, FrameKind.ITEM), 0)) == []
    assert list(spool.pass_on(result(2), 0)) == [result(2)]
    (failed,) = spool.pass_on(result(1), 0)
    assert (failed.kind, failed.ident) == (FrameKind.ERROR, 1)
    failure: EncodedFailure = pickle.loads(failed.body)
    error = decode_failure(failure, where="node 0", node=0, task="f")
    assert isinstance(error, OSError)
    assert error.errno == errno.EEXIST
    assert "has no room" in str(error)
    assert not spool.has_failed
    assert "has no room" in capfd.readouterr().err


def test_a_call_that_failed_or_is_lost_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    spool = Spool(str(tmp_path), 10)
    for ident in (1, 2):
        frame, _blob = blob_frame(ident)
        assert list(spool.pass_on(frame, 0)) == []
    assert list(spool.pass_on(result(1, FrameKind.ERROR), 0)) == [result(1, FrameKind.ERROR)]
    spool.forget(2)
    assert not spool.has_failed
