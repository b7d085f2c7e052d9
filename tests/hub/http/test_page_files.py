"""Files of the pages, as they are served."""

from __future__ import annotations

import gzip
import posixpath
import re

import pytest

from skyward.hub.http.page_files import PageFiles

FILES = PageFiles()
MARKS = ("../pyproject.toml", "..%2f..", "/etc/passwd", "style/../main.js", "main.js/", "\0", "", "vendor", "main.js?x")


def test_the_document_has_no_inline_script_and_no_inline_style() -> None:
    text = FILES.document().body.decode()
    assert "<script>" not in text
    assert "style=" not in text
    assert "onclick" not in text


@pytest.mark.parametrize("name", MARKS)
def test_a_name_is_no_path(name: str) -> None:
    assert FILES.file(name).status == 404


@pytest.mark.parametrize("name", [*FILES])
def test_each_file_forbids_scripts_from_elsewhere_and_guessed_types(name: str) -> None:
    answer = FILES.file(name)
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] != "application/octet-stream"


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    etag = FILES.file("main.js").headers["etag"]
    answer = FILES.file("main.js", if_none_match=etag)
    assert (answer.status, answer.body) == (304, b"")


def test_files_that_the_document_names_are_kept_and_the_document_is_not() -> None:
    document = FILES.document()
    assert document.headers["cache-control"] == "no-cache"
    named = set(re.findall(r'"/ui/([^"]+)"', document.body.decode()))
    assert named
    for name in named:
        answer = FILES.file(name)
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]
        assert FILES.file(name.partition("/")[2]).headers["cache-control"] == "no-cache"


def test_a_file_of_another_version_is_sent_and_not_kept() -> None:
    answer = FILES.file("@0123456789abcdef/main.js")
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-cache")
    assert FILES.file("@0123456789abcdef/../main.js").status == 404


def test_large_files_are_compressed_if_the_browser_can_read_that() -> None:
    answer = FILES.file("vendor/uplot.js", accept_encoding="gzip, br")
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == FILES.file("vendor/uplot.js").body


def modules_from(name: str, seen: set[str]) -> set[str]:
    """Names of the modules that a module imports, and of those that they import."""
    text = FILES.file(name).body.decode()
    for imported in re.findall(r'^(?:im|ex)port\b[^"]*?from ?"(\.[^"]+)"', text, re.MULTILINE) + re.findall(
        r'(?:im|ex)port[^;"]*from"(\.[^"]+)"', text
    ):
        module = posixpath.normpath(posixpath.join(posixpath.dirname(name), imported))
        if module not in seen:
            seen.add(module)
            modules_from(module, seen)
    return seen


def test_the_document_names_each_module_so_that_the_browser_fetches_all_at_once() -> None:
    named = re.findall(r'rel="modulepreload" href="/ui/@\w+/([^"]+)"', FILES.document().body.decode())
    assert sorted(named) == sorted(modules_from("main.js", set()))
