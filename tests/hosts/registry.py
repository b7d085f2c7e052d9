"""Registry of container images: what `podman pull` reads, from the files of one saved image."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

__all__ = ["serve_image"]


@contextlib.contextmanager
def serve_image(folder: Path, address: str) -> Iterator[str]:
    """Serve an image, whatever name is asked for. Return the registry's address with its port.

    Args:
        folder: Folder of `Podman.save`.
        address: Address to listen on.
    """
    manifest = (folder / "manifest.json").read_bytes()
    kind = str(json.loads(manifest)["mediaType"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.strip("/").split("/")
            if parts == ["v2"]:
                self._answer(b"{}", "application/json")
            elif parts[-2] == "manifests":
                self._answer(manifest, kind)
            elif (path := folder / parts[-1].removeprefix("sha256:")).is_file():
                self._answer(path.read_bytes(), "application/octet-stream")
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def server_bind(self) -> None:
            TCPServer.server_bind(self)  # HTTPServer's own looks up a name, which hangs where nobody serves names
            self.server_name, self.server_port = address, int(self.server_address[1])

    with Server((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"{address}:{server.server_port}"
        server.shutdown()
        thread.join()
