"""Copies between an object store, here one in memory, and its copy on a disk."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from skyward.errors import VolumeFailed
from skyward.node.slot.volume_index import VolumeCopy
from skyward.node.slot.volume_sync import fetch, save
from skyward.stores.folders import folder_at
from skyward.stores.objects import ObjectFolder, StoredFile

GIB = 2**30


@pytest.fixture
def store() -> ObjectFolder:
    folder = folder_at(f"memory://{uuid.uuid4().hex}/data")
    assert isinstance(folder, ObjectFolder)
    return folder


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


def new_copy(tmp_path: Path, name: str = "copy") -> VolumeCopy:
    (tmp_path / name / "files").mkdir(parents=True)
    return VolumeCopy(str(tmp_path / name))


def put(store: ObjectFolder, **files: str) -> None:
    for name, text in files.items():
        with store.create(name.replace("__", "/")) as file:
            file.write(text.encode())


def in_store(store: ObjectFolder) -> dict[str, str]:
    return {name: store.read([name])[name].decode() for name in store.walk()}


def on_disk(copy: VolumeCopy) -> dict[str, str]:
    root = Path(copy.files)
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def write(copy: VolumeCopy, name: str, text: str) -> None:
    path = Path(copy.files, name)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)


def read_only(store: ObjectFolder, copy: VolumeCopy, limit: int = GIB) -> None:
    fetch(store, copy, keeps_changes=False, limit_bytes=limit)


def writable(store: ObjectFolder, copy: VolumeCopy) -> None:
    fetch(store, copy, keeps_changes=True, limit_bytes=GIB)


def test_a_read_only_copy_follows_the_store_and_repairs_itself(store: ObjectFolder, tmp_path: Path) -> None:
    copy = new_copy(tmp_path)
    read_only(store, copy)
    assert on_disk(copy) == {}
    put(store, a="1", sub__b="2", sub__c="3")
    read_only(store, copy)
    assert on_disk(copy) == in_store(store) == {"a": "1", "sub/b": "2", "sub/c": "3"}
    kept = os.stat(f"{copy.files}/sub/c").st_ino
    write(copy, "a", "spoilt")
    write(copy, "extra", "a task left it")
    put(store, sub__b="22")
    Path(copy.home, "part-of-a-killed-fetch").write_text("1")
    read_only(store, copy)
    assert on_disk(copy) == in_store(store) == {"a": "1", "sub/b": "22", "sub/c": "3"}
    assert os.stat(f"{copy.files}/sub/c").st_ino == kept  # only what differs is copied
    store.child("sub").remove()
    read_only(store, copy)
    assert on_disk(copy) == {"a": "1"}
    assert sorted(os.listdir(copy.home)) == ["files", "index.json"]
    assert os.listdir(copy.files) == ["a"]


def test_changes_are_saved_and_only_they(store: ObjectFolder, tmp_path: Path) -> None:
    put(store, a="1", b="2", c="3")
    copy = new_copy(tmp_path)
    writable(store, copy)
    assert copy.changes() == (set(), set())
    write(copy, "a", "changed")
    write(copy, "deep/new", "4")
    os.unlink(f"{copy.files}/b")
    put(store, d="by another")
    assert copy.changes() == ({"a", "deep/new"}, {"b"})
    save(store, copy, overwrites=False)
    assert in_store(store) == {"a": "changed", "c": "3", "d": "by another", "deep/new": "4"}
    assert copy.changes() == (set(), set())
    writable(store, copy)
    assert on_disk(copy) == in_store(store)


def test_a_file_that_two_have_changed_is_not_overwritten(store: ObjectFolder, tmp_path: Path) -> None:
    put(store, a="1", b="2", c="3")
    one, two = new_copy(tmp_path, "one"), new_copy(tmp_path, "two")
    writable(store, one)
    writable(store, two)
    for copy, text in ((one, "one"), (two, "two")):
        for name in ("a", "new", text):
            write(copy, name, text)
    os.unlink(f"{one.files}/b")
    os.unlink(f"{two.files}/b")
    save(store, one, overwrites=False)
    with pytest.raises(VolumeFailed, match="a, new: changed here and in the store") as failed:
        save(store, two, overwrites=False)
    assert failed.value.files == ("a", "new")
    assert in_store(store) == {"a": "one", "c": "3", "new": "one", "one": "one", "two": "two"}
    with pytest.raises(VolumeFailed, match="changed here and in the store"):
        writable(store, two)
    save(store, two, overwrites=True)
    assert in_store(store)["a"] == in_store(store)["new"] == "two"
    assert two.changes() == (set(), set())
    writable(store, one)
    assert on_disk(one) == on_disk(two) | {"one": "one"} == in_store(store)


def test_names_and_sizes_that_do_not_fit_are_refused(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = new_copy(tmp_path)
    put(store, a="12345")
    with pytest.raises(VolumeFailed, match=r"has .* GiB, but cache_gib=.*; raise cache_gib"):
        read_only(store, copy, limit=4)
    for names, problem in (
        (["a", "a/b"], "'a' cannot be the name of a file"),
        (["../x"], "'../x' cannot be"),
        ([""], "is a file; name the folder"),
    ):
        entries = {name: StoredFile(1, "1") for name in names}
        monkeypatch.setattr(ObjectFolder, "entries", lambda _, entries=entries: entries)
        with pytest.raises(VolumeFailed, match=problem):
            read_only(store, copy)
    assert on_disk(copy) == {}


def test_unused_caches_make_room(store: ObjectFolder, tmp_path: Path) -> None:
    caches = tmp_path / "xdg" / "skyward" / "volume-caches"
    for name, at in (("old", 1), ("new", 2)):
        cache = new_copy(caches, name)
        write(cache, "x", "12345678")
        cache.write_index({})
        os.utime(f"{cache.home}/index.json", (at, at))
    put(store, a="12345")
    read_only(store, new_copy(tmp_path), limit=15)
    assert os.listdir(caches) == ["new"]


def test_a_lost_store_is_an_error_and_the_next_attempt_continues(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, a="1", b="2")
    copy = new_copy(tmp_path)
    get = ObjectFolder.fetch

    def fail(self: ObjectFolder, name: str, path: str) -> None:
        if name == "b":
            raise OSError("the store is gone")
        get(self, name, path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the store is gone"):
        patch.setattr(ObjectFolder, "fetch", fail)
        read_only(store, copy)
    assert on_disk(copy) == {"a": "1"}
    assert list(copy.index()) == ["a"]
    read_only(store, copy)
    assert on_disk(copy) == {"a": "1", "b": "2"}
