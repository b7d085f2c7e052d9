"""Routes of the pages. Their files hold nothing secret, so anybody may read them; the data need a session."""

from __future__ import annotations

from functools import cache

from ..model.access import Right
from .page_files import FILE_PATH, PAGE_PATHS, FileAnswer, PageFiles
from .reply import Bytes, HttpReply, Text
from .routing import Call, Route


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
    return _reply(_files().file(call.path["name"], *_asked(call)))


ROUTES = (
    Route("GET", "/", Bytes, Text, Right.NONE, "page", page, "Page that the path names.", twins=PAGE_PATHS[1:]),
    Route("GET", FILE_PATH, Bytes, Text, Right.NONE, "page", file, "File of the pages."),
)
