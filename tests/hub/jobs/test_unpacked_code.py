"""Code of jobs: unpacked once for each content, and private to each attempt where its program writes."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from skyward.hub.runner.unpacked_code import KEPT, forget_code, place_code

FILES = {"work/train.py": "print(1)", "work/data.csv": "1,2", "lib/deep/__init__.py": ""}


class Archive:
    """Archive of some files, which counts its downloads."""

    def __init__(self, folder: Path, files: Mapping[str, str] = FILES) -> None:
        self.downloads = 0
        self._file = folder / "archive"
        with tarfile.open(self._file, "w:gz") as archive:
            for name, text in files.items():
                path = folder / "sources" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                entry = archive.gettarinfo(path, name)
                entry.mtime = 0  # as in archives of the client
                with path.open("rb") as content:
                    archive.addfile(entry, content)

    def __call__(self, path: Path) -> None:
        self.downloads += 1
        shutil.copy(self._file, path)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


@pytest.fixture
def place(tmp_path: Path, archive: Archive) -> Callable[[str], Path]:
    """Place the code of an attempt of this name, and return its folder."""

    def place(attempt: str) -> Path:
        folder = tmp_path / attempt / "code"
        folder.mkdir(parents=True, exist_ok=True)
        place_code(folder, tmp_path / "store", "sha", archive)
        return folder

    return place


def read_all(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_code_is_unpacked_once_and_each_attempt_has_all_of_it(place: Callable[[str], Path], archive: Archive) -> None:
    one, two = place("one"), place("two")
    assert read_all(one) == read_all(two) == FILES
    assert archive.downloads == 1


def test_attempts_share_the_sources_and_no_other_file_or_folder(place: Callable[[str], Path]) -> None:
    one, two = place("one"), place("two")
    assert os.path.samefile(one / "work/train.py", two / "work/train.py")
    (one / "work/data.csv").write_text("3,4")
    (one / "work/result").write_text("new")
    (one / "work/train.py").unlink()
    assert read_all(two) == FILES
    assert read_all(place("three")) == FILES


def test_program_that_changes_its_own_sources_in_place_changes_no_later_attempt(
    place: Callable[[str], Path], archive: Archive
) -> None:
    (place("one") / "work/train.py").write_text("print(2)")
    assert read_all(place("two")) == FILES
    assert read_all(place("three")) == FILES
    assert archive.downloads == 3  # the changed one is found, removed, and kept again


@pytest.mark.parametrize("has_store", [True, False])
def test_program_can_put_its_own_files_into_a_zip_archive(
    place: Callable[[str], Path], tmp_path: Path, has_store: bool
) -> None:
    if not has_store:
        (tmp_path / "store").write_text("not a folder")
    shutil.make_archive(str(tmp_path / "snapshot"), "zip", place("one"))
    with zipfile.ZipFile(tmp_path / "snapshot.zip") as snapshot:
        assert FILES.keys() <= set(snapshot.namelist())


def test_code_that_an_older_version_kept_is_unpacked_again(place: Callable[[str], Path], tmp_path: Path) -> None:
    place("one")
    (kept,) = (tmp_path / "store").iterdir()
    os.utime(kept / "work/train.py", (0, 0))
    assert (place("two") / "work/train.py").stat().st_mtime > 0
    assert read_all(place("three")) == FILES


def test_incomplete_code_of_a_runner_that_died_is_replaced(place: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "one" / "code").mkdir(parents=True)
    (tmp_path / "one" / "code" / "half").write_text("half")
    assert read_all(place("one")) == FILES


def test_code_is_unpacked_for_one_attempt_where_no_store_can_be_made(
    place: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("not a folder")
    assert read_all(place("one")) == FILES


def test_newest_contents_stay_and_attempts_keep_the_links_of_older_ones(tmp_path: Path, archive: Archive) -> None:
    store, folder = tmp_path / "store", tmp_path / "attempt" / "code"
    for number in range(KEPT + 2):
        place_code(folder, store, f"sha{number}", archive)
        (kept,) = store.glob(f"*-sha{number}")
        os.utime(kept, (number, number))
    place_code(folder, store, "sha0", archive)  # used again, so it is the newest
    forget_code(store)
    kept_names = {path.name.rpartition("-")[2] for path in store.iterdir()}
    assert kept_names == {"sha0", *(f"sha{number}" for number in range(3, KEPT + 2))}
    assert read_all(folder) == FILES
    forget_code(tmp_path / "missing")
