"""Files of the pages. They hold nothing secret, so anybody may read them; the data behind them needs a session."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import PurePosixPath

from ..model.access import Right
from ..model.refusal import Reason, Refusal
from .reply import Empty, Reply, Text
from .routing import Call, Route

POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    b"connect-src 'self'; frame-src 'self' blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY,
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-cache",
}
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
    ".json": b"application/json",
    ".txt": b"text/plain; charset=utf-8",
}
_BARE = b"""<!doctype html><meta charset=utf-8><title>skyward hub</title>
<p>The hub runs, but its pages are not installed. Its API is at <a href="/v1/openapi.json">/v1</a>."""


@cache
def files() -> dict[str, bytes]:
    """Read the files of the pages, by their path below `ui`. A path of a request never becomes one of the disk."""
    found: dict[str, bytes] = {}
    root = resources.files("skyward.hub").joinpath("ui")
    waiting = [("", root)] if root.is_dir() else []
    while waiting:
        prefix, folder = waiting.pop()
        for entry in folder.iterdir():
            name = f"{prefix}{entry.name}"
            if entry.is_dir():
                waiting.append((f"{name}/", entry))
            elif PurePosixPath(name).suffix in TYPES:
                found[name] = entry.read_bytes()
    return found


async def index(_call: Call, _request: Empty) -> Reply:
    body = files().get("index.html", _BARE)
    return Reply(body, content_type=TYPES[".html"], headers=HEADERS)


async def file(call: Call, _request: Empty) -> Reply:
    name = call.path["path"]
    body = files().get(name)
    if body is None:
        raise Refusal(Reason.MISSING, "path: no such file; begin at /", field="path")
    return Reply(body, content_type=TYPES[PurePosixPath(name).suffix], headers=HEADERS)


ROUTES = (
    Route("GET", "/", Empty, Text, Right.NONE, "page", index, "First page."),
    Route("GET", "/ui/{path:path}", Empty, Text, Right.NONE, "page", file, "File of the pages."),
)
