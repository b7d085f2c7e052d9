"""The libraries of the pages are the files of npm's packages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from skyward.hub.http.page_files import PageFiles
from tests.hub.ui import vendor

HERE = Path(__file__).parent
ENTRIES: list[dict[str, Any]] = json.loads((vendor.VENDOR / "manifest.json").read_text())
ABOUT_BYTES = 90_000


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_a_library_is_the_file_of_its_package(entry: dict[str, Any]) -> None:
    text = (vendor.VENDOR / entry["file"]).read_text()
    for old, new in entry["rewritten"].items():
        text = text.replace(new, old)
    assert hashlib.sha256(text.encode()).hexdigest() == entry["sha256"]


def test_the_manifest_names_each_library_with_its_licence() -> None:
    assert [entry["file"] for entry in ENTRIES] == [library.file for library in vendor.LIBRARIES]
    notices = (vendor.VENDOR / "LICENSES.txt").read_text()
    for entry in ENTRIES:
        assert entry["license"] in {"MIT", "Apache-2.0"}
        assert f"{entry['package']} {entry['version']}\n" in notices


def test_the_manifest_has_the_versions_of_the_lock_file() -> None:
    locked = json.loads((HERE / "package-lock.json").read_text())["packages"]
    for entry in ENTRIES:
        assert locked[f"node_modules/{entry['package']}"]["version"] == entry["version"]


def test_the_libraries_stay_small() -> None:
    assert sum((vendor.VENDOR / library.file).stat().st_size for library in vendor.LIBRARIES) < ABOUT_BYTES


def test_the_libraries_name_no_file_elsewhere() -> None:
    files = PageFiles()
    for name in files:
        if name.endswith((".js", ".html", ".css")) and not name.startswith("vendor/"):
            text = files.file(name).body.decode()
            assert "http://" not in text, name
            assert "https://" not in text, name
