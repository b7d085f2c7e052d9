"""Files of the web pages: read once at start, served by name from memory.

A name in a request is a key of a dictionary and never a part of a path. Each path of a page answers with the same
document, and the script in it shows what the path says. The document names its files below `/ui/@VERSION/`, where
browsers keep them without asking again: to ask for 45 files took a third of the time in which a page opens. The files
say nothing about anybody's data, so they need no token; everything that the pages show comes from `/v1`.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["FILE_PATH", "PAGE_PATHS", "FileAnswer", "PageFiles"]

FILE_PATH = "/ui/{name:path}"
DOCUMENT = "index.html"

PAGE_PATHS = (
    "/",
    "/experiments",
    "/experiments/{experiment}",
    "/runs",
    "/runs/{run}",
    "/compare",
    "/jobs",
    "/jobs/{job}",
    "/sweeps",
    "/sweeps/{sweep}",
    "/capacity",
    "/usage",
    "/pools",
    "/pools/{pool}",
    "/projects",
    "/members",
    "/users",
    "/tokens",
    "/audit",
    "/sign-in",
)

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_ASK_AGAIN = {"cache-control": "no-cache"}  # answered with 304 where nothing changed
_KEEP = {"cache-control": "public, max-age=31536000, immutable"}
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
_WORTH_COMPRESSING = 1024


@dataclass(frozen=True, slots=True)
class FileAnswer:
    """An answer with a file: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class _PageFile:
    content: bytes
    media_type: str

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, 6, mtime=0)

    def answer(self, if_none_match: str, accept_encoding: str, *, is_kept: bool = False) -> FileAnswer:
        headers = {**_HEADERS, **(_KEEP if is_kept else _ASK_AGAIN), "content-type": self.media_type, "etag": self.etag}
        if self.etag in if_none_match:
            return FileAnswer(304, headers, b"")
        if len(self.content) > _WORTH_COMPRESSING and "gzip" in accept_encoding:
            return FileAnswer(200, {**headers, "content-encoding": "gzip"}, self.compressed)
        return FileAnswer(200, headers, self.content)


class PageFiles:
    """The files of the pages, in memory."""

    def __init__(self) -> None:
        self._files = dict(_read(files("skyward.hub") / "ui"))
        etags = "".join(self._files[name].etag for name in sorted(self._files))
        self.version = f"@{hashlib.sha256(etags.encode()).hexdigest()[:16]}"
        document = self._files[DOCUMENT]
        named = document.content.replace(b'"/ui/', f'"/ui/{self.version}/'.encode())
        self._files[DOCUMENT] = _PageFile(named, document.media_type)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def document(self, if_none_match: str = "", accept_encoding: str = "") -> FileAnswer:
        """Return the document, with which each of `PAGE_PATHS` answers."""
        return self.file(DOCUMENT, if_none_match, accept_encoding)

    def file(self, name: str, if_none_match: str = "", accept_encoding: str = "") -> FileAnswer:
        """Return the file of that name, or status 404.

        Args:
            name: Path below `/ui/`, decoded once. It may begin with `@` and a version.
            if_none_match: The request's header of that name.
            accept_encoding: The request's header of that name.
        """
        version = name.partition("/")[0] if name.startswith("@") else ""
        # Servers of two versions may stand behind one address: a file of another version is sent, and not kept.
        file = self._files.get(name.removeprefix(f"{version}/") if version else name)
        if file is None:
            return FileAnswer(
                404, {**_HEADERS, **_ASK_AGAIN, "content-type": "text/plain; charset=utf-8"}, b"no such file\n"
            )
        return file.answer(if_none_match, accept_encoding, is_kept=version == self.version)


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, _PageFile]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
        elif media_type := _TYPES.get(name[name.rfind(".") :]):
            yield name, _PageFile(entry.read_bytes(), media_type)
