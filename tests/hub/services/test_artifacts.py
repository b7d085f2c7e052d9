"""Artifacts: bytes by content, names that never become paths."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.hub.model.batches import Batch
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.services.hubs import ADA, ADMIN, add_project


async def stream(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.fixture
def tracking(database: Database, tmp_path: Path) -> Tracking:
    tracking = Tracking(database, FolderBlobs(tmp_path / "blobs"))
    asyncio.run(tracking.create_run(ADA, "0", run_id="r1"))
    return tracking


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


def test_a_file_comes_back_whole_and_in_parts(tracking: Tracking) -> None:
    content = os.urandom(3_000_000)

    async def run() -> None:
        put = await tracking.put_artifact(ADA, "r1", "models/m=1.bin", stream(content[:7], content[7:]), len(content))
        assert (put.size, put.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        _, whole = await tracking.open_artifact(ADA, "r1", "models/m=1.bin")
        assert b"".join(whole) == content
        _, part = await tracking.open_artifact(ADA, "r1", "models/m=1.bin", 1_000, 2_000_000)
        assert b"".join(part) == content[1_000:2_000_000]

    asyncio.run(run())


def test_folders_are_folded_in_lists(tracking: Tracking) -> None:
    async def run() -> None:
        for key in ("a/b/c.txt", "a/b.txt", "a0.txt", "z.txt", "a-b/x"):
            await tracking.put_artifact(ADA, "r1", key, stream(b"x"))
        root = await tracking.artifacts(ADA, "r1")
        assert [(item.key, item.is_directory) for item in root] == [
            ("a", True),
            ("a-b", True),
            ("a0.txt", False),
            ("z.txt", False),
        ]
        below = await tracking.artifacts(ADA, "r1", "a")
        assert [(item.key, item.is_directory) for item in below] == [("a/b", True), ("a/b.txt", False)]
        assert await tracking.artifacts(ADA, "r1", "z.txt") == []
        await tracking.delete_artifact(ADA, "r1", "a")
        assert [item.key for item in await tracking.artifacts(ADA, "r1")] == ["a-b", "a0.txt", "z.txt"]

    asyncio.run(run())


def test_equal_bytes_are_kept_once(tracking: Tracking, tmp_path: Path) -> None:
    async def run() -> None:
        for key in ("a", "b", "c"):
            await tracking.put_artifact(ADA, "r1", key, stream(b"same"))

    asyncio.run(run())
    assert len(files(tmp_path)) == 1


def test_bytes_that_differ_from_what_was_announced_are_refused(tracking: Tracking, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="3 bytes were received"):
        asyncio.run(tracking.put_artifact(ADA, "r1", "a", stream(b"abc"), 4))
    with pytest.raises(Refusal, match="the bytes received have"):
        asyncio.run(tracking.put_blob(ADA, "r1", "0" * 64, stream(b"abc")))
    assert files(tmp_path) == []


def test_an_upload_that_breaks_off_leaves_nothing(tracking: Tracking, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        asyncio.run(tracking.put_artifact(ADA, "r1", "a", broken()))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "key",
    [
        "", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b", "C:/x", "c:x", "a\0b", "a#b", "a?b",
        "..;/x", "%2e%2e/x", "%252e%252e/x", "a/%2e%2e%2fb", "a%5cb", "a\nb", "x" * 1001,
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(tracking: Tracking, key: str) -> None:
    for call in (
        tracking.put_artifact(ADA, "r1", key, stream(b"x")),
        tracking.open_artifact(ADA, "r1", key),
        tracking.delete_artifact(ADA, "r1", key),
    ):
        with pytest.raises(Refusal, match="Invalid path"):
            asyncio.run(call)


def test_a_project_cannot_name_the_bytes_of_another(tracking: Tracking, database: Database) -> None:
    content = b"secret of the first project"
    sha256 = hashlib.sha256(content).hexdigest()
    asyncio.run(tracking.put_artifact(ADA, "r1", "a", stream(content)))
    foreign = replace(ADMIN, project=add_project(database, "other"))
    records: list[list[object]] = [["run", {"experiment": "e"}], ["a", "stolen", len(content), sha256]]
    answer = asyncio.run(tracking.accept_batch(foreign, "r2", Batch("c", 1, records)))

    assert [record.number for record in answer.refused] == [2]
    for call in (tracking.open_artifact(foreign, "r1", "a"), tracking.artifacts(foreign, "r1")):
        with pytest.raises(Refusal) as refused:
            asyncio.run(call)
        assert refused.value.reason is Reason.MISSING


def test_a_client_uploads_bytes_first_and_names_them_then(tracking: Tracking) -> None:
    content = b"model"
    sha256 = hashlib.sha256(content).hexdigest()

    async def run() -> None:
        await tracking.accept_batch(ADA, "r2", Batch("c", 1, [["run", {"experiment": "e"}]]))
        await tracking.put_blob(ADA, "r2", sha256, stream(content))
        answer = await tracking.accept_batch(ADA, "r2", Batch("c", 2, [["a", "m.bin", len(content), sha256]]))
        assert not answer.refused
        _, pieces = await tracking.open_artifact(ADA, "r2", "m.bin")
        assert b"".join(pieces) == content

    asyncio.run(run())
