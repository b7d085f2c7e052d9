"""A folder of an object store as volumes use it: sizes, versions, copies and deletions of single files."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from skyward.stores.folders import LocalFolder, folder_at
from skyward.stores.objects import ObjectFolder


@pytest.fixture
def store() -> ObjectFolder:
    folder = folder_at(f"memory://{uuid.uuid4().hex}/data")
    assert isinstance(folder, ObjectFolder)
    return folder


def put(store: ObjectFolder, name: str, content: bytes) -> None:
    with store.create(name) as file:
        file.write(content)


def test_a_version_differs_when_the_content_does(store: ObjectFolder) -> None:
    assert store.entries() == {}
    put(store, "a", b"1")
    put(store, "deep/b", b"22")
    before = store.entries()
    assert {name: entry.size for name, entry in before.items()} == {"a": 1, "deep/b": 2}
    put(store, "a", b"2")
    after = store.entries()
    assert after["a"].version != before["a"].version
    assert after["deep/b"] == before["deep/b"]


def test_single_files_are_copied_and_deleted(store: ObjectFolder, tmp_path: Path) -> None:
    put(store, "deep/b", b"22")
    store.fetch("deep/b", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"22"
    store.delete("deep/b")
    store.delete("deep/b")
    assert store.walk() == []
    with pytest.raises(FileNotFoundError):
        store.fetch("deep/b", str(tmp_path / "c"))


def test_a_path_is_a_folder_of_the_disk(tmp_path: Path) -> None:
    assert isinstance(folder_at(tmp_path), LocalFolder)
    assert isinstance(folder_at(f"file://{tmp_path}"), LocalFolder)
