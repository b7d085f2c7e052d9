"""The documentation site: its reference has every public name, and its navigation every page. `make docs` builds it."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, get_type_hints

import pytest
import yaml

from skyward.cli import build_parser
from tests.cli.test_help import parsers

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        return importlib.import_module("pages")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def assembled(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    site.assemble(folder)
    return folder


def test_every_public_name_has_an_entry(assembled: Path) -> None:
    from reference import MODULES  # type: ignore[import-not-found]  # the fixture put its folder on the path

    for module in MODULES:
        page = (assembled / "reference" / f"{module}.md").read_text()
        entries = set(re.findall(r'^::: ([\w.]+)$|id="([\w.]+)"', page, re.MULTILINE))
        entries_of_page = {first or second for first, second in entries}
        names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        assert names - entries_of_page - set(MODULES) == set()


def test_every_package_with_a_stub_has_a_page() -> None:
    from reference import MODULES

    stubs = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "skyward").rglob("__init__.pyi")}
    assert stubs <= set(MODULES)


def test_every_page_is_in_the_navigation(assembled: Path) -> None:
    named = set(re.findall(r"[\w./-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert named == {str(path.relative_to(assembled)) for path in assembled.rglob("*.md")}


def test_every_command_has_an_entry(assembled: Path) -> None:
    page = (assembled / "reference" / "cli.md").read_text()
    assert {parser.prog for parser in parsers(build_parser())} == set(
        re.findall(r"^##+ (skyward.*)$", page, re.MULTILINE)
    )


def test_every_key_of_the_configuration_has_a_type(assembled: Path) -> None:
    page = (assembled / "reference" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    assert {"provider", "nodes", "budget_usd", "pip", "hosts", "region"} <= {key for key, _ in rows}
    assert all(kind.strip() for _, kind in rows)


def test_assembling_again_changes_nothing(site: ModuleType, assembled: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in assembled.rglob("*") if path.is_file()}
    (assembled / "stale.md").write_text("left by an older version")
    site.assemble(assembled)
    assert {path: path.stat().st_mtime_ns for path in assembled.rglob("*") if path.is_file()} == before


def test_every_route_of_the_hub_has_a_row(assembled: Path) -> None:
    from skyward.hub.http.table import ROUTES

    page = (assembled / "reference" / "hub_routes.md").read_text()
    rows = {line.split(" |")[0] for line in page.splitlines() if line.startswith("| `")}
    for route in ROUTES:
        assert any(row.startswith(f"| `{route.method}`") and f"`{route.path}`" in row for row in rows), route.path
        assert route.summary in page
    anchors = set(re.findall(r'id="(struct-\w+)"', page))
    assert set(re.findall(r"\(#(struct-\w+)\)", page)) <= anchors


def test_every_key_of_the_hubs_configuration_has_a_row_with_a_text(assembled: Path) -> None:
    from skyward.hub.http.settings import Settings

    page = (assembled / "reference" / "hub_configuration.md").read_text()
    for section, kind in get_type_hints(Settings).items():
        for field in dataclasses.fields(kind):
            row = next(line for line in page.splitlines() if f"`SKYWARD_HUB_{section}_{field.name}`".upper() in line)
            assert row.startswith(f"| `{field.name}` | ")
            assert row.endswith(". |"), row


def test_a_page_read_from_a_folder_has_workers_for_its_search(page: Page, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    shim = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["polyfills"]
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', event => postMessage([event.data, 'IFrameWorker' in parent]))"
    )
    (tmp_path / "index.html").write_text(
        f"<!doctype html><script src='{ROOT / 'docs' / 'site' / shim[0]}'></script><p id=answer></p><script>"
        "const worker = new Worker('worker.js');"
        "worker.addEventListener('message', event => answer.textContent = JSON.stringify(event.data));"
        "worker.postMessage('lease')</script>"
    )
    page.goto((tmp_path / "index.html").as_uri())
    expect(page.locator("#answer")).to_have_text('["lease",true]')
