"""An index of packages: wheels of one line each, served on loopback as PyPI serves its own (PEP 503)."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import re
import socketserver
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Index", "make_wheel", "serve"]


def make_wheel(folder: Path, name: str, version: str, source: str, requires: tuple[str, ...] = ()) -> Path:
    """Make a wheel of one module with this source."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    path.write_bytes(content.getvalue())
    return path


class Index:
    """A package index. `requests` holds the requested paths."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.requests: list[str] = []


@contextmanager
def serve(folder: Path, login: str = "") -> Iterator[Index]:
    """Serve the wheels of the folder at http://127.0.0.1:<port>/simple, to `login` ("name:password") if that is set."""
    basic = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.requests.append(self.path)
            if login and self.headers.get("Authorization") != basic:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, kind = self.answer()
            self.send_response(200 if content is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET

        def answer(self) -> tuple[bytes | None, str]:
            if match := re.fullmatch(r"/simple/([a-z0-9-]+)/", self.path):
                wanted = match[1]
                names = [p.name for p in folder.glob("*.whl") if p.name.split("-")[0].replace("_", "-") == wanted]
                links = "".join(
                    f'<a href="/files/{name}#{_digest(folder / name)}">{name}</a>\n' for name in sorted(names)
                )
                return (f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if names else None), "text/html"
            path = folder / self.path.rpartition("/")[2]
            return (path.read_bytes() if path.is_file() else None), "application/octet-stream"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    # HTTPServer is not used, because it looks up the name of its address, which takes long without DNS.
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        index = Index(folder, f"http://127.0.0.1:{server.server_address[1]}/simple")
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()


def _digest(path: Path) -> str:
    return f"sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"
