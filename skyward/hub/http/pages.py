"""Routes of the pages. Their files hold nothing secret, so anybody may read them; the data need a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ..model.access import Right
from .page_files import FILE_PATH, PAGE_PATHS, FileAnswer, PageFiles
from .reply import Bytes, HttpReply, Text
from .routing import Call, Route

PROGRAMS = ("/v1/", "/api/", "/ajax-api/")
"""Beginnings of paths that answer programs, by JSON only."""


@cache
def _files() -> PageFiles:
    return PageFiles()


def _asked(call: Call) -> tuple[str, str]:
    return call.header(b"if-none-match"), call.header(b"accept-encoding")


def _reply(answer: FileAnswer) -> HttpReply:
    headers = {name.encode(): value.encode() for name, value in answer.headers.items()}
    content_type = headers.pop(b"content-type")
    del headers[b"x-content-type-options"]  # stands on every answer
    return HttpReply(answer.body, answer.status, content_type, headers)


async def page(call: Call, _request: None) -> HttpReply:
    return _reply(_files().document(*_asked(call)))


async def file(call: Call, _request: None) -> HttpReply:
    answer = _files().file(call.path["name"], *_asked(call))
    if answer.status == 404 and _is_read_by_a_person(call.headers):
        return missing(call.headers)
    return _reply(answer)


def is_missing_page(method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request for an unknown path comes from a person at a browser, not from a program."""
    return method == "GET" and not path.startswith(PROGRAMS) and _is_read_by_a_person(headers)


def missing(headers: Mapping[bytes, bytes]) -> HttpReply:
    """Return the page that says where to go instead. It is the same for everybody, so strangers learn nothing."""
    encoding = headers.get(b"accept-encoding", b"").decode("latin-1")
    return _reply(replace(_files().document("", encoding), status=404))


def _is_read_by_a_person(headers: Mapping[bytes, bytes]) -> bool:
    return b"text/html" in headers.get(b"accept", b"")


ROUTES = (
    Route("GET", "/", Bytes, Text, Right.NONE, "page", page, "Page that the path names.", twins=PAGE_PATHS[1:]),
    Route("GET", FILE_PATH, Bytes, Text, Right.NONE, "page", file, "File of the pages."),
)
