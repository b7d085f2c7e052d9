"""A reverse proxy before a hub: it answers for the hub while it is told to, and takes no large body."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class Proxy:
    """A proxy on loopback, in threads of this process. Leaving the block ends it.

    Args:
        port: The hub's port.

    Attributes:
        status: Status that it answers itself, with a line of text. None: it passes requests on.
        answered: Paths of the requests that it answered with `status`.
        most_bytes: Largest body that it passes on. It answers 413 to others.
    """

    def __init__(self, port: int) -> None:
        self.status: int | None = None
        self.answered: list[str] = []
        self.most_bytes = 1 << 40
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _pass_on(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if proxy.status is not None:
                    proxy.answered.append(self.path)
                    self._answer(proxy.status, b"default backend", "text/plain")
                elif length > proxy.most_bytes:
                    self._answer(413, b"<h1>413 Request Entity Too Large</h1>", "text/html")
                else:
                    upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    headers = {
                        name: value for name, value in self.headers.items() if name not in ("Host", "Connection")
                    }
                    upstream.request(self.command, self.path, body if length else None, headers)
                    answer = upstream.getresponse()
                    self._answer(answer.status, answer.read(), answer.headers["Content-Type"] or "text/plain")
                    upstream.close()

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = _pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
