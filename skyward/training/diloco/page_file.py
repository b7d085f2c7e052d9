"""The page of a server: one file that refers to nothing else, and the policy by which a browser runs only its script.

It holds nothing secret, so it needs no token. Its script does: it takes the token from the fragment of the address,
which browsers never send, and asks the server as every other client does. Browsers send nothing by themselves, as they
would send a cookie, so other sites can send no requests in a person's name.

Colours, cards, tables and formats are the hub's, by its own files.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_HUB_STYLE = ("base", "shell", "parts", "table", "charts")
_MODULE = re.compile(r"^(?:export (?=function)|import .*\n)", re.MULTILINE)
_FIELD = re.compile(r"\{(icon|style|theme|script)\}")


class PageFile(NamedTuple):
    """The page, and the headers that go with it."""

    content: bytes
    headers: Mapping[str, str]


@cache
def page_file() -> PageFile:
    """Return the page."""
    own, hub = files(__package__) / "page", files("skyward") / "hub" / "ui"
    parts = {
        "icon": base64.b64encode((hub / "icon.svg").read_bytes()).decode(),
        "style": "\n".join(
            file.read_text(encoding="utf-8")
            for file in (*(hub / "style" / f"{name}.css" for name in _HUB_STYLE), own / "page.css")
        ),
        "theme": (hub / "theme.js").read_text(encoding="utf-8"),
        # Two modules become one script, because there is no second file to import.
        "script": _MODULE.sub(
            "", "".join(file.read_text(encoding="utf-8") for file in (hub / "core" / "format.js", own / "page.js"))
        ),
    }
    text = _FIELD.sub(lambda field: parts[field[1]], (own / "page.html").read_text(encoding="utf-8"))
    policy = {
        "default-src": "'none'",
        "script-src": f"{_hash_of(parts['theme'])} {_hash_of(parts['script'])}",
        "style-src": _hash_of(parts["style"]),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "content-type": "text/html; charset=utf-8",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return PageFile(text.encode(), headers)


def _hash_of(text: str) -> str:
    """Return the source expression of a script or a style in the page. Source: Content Security Policy Level 3."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
